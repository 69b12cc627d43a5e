"""A small InferenceService over real gRPC, and the command run in this process."""

import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass

import grpc
import pytest
from click.testing import CliRunner
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from stepwire.cli.main import run
from stepwire.rpc.errors import STATUS_DETAILS_KEY, StepwireError, to_status
from stepwire.v1 import common_pb2, inference_pb2, inference_pb2_grpc


class FakeService(inference_pb2_grpc.InferenceServiceServicer):
    """Answers with the words of `answer`; notes what it was asked. `error` fails every request; `room`, those that may
    become longer."""

    def __init__(self) -> None:
        self.answer = ["Par", "is", "."]
        self.requests: list[inference_pb2.GenerateRequest] = []
        self.metadata: list[dict[str, str]] = []
        self.error: StepwireError | None = None
        self.room = 2**31
        self.finish_reason = inference_pb2.FINISH_REASON_STOP
        self.hang_after: int | None = None
        self.cancelled = threading.Event()

    def Generate(
        self, request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.GenerateResponse]:
        self.requests.append(request)
        self.metadata.append({key: str(value) for key, value in context.invocation_metadata()})
        context.add_callback(self.cancelled.set)
        if self.error is not None:
            self._abort(context, self.error)
        if request.sampling.max_tokens > self.room:
            metadata = {"prompt_tokens": "5", "max_tokens": str(request.sampling.max_tokens)}
            self._abort(context, StepwireError("PROMPT_TOO_LONG", "more than the context holds", metadata))
        started = inference_pb2.GenerateStarted(request_id="r-1", seed=7, model="fake", prompt_token_count=5)
        yield inference_pb2.GenerateResponse(started=started)
        for position, word in enumerate(self.answer):
            if position == self.hang_after:
                self.cancelled.wait(60)
            for index in range(request.sampling.n or 1):
                yield inference_pb2.GenerateResponse(output=self._output(request, index, position, word))
        usage = inference_pb2.Usage(prompt_token_count=5, output_token_count=len(self.answer), cached_token_count=2)
        finished = inference_pb2.GenerateFinished(usage=usage, queue_duration=Duration(nanos=1_000_000))
        yield inference_pb2.GenerateResponse(finished=finished)

    def GetModel(
        self, request: inference_pb2.GetModelRequest, context: grpc.ServicerContext
    ) -> inference_pb2.GetModelResponse:
        return inference_pb2.GetModelResponse(model=_model())

    def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: grpc.ServicerContext
    ) -> inference_pb2.ListModelsResponse:
        return inference_pb2.ListModelsResponse(models=[_model()])

    def _output(
        self, request: inference_pb2.GenerateRequest, index: int, position: int, word: str
    ) -> inference_pb2.GenerateOutput:
        is_last = position == len(self.answer) - 1
        output = inference_pb2.GenerateOutput(
            sequence_index=index,
            position=position,
            token_ids=[100 + position],
            text=word,
            finish_reason=self.finish_reason if is_last else inference_pb2.FINISH_REASON_UNSPECIFIED,
        )
        if request.sampling.HasField("logprobs"):
            sampled = common_pb2.TokenLogprob(token_id=100 + position, logprob=-0.25)
            output.logprobs.append(common_pb2.PositionLogprobs(sampled=sampled, top=[sampled]))
        return output

    def _abort(self, context: grpc.ServicerContext, error: StepwireError) -> None:
        context.set_trailing_metadata([(STATUS_DETAILS_KEY, to_status(error).SerializeToString())])
        context.abort(error.code, error.message)


def _model() -> inference_pb2.Model:
    return inference_pb2.Model(
        name="fake",
        architecture="LlamaForCausalLM",
        dtype="bfloat16",
        max_model_len=2048,
        state=inference_pb2.MODEL_STATE_READY,
        block_count=100,
        free_block_count=90,
    )


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    exit_code: int
    stdout: str
    stderr: str


def run_command(*arguments: str, stdin: str | None = None) -> Done:
    """Runs the command in this process, as its entry point does."""
    with CliRunner().isolation(input=stdin) as (stdout, stderr, _):
        code = run(arguments)
        return Done(code, stdout.getvalue().decode(), stderr.getvalue().decode())


class Command:
    """Runs `stepwire` commands against the service."""

    def __init__(self, target: str, service: FakeService, health_servicer: health.HealthServicer) -> None:
        self.target = target
        self.service = service
        self.health = health_servicer

    def __call__(self, *arguments: str, stdin: str | None = None) -> Done:
        return run_command(*arguments, "--target", self.target, stdin=stdin)


@pytest.fixture
def command() -> Iterator[Command]:
    server = grpc.server(futures.ThreadPoolExecutor(4))
    service, health_servicer = FakeService(), health.HealthServicer()
    health_servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(service, server)
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield Command(f"127.0.0.1:{port}", service, health_servicer)
    service.cancelled.set()
    server.stop(None).wait()


@pytest.fixture(name="run_command")
def _run_command() -> Callable[..., Done]:
    return run_command
