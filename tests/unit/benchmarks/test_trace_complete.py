"""That the check of traces finds what is wrong with them, and nothing with one that is whole."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.tracing.check import CALL, Epochs, Verdict, check
from benchmarks.tracing.load import KINDS, ROOT_SPAN, Ask, Outcome, make_asks
from stepwire.telemetry import names
from stepwire.traces import Span, TraceStore
from tests.support.traces import TRACE_ID, span

MS = 1_000_000
Spans = dict[str, Span]


def whole() -> Spans:
    """The trace of a request of 100 ms that decoded in epochs 1 and 2."""

    def named(name: str, parent: str, start_ms: int, end_ms: int, **attributes: Any) -> Span:
        times = {"start_ns": start_ms * MS, "end_ns": end_ms * MS}
        return span(name, parent, name=name, attributes=attributes, **times)

    root = named(ROOT_SPAN, "", 0, 100)
    client = named("client", ROOT_SPAN, 0, 100, **{names.RPC_STATUS: "OK"})
    server = named("server", "client", 0, 100, **{names.RPC_STATUS: "OK"})
    about = {names.GEN_AI_OPERATION: "text_completion", names.REQUEST_ID: "r1"}
    spans = [
        root,
        replace(client, name=CALL, kind="client"),
        replace(server, name=CALL, kind="server"),
        named("request", "server", 0, 100, **about),
        named("queue", "request", 0, 10),
        named("decode", "request", 10, 100),
        *(replace(named(f"attempt{e}", "request", 0, 9, **place(e)), name=names.SPAN_ATTEMPT) for e in (1, 2)),
        named(names.SPAN_WORKER_PREFILL, "request", 10, 20, **place(1)),
        named(names.SPAN_WORKER_DECODE, "request", 60, 90, **place(2)),
    ]
    return {one.span_id: one for one in spans}


def place(epoch: int) -> dict[str, int]:
    return {names.EPOCH: epoch, names.RANK: 0}


def verdict_on(spans: Spans, **seen: Any) -> Verdict:
    store = TraceStore()
    store.add(spans.values())
    ask = Ask("plain", "r1", [1], {}, 0.0)
    outcome = Outcome(ask, TRACE_ID, ended_at=0.1, **{"token_times": [1.0, 9.0], **seen})
    return check(store, [outcome], Epochs(1, [5.0]))


def test_a_whole_trace_has_no_fault() -> None:
    verdict = verdict_on(whole())
    assert not verdict.faults
    assert (verdict.complete, verdict.num_orphans, verdict.sum_error_ok, verdict.attempts) == (1.0, 0, 1.0, 1.0)


def drop(name: str) -> Callable[[Spans], Any]:
    return lambda spans: spans.pop(name)


def change(name: str, **fields: Any) -> Callable[[Spans], Any]:
    return lambda spans: spans.update({name: replace(spans[name], **fields)})


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (drop("client"), "complete"),
        (drop("server"), "complete"),
        (drop("request"), "orphans"),
        (change("server", attributes={names.RPC_STATUS: "UNKNOWN"}), "complete"),
        (change("request", is_error=True), "complete"),
        (drop("queue"), "sum"),
        (change("decode", end_ns=96 * MS), "sum"),
        (drop("attempt1"), "attempts"),
        (drop("attempt2"), "attempts"),
        (lambda spans: spans.update(x=replace(spans["attempt2"], span_id="x")), "attempts"),
    ],
)
def test_what_is_missing_or_wrong_is_found(spoil: Callable[[Spans], Any], what: str) -> None:
    spans = whole()
    spoil(spans)
    verdict = verdict_on(spans)
    held = {
        "complete": verdict.complete == 1.0,
        "orphans": verdict.num_orphans == 0,
        "sum": verdict.sum_error_ok == 1.0,
        "attempts": verdict.attempts == 1.0,
    }
    assert not held[what]
    assert verdict.faults


def test_of_a_call_that_never_began_only_its_own_spans_are_wanted() -> None:
    late = {"reason": "DEADLINE_EXCEEDED", "code": "DEADLINE_EXCEEDED", "token_times": []}
    kept = ("client", "server", ROOT_SPAN)
    spans = {name: one for name, one in whole().items() if name in kept}
    change("client", attributes={names.RPC_STATUS: "DEADLINE_EXCEEDED"})(spans)
    change("server", attributes={names.RPC_STATUS: "CANCELLED", names.OUTCOME: names.OUTCOME_NOT_BEGUN})(spans)
    assert verdict_on(spans, **late).complete == 1.0
    # One that had an answer began; and both sides must tell of one that did not.
    assert verdict_on(spans, **{**late, "token_times": [1.0]}).complete == 0.0
    assert verdict_on(spans, code="OK", token_times=[]).complete == 0.0
    change("server", attributes={names.RPC_STATUS: "CANCELLED"})(spans)
    assert verdict_on(spans, **late).complete == 0.0


def test_little_is_forgiven_of_the_sum() -> None:
    spans = whole()
    change("decode", end_ns=98 * MS)(spans)
    assert verdict_on(spans).sum_error_ok == 1.0


@pytest.mark.parametrize("seen", [{"code": "CANCELLED"}, {"reason": "DEADLINE_EXCEEDED"}, {"trace_id": "0" * 32}])
def test_what_the_client_saw_decides(seen: dict[str, str]) -> None:
    store = TraceStore()
    store.add(whole().values())
    outcome = Outcome(Ask("plain", "r1", [1], {}, 0.0), **{"trace_id": TRACE_ID, **seen})
    assert check(store, [outcome], Epochs(1)).complete == 0.0


def test_the_mix_has_all_kinds_and_is_the_seeds() -> None:
    asks = make_asks(300, random.Random(3))
    assert {ask.kind for ask in asks} == set(KINDS)
    assert asks == make_asks(300, random.Random(3))
    assert all((ask.kind == "cancelled") == (ask.cancel_after > 0) for ask in asks)
