"""The picture of a trace is well-formed, whatever names its spans have, and shows spans, events, steps and ranks."""

import re
from dataclasses import replace
from xml.etree import ElementTree

from stepwire.telemetry import names
from stepwire.traces import SpanEvent, Trace
from stepwire.traces.svg import render_svg
from tests.support.traces import MS, TRACE_ID, span

HOSTILE = "</svg><script>alert(1)</script>\"'&\x00\x1b\ud800"


def step(number: int, *, ranks: int) -> Trace:
    times = {"start_ns": number * MS, "end_ns": (number + 1) * MS}
    spans = [span("s", name=names.SPAN_STEP, **times)]
    for rank in range(ranks):
        spans.append(span(f"w{rank}", "s", name=names.SPAN_STEP_WORKER, attributes={names.RANK: rank}, **times))
        spans.append(span(f"f{rank}", f"w{rank}", name=names.SPAN_STEP_FORWARD, **times))
    return Trace(f"{number:032x}", tuple(spans))


def words(svg: str) -> list[str]:
    root = ElementTree.fromstring(svg)
    return [node.text or "" for node in root.iter("{http://www.w3.org/2000/svg}text")]


def test_the_tree_and_the_steps_by_rank() -> None:
    event = SpanEvent("first_token", 5 * MS, {})
    attributes = {names.EPOCH: 2, names.RANK: 1}
    worker = span("worker.a_longer_name", "request", attributes=attributes)
    trace = Trace(
        TRACE_ID, (span("request", events=(event,)), span("attempt", "request", attributes=attributes), worker)
    )
    svg = render_svg(trace, [step(1, ranks=2), step(4, ranks=2), step(400, ranks=2)])
    assert "worker.a_longer_name e2 r1" in words(svg), "what does not fit is shortened, and not cut"
    assert {"request", "attempt (epoch 2, rank 1)", "first_token", "on rank 0", "on rank 1"} <= set(words(svg))
    assert svg.count("<title>step.forward ") == 4, "a step beyond the trace is left out"
    assert "linked" not in render_svg(trace)


def test_hostile_names_stay_text() -> None:
    event = SpanEvent(HOSTILE, 0, {})
    one = replace(span("a", name=HOSTILE, service=HOSTILE, events=(event,)), is_error=True, start_ns=-5, end_ns=10**18)
    svg = render_svg(Trace(TRACE_ID, (one, span("b", "a", start_ns=10**19, end_ns=0))))
    assert ElementTree.fromstring(svg).find(".//{*}script") is None
    numbers = [float(x) for x in re.findall(r' x="([-0-9.e+]+)"', svg)]
    assert all(0 <= number <= 960 for number in numbers)
