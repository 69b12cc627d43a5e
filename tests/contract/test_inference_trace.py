"""One trace from client to worker: the right spans, under the right parents, with the right ends."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from scheduler_service.engine.startup_spans import startup_trace
from stepwire.telemetry import names
from stepwire.telemetry.trace import get_tracer
from stepwire.v1 import inference_pb2 as pb
from tests.support.scheduler_server import running_scheduler, until

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
SAMPLED = (("traceparent", f"00-{TRACE_ID}-b7ad6b7169203331-01"),)
UNSAMPLED = (("traceparent", f"00-{TRACE_ID}-b7ad6b7169203331-00"),)
CALL = "stepwire.v1.InferenceService/Generate"


class Spans:
    """The spans that have ended."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    def of_request(self) -> dict[str, ReadableSpan]:
        """The spans of the client's trace, by name."""
        return {span.name: span for span in self.all() if f"{span.context.trace_id:032x}" == TRACE_ID}

    def all(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())


@pytest.fixture
def spans() -> Iterator[Spans]:
    spans = Spans()
    yield spans
    spans.provider.shutdown()


def parents(spans: dict[str, ReadableSpan]) -> dict[str, str]:
    by_id = {span.context.span_id: name for name, span in spans.items()}
    return {name: by_id.get(span.parent.span_id, "client") for name, span in spans.items() if span.parent}


def assert_parts_add_up(spans: list[ReadableSpan], request: ReadableSpan) -> list[str]:
    """Holds that a request's parts follow each other without gaps from its start to its end; answers their names."""
    parts = [s for s in spans if s.name in names.REQUEST_PARTS and s.parent.span_id == request.context.span_id]
    parts.sort(key=lambda span: (span.start_time, span.end_time))
    bounds = [time for part in parts for time in (part.start_time, part.end_time)]
    assert (bounds[0], bounds[-1]) == (request.start_time, request.end_time)
    assert bounds[1:-1:2] == bounds[2:-1:2]
    return [part.name for part in parts]


async def test_a_request_has_a_span_with_queue_prefill_and_decode(spans: Spans) -> None:
    async with running_scheduler(tracer_provider=spans.provider) as scheduler:
        request = pb.GenerateRequest(
            text="x", request_id="r1", sampling=pb.SamplingParams(max_tokens=5, seed=2**64 - 1, temperature=0.5)
        )
        assert [r async for r in scheduler.stub.Generate(request, metadata=SAMPLED, timeout=10)]
        (new,) = scheduler.worker.steps[0].new_sequences
        await until(lambda: CALL in spans.of_request())
    found = spans.of_request()
    name = "text_completion tiny"
    below = ("queue", "prefill", "decode", "stream", "attempt")
    assert parents(found) == {CALL: "client", name: CALL, **dict.fromkeys(below, name)}
    span = found[name]
    assert new.traceparent == f"00-{TRACE_ID}-{span.context.span_id:016x}-01"
    assert span.kind is SpanKind.INTERNAL
    assert span.status.status_code is StatusCode.UNSET
    assert span.attributes is not None
    expected = {
        names.GEN_AI_OPERATION: "text_completion",
        names.GEN_AI_REQUEST_MODEL: "tiny",
        names.GEN_AI_REQUEST_MAX_TOKENS: 5,
        names.GEN_AI_REQUEST_TEMPERATURE: 0.5,
        names.GEN_AI_REQUEST_SEED: str(2**64 - 1),
        names.GEN_AI_INPUT_TOKENS: 1,
        names.GEN_AI_OUTPUT_TOKENS: 5,
        names.GEN_AI_RESPONSE_FINISH_REASONS: ("length",),
        names.REQUEST_ID: "r1",
    }
    assert dict(span.attributes) | expected == dict(span.attributes)
    assert [event.name for event in span.events] == [names.EVENT_FIRST_TOKEN]
    assert_parts_add_up(spans.all(), span)
    attempt = found[names.SPAN_ATTEMPT].attributes
    assert attempt is not None
    assert (attempt[names.RANK], attempt[names.EPOCH], attempt[names.OUTCOME]) == (0, 1, "finished")
    assert (attempt[names.FIRST_STEP_ID], attempt[names.NUM_STEPS]) == (1, 5)


async def test_a_chat_is_named_so(spans: Spans) -> None:
    messages = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="hi")])
    request = pb.GenerateRequest(messages=messages, sampling=pb.SamplingParams(max_tokens=2))
    async with running_scheduler(tracer_provider=spans.provider) as scheduler:
        assert [r async for r in scheduler.stub.Generate(request, metadata=SAMPLED, timeout=10)]
    assert "chat tiny" in spans.of_request()


async def test_an_unsampled_request_has_no_spans_and_tells_the_worker_none(spans: Spans) -> None:
    async with running_scheduler(tracer_provider=spans.provider) as scheduler:
        request = pb.GenerateRequest(text="x", sampling=pb.SamplingParams(max_tokens=5))
        assert [r async for r in scheduler.stub.Generate(request, metadata=UNSAMPLED, timeout=10)]
        (new,) = scheduler.worker.steps[0].new_sequences
    assert new.traceparent == ""
    assert not spans.of_request()


