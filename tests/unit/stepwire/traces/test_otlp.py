"""A trace as OTLP: what goes in by the receiver's conversion comes out again."""

import re
from dataclasses import replace
from typing import Any

from google.protobuf.json_format import Parse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from stepwire.traces import SpanEvent, Trace
from stepwire.traces.otlp import otlp_json, otlp_request
from stepwire.traces.receiver import spans_of
from tests.support.traces import MS, TRACE_ID, span


def sample() -> Trace:
    event = SpanEvent("first_token", 3 * MS, {"n": 1})
    root = span(
        "ab" * 8,
        kind="server",
        attributes={"text": "x", "n": 2**40, "f": 0.5, "b": True},
        events=(event,),
        links=(("12" * 16, "34" * 8),),
        is_error=True,
        status_message="why",
        resource={"service.name": "a", "host.name": "h"},
    )
    child = replace(span("cd" * 8, "ab" * 8, service="b"), resource={"service.name": "b"})
    return Trace(TRACE_ID, (root, child))


def test_what_comes_out_is_what_went_in() -> None:
    trace = sample()
    request = otlp_request(trace)
    assert len(request.resource_spans) == 2
    assert sorted(spans_of(request), key=lambda one: one.span_id) == list(trace.spans)


def test_json_has_ids_in_hexadecimal_and_numbers_for_enums() -> None:
    value = otlp_json(sample())
    found: list[dict[str, Any]] = [
        s for r in value["resourceSpans"] for scope in r["scopeSpans"] for s in scope["spans"]
    ]
    root = next(one for one in found if one["kind"] == 2)
    assert (root["traceId"], root["spanId"], root["status"]["code"]) == (TRACE_ID, "ab" * 8, 2)
    assert root["links"] == [{"traceId": "12" * 16, "spanId": "34" * 8}]
    assert root["attributes"][1]["value"] == {"intValue": str(2**40)}
    child = next(one for one in found if one is not root)
    assert child["parentSpanId"] == "ab" * 8
    assert all(re.fullmatch("[0-9a-f]{16}", one["spanId"]) for one in found)


def test_the_rest_of_the_json_is_protobufs_own() -> None:
    value = otlp_json(sample())
    for group in value["resourceSpans"]:
        for scope in group["scopeSpans"]:
            for one in scope["spans"]:
                for entry in (one, *one.get("links", ())):
                    for key in ("traceId", "spanId", "parentSpanId"):
                        entry.pop(key, None)
    import json

    parsed = Parse(json.dumps(value), ExportTraceServiceRequest())
    assert [s.name for r in parsed.resource_spans for scope in r.scope_spans for s in scope.spans] == [
        "ab" * 8,
        "cd" * 8,
    ]
