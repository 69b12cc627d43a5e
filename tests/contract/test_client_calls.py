"""Both clients against a service that plays back a script, over real gRPC."""

import asyncio
import gc
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind
from opentelemetry.trace import StatusCode as SpanStatus

from stepwire import AsyncClient, Client, Message, StepwireError
from stepwire.client import Completion, Event, Finished, FinishReason, Model, ModelState, Output, Started, Usage
from stepwire.rpc.server import bind, create_server
from stepwire.telemetry import names
from stepwire.v1 import inference_pb2 as pb
from stepwire.v1 import inference_pb2_grpc


def output(position: int, text: str, **fields: Any) -> pb.GenerateResponse:
    return pb.GenerateResponse(output=pb.GenerateOutput(position=position, token_ids=[position], text=text, **fields))


STARTED = pb.GenerateResponse(
    started=pb.GenerateStarted(request_id="r", seed=2**64 - 1, model="m", prompt_token_count=3)
)
FINISHED = pb.GenerateResponse(
    finished=pb.GenerateFinished(usage=pb.Usage(prompt_token_count=3, output_token_count=2, cached_token_count=1))
)
LAST = output(1, " there", finish_reason=pb.FINISH_REASON_STOP, stop_token_id=0)
SCRIPT = [STARTED, output(0, "hello"), LAST, FINISHED]


class Service(inference_pb2_grpc.InferenceServiceServicer):
    """Sends `script`, then raises `error`, or with `hold` waits; counts how its streams are left."""

    def __init__(self) -> None:
        self.script: Sequence[pb.GenerateResponse] = SCRIPT
        self.error: StepwireError | None = None
        self.hold = False
        self.requests: list[Any] = []
        self.metadata: list[dict[str, str]] = []
        self.model_states: list[Any] = [pb.MODEL_STATE_READY]
        self.reached = asyncio.Event()
        self.both_reached = asyncio.Event()
        self.left = asyncio.Event()

    async def _begin(self, request: Any, context: Any) -> None:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        if self.error and not self.script:
            raise self.error

    async def _finish(self) -> None:
        self.reached.set()
        if len(self.requests) == 2:
            self.both_reached.set()
        if self.error:
            raise self.error
        if self.hold:
            await asyncio.Event().wait()

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        try:
            await self._begin(request, context)
            for response in self.script:
                yield response
            await self._finish()
        finally:
            self.left.set()

    async def Tokenize(self, request: Any, context: Any) -> pb.TokenizeResponse:
        try:
            await self._begin(request, context)
            await self._finish()
            return pb.TokenizeResponse(token_ids=[1, 2])
        finally:
            self.left.set()

    async def Detokenize(self, request: Any, context: Any) -> pb.DetokenizeResponse:
        await self._begin(request, context)
        return pb.DetokenizeResponse(text="text")

    async def ListModels(self, request: Any, context: Any) -> pb.ListModelsResponse:
        await self._begin(request, context)
        return pb.ListModelsResponse(models=[pb.Model(name="a"), pb.Model(name="b")])

    async def GetModel(self, request: Any, context: Any) -> pb.GetModelResponse:
        await self._begin(request, context)
        state = self.model_states.pop(0) if len(self.model_states) > 1 else self.model_states[0]
        return pb.GetModelResponse(model=pb.Model(name="a", state=state, eos_token_ids=[2], block_count=9))