async def test_tokens_cost_no_spans(spans: Spans) -> None:
    async with running_scheduler(tracer_provider=spans.provider) as scheduler:
        request = pb.GenerateRequest(text="x", sampling=pb.SamplingParams(max_tokens=200, ignore_eos=True))
        assert [r async for r in scheduler.stub.Generate(request, metadata=SAMPLED, timeout=10)]
    assert len([span for span in spans.all() if f"{span.context.trace_id:032x}" == TRACE_ID]) == 7


async def test_a_refused_request_has_a_span_with_the_reason(spans: Spans) -> None:
    async with running_scheduler(tracer_provider=spans.provider) as scheduler:
        await _drain_call(scheduler.stub.Generate(pb.GenerateRequest(text=""), metadata=SAMPLED, timeout=10))
    span = spans.of_request()["text_completion tiny"]
    assert span.attributes is not None and span.attributes[names.ERROR_TYPE] == "PROMPT_EMPTY"
    assert span.status.status_code is StatusCode.ERROR


@pytest.mark.parametrize("how", ["cancelled", "late"])
async def test_a_request_that_ends_early_says_how(spans: Spans, how: str) -> None:
    async with running_scheduler(tracer_provider=spans.provider) as scheduler:
        scheduler.worker.step_delay_s = 0.01
        timeout = 0.2 if how == "late" else 30
        call = scheduler.stub.Generate(pb.GenerateRequest(text="x"), metadata=SAMPLED, timeout=timeout)
        assert (await call.read()).HasField("started")
        if how == "cancelled":
            call.cancel()
        else:
            await call.code()
        await until(lambda: CALL in spans.of_request())
    span = spans.of_request()["text_completion tiny"]
    reason = {"cancelled": "CANCELLED", "late": "DEADLINE_EXCEEDED"}[how]
    assert span.attributes is not None and span.attributes[names.ERROR_TYPE] == reason
    assert (span.status.status_code is StatusCode.ERROR) == (how == "late")


async def test_preemption_shows_as_events(spans: Spans) -> None:
    async with running_scheduler(
        tracer_provider=spans.provider, num_blocks=16, max_model_len=256, max_sequences=4
    ) as scheduler:

        async def one() -> None:
            sampling = pb.SamplingParams(max_tokens=150, ignore_eos=True)
            request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=range(10, 50)), sampling=sampling)
            assert [r async for r in scheduler.stub.Generate(request, metadata=SAMPLED, timeout=20)]

        await asyncio.gather(*(one() for _ in range(3)))
    requests = [span for span in spans.all() if span.name == "text_completion tiny"]
    events = [[event.name for event in span.events] for span in requests]
    assert any(names.EVENT_PREEMPTED in row for row in events)
    for row in events:
        assert row.count(names.EVENT_PREEMPTED) == row.count(names.EVENT_RESUMED)
    for request in requests:
        parts = assert_parts_add_up(spans.all(), request)
        assert parts[0] == names.SPAN_QUEUE and parts[-1] == names.SPAN_STREAM
        assert request.attributes is not None
        assert parts.count(names.SPAN_PREEMPTED) == request.attributes[names.NUM_PREEMPTIONS]


async def test_a_start_is_one_trace_with_a_span_for_each_phase_and_call(spans: Spans) -> None:
    tracer = get_tracer(spans.provider)
    with startup_trace(tracer, "/models/tiny", "tiny"):
        async with running_scheduler(tracer_provider=spans.provider) as scheduler:
            pass
    started = next(span for span in spans.all() if span.name == names.SPAN_STARTUP)
    ours = [span for span in spans.all() if span.context.trace_id == started.context.trace_id]
    phases = ["connect", "init_device", "load_model", "determine_available_memory", "initialize_cache", "warm_up"]
    by_name = {span.name: span for span in ours if span.kind is SpanKind.INTERNAL}
    for phase in phases:
        assert by_name[names.startup_span_name(phase)].parent.span_id == started.context.span_id
    load = next(s for s in ours if s.kind is SpanKind.CLIENT and s.name == "stepwire.v1.WorkerService/LoadModel")
    assert load.parent.span_id == by_name["startup.load_model"].context.span_id
    served = next(s for s in ours if s.kind is SpanKind.SERVER and s.name == load.name)
    assert served.parent.span_id == load.context.span_id
    assert "traceparent" in scheduler.worker.metadata["WarmUp"]


async def test_the_trace_of_a_start_ends_with_it(spans: Spans, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler_service.engine.group.HEARTBEAT_EVERY_S", 0.02)
    with startup_trace(get_tracer(spans.provider), "/models/tiny", "tiny"):
        async with running_scheduler(tracer_provider=spans.provider) as scheduler:
            asked = scheduler.worker.calls.count("GetStatus")
            await until(lambda: scheduler.worker.calls.count("GetStatus") > asked + 1)
            assert "traceparent" not in scheduler.worker.metadata["GetStatus"]
    assert not [span for span in spans.all() if span.name.endswith("/ExecuteModel")]


async def _drain_call(call: Any) -> None:
    import grpc

    with pytest.raises(grpc.aio.AioRpcError):
        async for _ in call:
            pass
