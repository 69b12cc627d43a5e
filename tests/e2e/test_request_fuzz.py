"""Thousands of hostile requests, while a second client streams: nobody is harmed, and nothing is left behind."""

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2

from stepwire.client import AsyncClient, Output
from stepwire.rpc.errors import STATUS_DETAILS_KEY
from stepwire.v1 import inference_pb2 as pb
from stepwire.v1.errors_pb2 import ErrorReason
from tests.support.processes import wait_serving
from tests.support.request_fuzz import SERVICE, Case, make_case
from tests.support.stack import Server, serve, tiny_limits
from tests.support.tiny_checkpoint import make_tiny_llama

NUM_REQUESTS = 20_000 if os.environ.get("STEPWIRE_TEST_FULL") else 2_000
NUM_AT_ONCE = 12
MAX_MODEL_LEN = 256
NEIGHBOUR: dict[str, Any] = {"temperature": 1.0, "seed": 42, "max_tokens": 200, "ignore_eos": True}
# The client gave up before it could hear of an error of ours.
OWN_CODES = {grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED}
REASONS = {name.removeprefix("ERROR_REASON_") for name in ErrorReason.DESCRIPTOR.values_by_name} - {
    "UNSPECIFIED",
    "INTERNAL",
}
DEFECTS = {
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.UNAVAILABLE,
}


class Calls:
    """Makes the calls of cases, and counts how they end."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.ends: Counter[str] = Counter()
        self._channel = channel

    async def make(self, case: Case) -> None:
        """One call. Raises AssertionError naming the case when it ends in a way that it may not."""
        try:
            await self._call(case)
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            self.ends["cancelled"] += 1
        except grpc.aio.AioRpcError as error:
            self.ends[_reason_of(error, case)] += 1
        else:
            self.ends["OK"] += 1

    async def _call(self, case: Case) -> None:
        method = SERVICE.methods_by_name[case.method]
        name = f"/{SERVICE.full_name}/{method.name}"
        timeout = 60.0 if case.timeout_s is None else case.timeout_s
        if not method.server_streaming:
            await self._channel.unary_unary(name)(case.request, timeout=timeout, metadata=case.metadata)
            return
        call = self._channel.unary_stream(name, response_deserializer=pb.GenerateResponse.FromString)(
            case.request, timeout=timeout, metadata=case.metadata
        )
        responses: list[pb.GenerateResponse] = []
        async for response in call:
            if len(responses) == case.num_read:
                call.cancel()
            responses.append(response)
        _check_whole(responses, case)


def _reason_of(error: grpc.aio.AioRpcError, case: Case) -> str:
    """The reason of the one ErrorInfo. Raises AssertionError for an error of another form, or a defect."""
    text = f"case {case.number}: {case.method} {case.text!r} ended with {error.code()}: {error.details()}"
    packed = [value for key, value in error.trailing_metadata() or () if key == STATUS_DETAILS_KEY]
    status = status_pb2.Status.FromString(packed[0]) if packed else None
    if status is None:
        assert error.code() in OWN_CODES and case.timeout_s is not None, text
        return "own deadline"
    infos = [detail for detail in status.details if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR)]
    assert len(infos) == 1, text
    info = error_details_pb2.ErrorInfo()
    infos[0].Unpack(info)
    assert info.domain == "stepwire" and info.reason in REASONS and error.code() not in DEFECTS, text
    assert info.reason != "DEADLINE_EXCEEDED" or case.timeout_s is not None, text
    return info.reason


def _check_whole(responses: list[pb.GenerateResponse], case: Case) -> None:
    """Started, prompt, outputs without gaps, finished."""
    text = f"case {case.number}: {case.text!r}"
    kinds = [response.WhichOneof("event") for response in responses]
    assert kinds[0] == "started" and kinds[-1] == "finished", text
    # What a resumed request brings counts as delivered.
    prior = pb.GenerateRequest.FromString(case.request).prior_output_token_ids
    num_tokens = Counter({index: len(token_ids.ids) for index, token_ids in enumerate(prior)})
    for response in responses:
        output = response.output
        if response.HasField("output"):
            assert output.position == num_tokens[output.sequence_index], text
            num_tokens[output.sequence_index] += len(output.token_ids)
    assert responses[-1].finished.usage.output_token_count == sum(num_tokens.values()), text


@asynccontextmanager
async def neighbour(target: str) -> AsyncIterator[None]:
    """A client that streams one request after the other; all answers must be the one that it gets undisturbed."""
    async with AsyncClient(target) as client:
        undisturbed = (await client.complete("neighbour", **NEIGHBOUR)).token_ids
        rounds: list[list[int]] = []

        async def stream() -> None:
            while True:
                rounds.append([])
                async for event in client.generate("neighbour", **NEIGHBOUR):
                    if isinstance(event, Output):
                        rounds[-1] += event.token_ids
                assert tuple(rounds[-1]) == undisturbed

        task = asyncio.create_task(stream())
        yield
        # What went on beside the requests is whole, and it still goes on.
        num_rounds = len(rounds)
        while len(rounds) < num_rounds + 2 and not task.done():  # noqa: ASYNC110 - ends itself
            await asyncio.sleep(0.01)
        assert not task.done(), task.exception()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert undisturbed[: len(rounds[-1])] == tuple(rounds[-1])
        assert len(rounds) >= 3


async def attack(server: Server) -> Counter[str]:
    """All requests, some at once; answers how they ended."""
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    numbers = iter(range(NUM_REQUESTS))
    async with grpc.aio.insecure_channel(server.target, options=options) as channel, neighbour(server.target):
        calls = Calls(channel)

        async def work() -> None:
            for number in numbers:
                await calls.make(make_case(number))

        async with asyncio.TaskGroup() as group:
            for _ in range(NUM_AT_ONCE):
                group.create_task(work())
        return calls.ends


async def test_hostile_requests_harm_nobody(tmp_path: Path) -> None:
    model = make_tiny_llama(tmp_path / "tiny", max_position_count=MAX_MODEL_LEN)
    with serve(model, tmp_path, *tiny_limits(MAX_MODEL_LEN, 96)) as server:
        ends = await attack(server)
        # Enough of them get through to hurt, were there a way.
        assert ends["OK"] > NUM_REQUESTS * 0.2 and ends["FIELD_OUT_OF_RANGE"] > NUM_REQUESTS * 0.02, ends
        server.wait_idle()
        wait_serving(server.target, server.process, server.log_path)
        assert "Traceback" not in server.output
        assert "Traceback" not in server.worker_log_path.read_text()


def test_the_cases_try_every_field() -> None:
    """Also those that are not there yet."""
    seen: set[str] = set()
    for number in range(1500):
        case = make_case(number)
        if case.method == "Generate":
            try:
                request = pb.GenerateRequest.FromString(case.request)
            except Exception:
                continue
            seen |= {field.name for field, _ in request.ListFields()}
            seen |= {field.name for field, _ in request.sampling.ListFields()}
    every = {field.name for kind in (pb.GenerateRequest, pb.SamplingParams) for field in kind.DESCRIPTOR.fields}
    assert seen == every