class Exporter(InMemorySpanExporter):
    """Says on its event loop that a span has ended, whichever thread ended it."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.get_running_loop()
        self.exported = asyncio.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = super().export(spans)
        self.loop.call_soon_threadsafe(self.exported.set)
        return result


class Rig:
    """A service, and one way of calling it: `kind` is "sync" or "async"."""

    def __init__(self, kind: str, target: str, service: Service, key: str | None) -> None:
        self.exporter = Exporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.target = target
        self.service = service
        self.client: Any = (Client if kind == "sync" else AsyncClient)(target, key=key, tracer_provider=self.provider)
        self.is_sync = kind == "sync"

    async def do(self, method: str, *args: Any, **kwargs: Any) -> Any:
        function = getattr(self.client, method)
        return await (asyncio.to_thread(function, *args, **kwargs) if self.is_sync else function(*args, **kwargs))

    async def events(self, *args: Any, into: list[Event] | None = None, **kwargs: Any) -> list[Event]:
        events: list[Event] = [] if into is None else into
        if self.is_sync:
            await asyncio.to_thread(lambda: events.extend(self.client.generate(*args, **kwargs)))
        else:
            async for event in self.client.generate(*args, **kwargs):
                events.append(event)
        return events

    async def span(self) -> ReadableSpan:
        async with asyncio.timeout(5):
            await self.exporter.exported.wait()
        (span,) = self.exporter.get_finished_spans()
        return span

    async def close(self) -> None:
        await self.do("close")


@asynccontextmanager
async def running(kind: str, *, key: str | None = None) -> AsyncIterator[Rig]:
    service = Service()
    server = create_server(tracer_provider=None, max_message_bytes=1 << 20, key=key)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(service, server)
    target = f"127.0.0.1:{bind(server, '127.0.0.1', 0)}"
    await server.start()
    rig = Rig(kind, target, service, key)
    try:
        yield rig
    finally:
        await rig.close()
        await server.stop(0)


@pytest.fixture(params=["sync", "async"])
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    async with running(request.param) as rig:
        yield rig


def assert_span(span: ReadableSpan, method: str, code: str) -> None:
    assert span.name == f"stepwire.v1.InferenceService/{method}"
    assert span.kind is SpanKind.CLIENT
    assert span.attributes is not None
    assert span.attributes[names.RPC_STATUS] == code
    assert span.attributes[names.SERVER_ADDRESS] == "127.0.0.1"
    assert span.status.status_code is (SpanStatus.UNSET if code == "OK" else SpanStatus.ERROR)


async def test_a_request_and_its_events(rig: Rig) -> None:
    events = await rig.events("hi", temperature=0.0, request_id="r", priority=2, model="m", stop=["a"], n=2)
    assert events == [
        Started("r", 2**64 - 1, "m", 3),
        Output(0, 0, (0,), "hello"),
        Output(0, 1, (1,), " there", (), FinishReason.STOP, None, 0),
        Finished(Usage(3, 2, 1), 0.0),
    ]
    (request,) = rig.service.requests
    assert request == pb.GenerateRequest(
        model="m", text="hi", request_id="r", priority=2, sampling=pb.SamplingParams(temperature=0.0, stop=["a"], n=2)
    )
    assert_span(await rig.span(), "Generate", "OK")


async def test_the_service_sees_the_client_span_as_parent(rig: Rig) -> None:
    await rig.events("hi")
    span = await rig.span()
    assert span.context is not None
    ids = f"{span.context.trace_id:032x}-{span.context.span_id:016x}"
    assert rig.service.metadata[0]["traceparent"] == f"00-{ids}-{int(span.context.trace_flags):02x}"


async def test_the_applications_span_is_the_parent(rig: Rig) -> None:
    with trace.use_span(rig.provider.get_tracer("app").start_span("work"), end_on_exit=False) as work:
        await rig.do("tokenize", "hi")
    assert (await rig.span()).parent == work.get_span_context()


async def test_completion(rig: Rig) -> None:
    completion: Completion = await rig.do("complete", [Message("user", "hi")])
    assert (completion.text, completion.token_ids) == ("hello there", (0, 1))
    assert completion.finish_reason is FinishReason.STOP
    assert (completion.request_id, completion.seed, completion.usage) == ("r", 2**64 - 1, Usage(3, 2, 1))
    assert rig.service.requests[0].messages.messages[0].content == "hi"


async def test_a_stream_without_its_end_is_an_error(rig: Rig) -> None:
    rig.service.script = SCRIPT[:-1]
    with pytest.raises(StepwireError, match="without its last message"):
        await rig.do("complete", "hi")


async def test_other_calls(rig: Rig) -> None:
    assert await rig.do("tokenize", "hi") == (1, 2)
    assert await rig.do("detokenize", [1, 2], keep_special_tokens=True) == "text"
    assert rig.service.requests[1] == pb.DetokenizeRequest(token_ids=[1, 2], keep_special_tokens=True)
    assert [model.name for model in await rig.do("list_models")] == ["a", "b"]
    model: Model = await rig.do("get_model", "a")
    assert (model.state, model.eos_token_ids, model.num_blocks) == (ModelState.READY, (2,), 9)
    codes = [span.attributes[names.RPC_STATUS] for span in rig.exporter.get_finished_spans() if span.attributes]
    assert codes == ["OK"] * 4


async def test_an_error_before_the_first_event(rig: Rig) -> None:
    rig.service.script, rig.service.error = [], StepwireError("QUEUE_FULL", "full", {"limit": "4"}, 2.0)
    with pytest.raises(StepwireError) as caught:
        await rig.events("hi")
    assert (caught.value.reason, caught.value.message, caught.value.retry_after_s) == ("QUEUE_FULL", "full", 2.0)
    assert_span(await rig.span(), "Generate", "RESOURCE_EXHAUSTED")


async def test_an_error_after_many_events_loses_none_of_them(rig: Rig) -> None:
    rig.service.script = [output(position, "x") for position in range(500)]
    rig.service.error = StepwireError("WORKER_FAILED", "rank 0 is gone")
    events: list[Any] = []
    with pytest.raises(StepwireError, match="rank 0 is gone"):
        if rig.is_sync:
            await asyncio.to_thread(lambda: [events.append(event) for event in rig.client.generate("hi")])
        else:
            stream = rig.client.generate("hi")
            await rig.service.reached.wait()
            async for event in stream:
                events.append(event)
    assert [event.position for event in events] == list(range(500))


async def test_an_error_of_a_unary_call(rig: Rig) -> None:
    rig.service.error = StepwireError("MODEL_NOT_FOUND", "no such model")
    with pytest.raises(StepwireError, match="no such model"):
        await rig.do("tokenize", "hi", model="x")
    assert_span(await rig.span(), "Tokenize", "NOT_FOUND")


async def test_a_request_that_cannot_be_sent(rig: Rig) -> None:
    with pytest.raises(StepwireError, match="max_tokens") as caught:
        await rig.events("hi", max_tokens=2**40)
    assert caught.value.reason == "FIELD_OUT_OF_RANGE"
    assert not rig.exporter.get_finished_spans()


@pytest.mark.parametrize("method", ["complete", "tokenize"])
async def test_a_timeout(rig: Rig, method: str) -> None:
    rig.service.hold = True
    with pytest.raises(StepwireError) as caught:
        await rig.do(method, "hi", timeout=0.2)
    assert caught.value.reason == "DEADLINE_EXCEEDED"
    async with asyncio.timeout(2):
        await rig.service.left.wait()
    assert_span(await rig.span(), method.replace("complete", "generate").capitalize(), "DEADLINE_EXCEEDED")


@pytest.mark.parametrize("way", ["break", "never", "close", "with", "raise", "collected"])
async def test_dropping_a_stream_cancels_its_request(rig: Rig, way: str) -> None:
    rig.service.script, rig.service.hold = SCRIPT[:2], True
    gc.disable()  # But for "collected", reference counts alone must do.
    try:
        if rig.is_sync:
            await asyncio.to_thread(drop_sync, rig.client, way)
        else:
            await drop_async(rig, way)
        async with asyncio.timeout(2):
            await rig.service.left.wait()
    finally:
        gc.enable()
    assert_span(await rig.span(), "Generate", "CANCELLED")


def drop_sync(client: Client, way: str) -> None:
    if way == "break":
        for _ in client.generate("hi"):
            break
    elif way == "never":
        stream = client.generate("hi")
        time.sleep(0.05)  # The request goes out in the background.
        del stream
    elif way == "close":
        stream = client.generate("hi")
        next(stream)
        stream.close()
        stream.close()
        assert list(stream) == []
    elif way == "with":
        with client.generate("hi") as stream:
            next(stream)
    elif way == "raise":
        with pytest.raises(KeyError):
            for _ in client.generate("hi"):
                raise KeyError
    else:
        stream = client.generate("hi")
        next(stream)
        cycle: list[Any] = [stream]
        cycle.append(cycle)
        del stream, cycle
        gc.collect()


async def drop_async(rig: Rig, way: str) -> None:
    client: AsyncClient = rig.client
    if way == "break":
        async for _ in client.generate("hi"):
            break
    elif way == "never":
        stream = client.generate("hi")
        await rig.service.reached.wait()
        del stream
    elif way == "close":
        stream = client.generate("hi")
        await anext(stream)
        stream.close()
        stream.close()
        assert [event async for event in stream] == []
    elif way == "with":
        async with aclosing(client.generate("hi")) as stream:
            await anext(stream)
    elif way == "raise":
        with pytest.raises(KeyError):
            async for _ in client.generate("hi"):
                raise KeyError
    else:
        stream = client.generate("hi")
        await anext(stream)
        cycle: list[Any] = [stream]
        cycle.append(cycle)
        del stream, cycle
        await asyncio.to_thread(gc.collect)  # In another thread than the loop's, as may happen.


async def test_a_task_that_is_cancelled_cancels_its_request() -> None:
    for method in ("complete", "tokenize"):
        async with running("async") as rig:
            rig.service.hold = True
            task = asyncio.create_task(getattr(rig.client, method)("hi"))
            await rig.service.reached.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            async with asyncio.timeout(2):
                await rig.service.left.wait()
            assert (await rig.span()).status.status_code is SpanStatus.ERROR


async def test_closing_a_stream_that_another_task_reads_is_not_that_tasks_cancellation() -> None:
    async with running("async") as rig:
        rig.service.script, rig.service.hold = SCRIPT[:1], True
        stream = rig.client.generate("hi")
        await anext(stream)
        reader = asyncio.create_task(anext(stream))
        await rig.service.reached.wait()
        await asyncio.sleep(0.02)  # Let the reader wait for its message; no event says that it does.
        stream.close()
        with pytest.raises(StepwireError) as caught:
            await reader
        assert caught.value.reason == "CANCELLED"


async def test_closing_a_stream_that_another_thread_reads() -> None:
    async with running("sync") as rig:
        rig.service.script, rig.service.hold = SCRIPT[:1], True
        stream = rig.client.generate("hi")
        await asyncio.to_thread(next, stream)
        reader = asyncio.create_task(asyncio.to_thread(next, stream))
        await rig.service.reached.wait()
        await asyncio.sleep(0.02)
        await asyncio.to_thread(stream.close)
        with pytest.raises(StepwireError) as caught:
            await reader
        assert caught.value.reason == "CANCELLED"


async def test_closing_the_client_ends_its_calls(rig: Rig) -> None:
    rig.service.hold = True
    calls = [asyncio.create_task(rig.do("complete", "hi")), asyncio.create_task(rig.do("tokenize", "hi"))]
    while len(rig.service.requests) < 2:
        await asyncio.sleep(0.005)
    await rig.close()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(result) for result in results] == [StepwireError, StepwireError]
    with pytest.raises(StepwireError, match="closed"):
        await rig.do("tokenize", "hi")


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_a_key_is_sent(kind: str) -> None:
    async with running(kind, key="secret") as rig:
        assert await rig.do("tokenize", "hi") == (1, 2)
        assert len(await rig.events("hi")) == 4
        client = Client(rig.target, key="wrong")
        with client, pytest.raises(StepwireError) as caught:
            await asyncio.to_thread(client.tokenize, "hi")
        assert caught.value.reason == "UNAUTHENTICATED"


async def test_waiting_until_a_model_is_ready(rig: Rig) -> None:
    rig.service.model_states = [pb.MODEL_STATE_STARTING, pb.MODEL_STATE_STARTING, pb.MODEL_STATE_READY]
    model = await rig.do("wait_ready", timeout=5)
    assert model.state is ModelState.READY
    assert not rig.exporter.get_finished_spans(), "polls are not traced"


async def test_waiting_for_a_model_that_failed_ends_at_once(rig: Rig) -> None:
    rig.service.model_states = [pb.MODEL_STATE_STARTING, pb.MODEL_STATE_FAILED]
    with pytest.raises(StepwireError) as caught:
        await rig.do("wait_ready", timeout=60)
    assert caught.value.reason == "WORKER_FAILED"


async def test_waiting_in_vain_says_why(rig: Rig) -> None:
    rig.service.model_states = [pb.MODEL_STATE_STARTING]
    with pytest.raises(StepwireError, match=r"not ready within 0\.3 s: model a is starting"):
        await rig.do("wait_ready", timeout=0.3)


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_a_service_that_is_not_there_is_named(kind: str) -> None:
    async with running(kind) as rig:
        target = "127.0.0.1:1"
        gone: Any = (Client if kind == "sync" else AsyncClient)(target)
        rig.client, former = gone, rig.client
        for method, arguments in (("tokenize", ("hi",)), ("complete", ("hi",))):
            with pytest.raises(StepwireError, match=f"cannot reach the service at {target}") as caught:
                await rig.do(method, *arguments)
            assert caught.value.code is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(StepwireError, match=f"{target} was not ready"):
            await rig.do("wait_ready", timeout=0.3)
        await rig.close()
        rig.client = former


async def test_without_a_provider_nothing_is_traced() -> None:
    async with running("sync") as rig:
        with Client(rig.target) as client:
            assert await asyncio.to_thread(client.tokenize, "hi") == (1, 2)
        assert "traceparent" not in rig.service.metadata[0]


async def test_many_threads_share_one_client() -> None:
    async with running("sync") as rig:
        results: list[str] = []

        def work() -> None:
            for _ in range(5):
                results.append(rig.client.complete("hi").text)

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            await asyncio.to_thread(thread.join)
        assert results == ["hello there"] * 40


async def test_a_process_that_ends_in_the_middle_of_a_stream_is_quiet() -> None:
    async with running("sync") as rig:
        rig.service.script, rig.service.hold = SCRIPT[:1], True
        code = "import sys, stepwire; s = stepwire.Client(sys.argv[1]).generate('hi'); print(next(s).model)"
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, rig.target, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        out, err = await asyncio.wait_for(process.communicate(), 30)
        assert (process.returncode, out, err) == (0, b"m\n", b"")
        async with asyncio.timeout(2):
            await rig.service.left.wait()
