"""Our spans against OpenTelemetry's API: parents, sampling, limits, and the encoding against the SDK's own."""

from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans as sdk_encode
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags, Tracer
from opentelemetry.trace.span import TraceState

from stepwire.telemetry import names
from stepwire.telemetry.encode import encode_spans
from stepwire.telemetry.spans import MAX_EVENTS, MAX_LINKS, SpanRecorder
from stepwire.telemetry.trace import context_of
from tests.support.spans import Kept

REMOTE = SpanContext(2**127 + 5, 2**63 + 7, True, TraceFlags(1), TraceState([("vendor", "1")]))


def test_a_child_takes_over_its_parents_trace_and_state() -> None:
    kept = Kept()
    tracer = SpanRecorder(kept, sample_ratio=0.0)
    with tracer.start_as_current_span("outer", context_of(REMOTE)) as outer, tracer.start_as_current_span("inner"):
        assert trace.get_current_span() is not outer
    inner_span, outer_span = kept.spans
    assert (outer_span.context.trace_id, outer_span.parent_id) == (REMOTE.trace_id, REMOTE.span_id)
    assert outer_span.context.trace_state == REMOTE.trace_state
    assert (inner_span.context.trace_id, inner_span.parent_id) == (REMOTE.trace_id, outer_span.context.span_id)
    assert len({REMOTE.span_id, inner_span.context.span_id, outer_span.context.span_id}) == 3


@pytest.mark.parametrize("sink", [Kept(), None])
def test_what_is_not_recorded_passes_its_parent_on(sink: Kept | None) -> None:
    flags = TraceFlags(0 if sink else 1)
    parent = SpanContext(REMOTE.trace_id, REMOTE.span_id, True, flags)
    span = SpanRecorder(sink).start_span("x", context_of(parent))
    assert not span.is_recording()
    assert span.get_span_context() == parent


@pytest.mark.parametrize(("ratio", "low", "high"), [(0.0, 0, 0), (0.25, 180, 320), (1.0, 1000, 1000)])
def test_the_ratio_of_roots_is_kept_and_a_keeper_always(ratio: float, low: int, high: int) -> None:
    kept = Kept()
    tracer = SpanRecorder(kept, sample_ratio=ratio)
    for _ in range(1000):
        tracer.start_span("x", Context()).end()
    assert low <= len(kept.spans) <= high
    tracer.start_span("slow", Context(), attributes={names.KEEP: True}).end()
    assert kept.spans[-1].name == "slow"


def test_a_span_ends_once_and_takes_nothing_later() -> None:
    kept = Kept()
    span = SpanRecorder(kept).start_span("x", Context(), start_time=5)
    span.end(9)
    for change in (
        lambda: span.end(11),
        lambda: span.set_attribute("a", 1),
        lambda: span.set_attributes({"a": 1}),
        lambda: span.add_event("e"),
        lambda: span.add_link(REMOTE),
        lambda: span.set_status(StatusCode.ERROR, "late"),
    ):
        change()
    (only,) = kept.spans
    assert (only.start_ns, only.end_ns) == (5, 9)
    assert not only.is_recording()
    assert not (only.attributes or only.events or only.links)
    assert only.status is StatusCode.UNSET


def test_an_exception_within_marks_the_span_and_goes_on() -> None:
    kept = Kept()
    with pytest.raises(KeyError), SpanRecorder(kept).start_as_current_span("x", Context()):
        raise KeyError("why")
    (span,) = kept.spans
    assert span.status is StatusCode.ERROR
    assert [name for name, _, _ in span.events] == ["exception"]


def test_events_and_links_are_bounded_and_counted() -> None:
    kept = Kept()
    span = SpanRecorder(kept).start_span("x", Context(), links=[Link(REMOTE)] * (MAX_LINKS + 3))
    for _ in range(MAX_EVENTS + 2):
        span.add_event("e")
    span.end()
    (message,) = encode_spans({}, "s", kept.spans).resource_spans[0].scope_spans[0].spans
    assert (len(message.links), message.dropped_links_count) == (MAX_LINKS, 3)
    assert (len(message.events), message.dropped_events_count) == (MAX_EVENTS, 2)


def fill(tracer: Tracer, **fields: Any) -> Any:
    span = tracer.start_span(
        "näme",
        context_of(REMOTE),
        kind=SpanKind.CLIENT,
        attributes={"text": "x", "int": -3, "float": 0.5, "bool": True, "list": ["a", "b"], "wide": 2**40},
        links=[Link(REMOTE, {"why": "step"})],
        start_time=1_000,
        **fields,
    )
    span.add_event("first", {"n": 1}, 2_000)
    span.add_event("bare", None, 3_000)
    span.set_status(Status(StatusCode.ERROR, "bad"))
    span.end(4_000)
    return span


def test_the_encoding_is_the_sdks() -> None:
    kept = Kept()
    fill(SpanRecorder(kept))
    reference: ReadableSpan = fill(TracerProvider(shutdown_on_exit=False).get_tracer("t"))
    found, wanted = (
        MessageToDict(request.resource_spans[0].scope_spans[0].spans[0])
        for request in (encode_spans({}, "s", kept.spans), sdk_encode([reference]))
    )
    # Ids are drawn; of the flags we send those of W3C, the SDK whether the parent is remote.
    for message in (found, wanted):
        assert message.pop("spanId")
        assert message.pop("flags")
        for link in message["links"]:
            link.pop("flags", None)
    assert found == wanted


@pytest.mark.parametrize("value", ["x" * 9000, "\ud800", "é" * 9000, 2**70, object(), b"\xff", ("a",) * 3, None])
def test_hostile_values_become_text_of_bounded_length(value: Any) -> None:
    kept = Kept()
    span = SpanRecorder(kept).start_span(str(value), Context(), attributes={"key": value})
    span.set_status(StatusCode.ERROR, str(value))
    span.end()
    request = encode_spans({"service.name": "s"}, "s", kept.spans)
    assert len(request.SerializeToString()) < 40_000


def test_encoding_pauses_every_few_spans() -> None:
    kept, pauses = Kept(), []
    tracer = SpanRecorder(kept)
    for _ in range(100):
        tracer.start_span("x", Context()).end()
    request = encode_spans({}, "s", kept.spans, pause=lambda: pauses.append(1))
    assert len(request.resource_spans[0].scope_spans[0].spans) == 100
    assert 3 <= len(pauses) <= 25
