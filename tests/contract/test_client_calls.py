"""Calls of both clients against a service that plays back a script, over real gRPC."""

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind
from opentelemetry.trace import StatusCode as SpanStatus

from stepwire import AsyncClient, Client, Message, StepwireError
from stepwire.client import Completion, Finished, FinishReason, Model, ModelState, Output, Started, Usage
from stepwire.telemetry import names
from stepwire.v1 import inference_pb2 as pb
from tests.support.client_rig import SCRIPT, Rig, output, running


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


async def test_a_service_that_tells_of_an_unreachable_worker_was_reached_itself(rig: Rig) -> None:
    told = StepwireError("WORKER_FAILED", "rank 0 is gone", {"rank": "0", "grpc_code": "UNAVAILABLE"}, 5.0)
    rig.service.error = told
    with pytest.raises(StepwireError) as caught:
        await rig.events("hi")
    assert (caught.value.message, caught.value.metadata) == (told.message, told.metadata)
    assert caught.value.retry_after_s == 5.0


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
        await rig.do(method, "hi", timeout=0.5)
    assert caught.value.reason == "DEADLINE_EXCEEDED"
    async with asyncio.timeout(20):
        await rig.service.left.wait()
    assert_span(await rig.span(), method.replace("complete", "generate").capitalize(), "DEADLINE_EXCEEDED")


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
