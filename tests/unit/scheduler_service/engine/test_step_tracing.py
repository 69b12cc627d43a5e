"""Which steps are traced, what their traces hold, and that they and their requests link to each other."""

import itertools
import time
from typing import Any

import pytest

from scheduler_service.core.plan import StepPlan
from scheduler_service.core.prefix import KeyChain
from scheduler_service.core.request import Request, Sequence
from scheduler_service.engine.ports import StepTimings
from scheduler_service.engine.step_tracing import RankTotals, StepTraceRule, StepTracing
from scheduler_service.engine.tracing import RequestTrace
from stepwire.telemetry import names
from stepwire.telemetry.spans import RecordedSpan, SpanRecorder
from tests.support.spans import Kept


class Meter:
    def __init__(self) -> None:
        self.seen: list[str] = []

    def step_sent(self, plan: StepPlan) -> None:
        self.seen.append(f"sent {plan.step_id}")

    def step_answered(self, timings: StepTimings, seconds: float) -> None:
        self.seen.append(f"answered after {seconds}")


class Rig:
    def __init__(self, rule: StepTraceRule, *, sample_ratio: float = 1.0, is_exporting: bool = True) -> None:
        self.kept, self.meter = Kept(), Meter()
        self.tracer = SpanRecorder(self.kept if is_exporting else None, sample_ratio)
        self.tracing = StepTracing(self.tracer, self.meter, rule)
        self.tracing.begin_epoch(4, [RankTotals(0, "host:1", "host", 99)])
        self.ids = itertools.count(1)

    def request(self, request_id: str) -> Sequence:
        request = Request(request_id, [1, 2], 5)
        RequestTrace(self.tracing.tracer, "chat", "tiny", request_id).accepted(request, self.tracing)
        return Sequence(next(self.ids), 0, request, 0.0, [1, 2], 5, _no_keys())

    def step(self, *sequences: Sequence, seconds: float = 0.01, **timings: int) -> None:
        plan = StepPlan(next(self.ids), time.monotonic())
        plan.sequences = list(sequences)
        plan.sequence_ids = [sequence.sequence_id for sequence in sequences]
        plan.scheduled_token_counts = [2, *[1] * len(sequences)][: len(sequences)]
        self.tracing.step_sent(plan)
        self.tracing.step_written()
        now = time.time_ns()
        times = {"queue_ns": 10, "prepare_ns": 10, "forward_ns": 50, "sample_ns": 10, **timings}
        self.tracing.step_answered(0, StepTimings(now - 70, answered_unix_ns=now, **times), seconds)


def _no_keys() -> KeyChain:
    return None  # type: ignore[return-value]  # nobody looks at it here


def tree(kept: Kept) -> dict[str, str]:
    by_id = {span.context.span_id: span.name for span in kept.spans}
    return {span.name: by_id.get(span.parent_id, "") for span in kept.spans}


def test_a_slow_step_is_traced_with_all_its_parts() -> None:
    rig = Rig(StepTraceRule(0.0, 0.5), sample_ratio=0.0)
    rig.step(seconds=0.5)
    assert not rig.kept.spans
    rig.step(rig.request("r1"), seconds=0.6)
    below = {"step.plan": "step", "step.send": "step", "step.wait": "step", "step.worker": "step", "step": ""}
    inside = dict.fromkeys(("step.device_wait", "step.prepare", "step.forward", "step.sample"), "step.worker")
    assert tree(rig.kept) == below | inside
    (step,) = rig.kept.named("step")
    told = {names.EPOCH: 4, names.IS_SLOW: True, names.NUM_SEQUENCES: 1, names.NUM_TOKENS: 2, names.NUM_DECODING: 0}
    assert step.attributes | told == step.attributes
    assert not step.links, "its request is not sampled"
    assert rig.meter.seen[-1] == "answered after 0.6"


def test_the_parts_of_a_step_follow_each_other() -> None:
    rig = Rig(StepTraceRule(1.0))
    rig.step(rig.request("r1"))
    span = {name: rig.kept.named(name)[0] for name in tree(rig.kept)}

    def bounds(*parts: str) -> list[int]:
        return [time for part in parts for time in (span[part].start_ns, span[part].end_ns)]

    for whole, parts in (
        ("step", ("step.plan", "step.send", "step.wait")),
        ("step.worker", ("step.device_wait", "step.prepare", "step.forward", "step.sample")),
    ):
        times = bounds(*parts)
        assert times == sorted(times)
        assert times[1:-1:2] == times[2:-1:2]
        assert [times[0], times[-1]] == bounds(whole)
    assert span["step.worker"].attributes[names.WORKER] == "host:1"
    assert abs(span["step.worker"].attributes[names.CLOCK_OFFSET_S]) < 1.0


def test_steps_and_sampled_requests_link_to_each_other() -> None:
    rig = Rig(StepTraceRule(1.0))
    first, second = rig.request("r1"), rig.request("r2")
    rig.step(first, second)
    rig.step(second, second)
    steps = rig.kept.named("step")
    requests = {request_id: rig.tracing._requests[request_id] for request_id in ("r1", "r2")}
    contexts = [requests[request_id].context for request_id in ("r1", "r2")]
    assert [[link.context for link in step.links] for step in steps] == [contexts, contexts[1:]]
    for request in requests.values():
        request.end(None, {})
    spans: list[RecordedSpan] = rig.kept.named("chat tiny")
    linked = [[link.context for link in span.links] for span in spans]
    assert linked == [[steps[0].context], [step.context for step in steps]]


def test_links_are_bounded_on_both_sides() -> None:
    rig = Rig(StepTraceRule(1.0))
    crowd = [rig.request(f"r{number}") for number in range(200)]
    rig.step(*crowd)
    assert len(rig.kept.named("step")[0].links) == 128
    for _ in range(99):
        rig.step(crowd[0])
    trace = rig.tracing._requests["r0"]
    trace.end(None, {})
    assert len(rig.kept.named("chat tiny")[0].links) == 64


@pytest.mark.parametrize(("ratio", "low", "high"), [(0.0, 0, 0), (0.1, 30, 180), (1.0, 1000, 1000)])
def test_a_share_of_the_steps_is_traced(ratio: float, low: int, high: int) -> None:
    rig = Rig(StepTraceRule(ratio))
    sequence = rig.request("r1")
    for _ in range(1000):
        rig.step(sequence)
    assert low <= len(rig.kept.named("step")) <= high


def test_a_step_without_a_sampled_request_is_traced_only_when_slow() -> None:
    rig = Rig(StepTraceRule(1.0, 0.5), sample_ratio=0.0)
    sequence = rig.request("r1")
    rig.step(sequence)
    assert not rig.kept.spans
    rig.step(sequence, seconds=0.6)
    assert len(rig.kept.named("step")) == 1


def test_without_a_collector_steps_are_counted_and_not_followed() -> None:
    rig = Rig(StepTraceRule(1.0, 0.0), is_exporting=False)
    rig.step()
    assert rig.meter.seen == ["sent 1", "answered after 0.01"]
    assert rig.tracing.totals is not None and rig.tracing.totals.ranks[0].num_steps == 0


def test_what_an_ended_epoch_had_in_flight_is_nobodys_answer() -> None:
    rig = Rig(StepTraceRule(1.0))
    rig.tracing.step_sent(StepPlan(1))
    rig.tracing.end_epoch("gone")
    answer: Any = StepTimings(0, 0, 0, 0, 0)
    rig.tracing.step_answered(0, answer, 0.1)
    rig.tracing.begin_epoch(5, [RankTotals(0, "host:1")])
    rig.step(rig.request("r1"))
    (step,) = rig.kept.named("step")
    assert step.attributes[names.EPOCH] == 5


@pytest.mark.parametrize("is_early", [True, False])
def test_all_ranks_of_a_traced_step_stand_in_its_trace(is_early: bool) -> None:
    rig = Rig(StepTraceRule(1.0))
    rig.tracing.begin_epoch(5, [RankTotals(rank, f"host:{rank}") for rank in range(2)])
    plan = StepPlan(7, time.monotonic(), sequences=[rig.request("r1")])
    rig.tracing.step_sent(plan)
    assert plan.is_traced, "so that every rank answers it"
    now = time.time_ns()
    acknowledged = StepTimings(now, 0, 10, 20, 10, now + 50, total_forward_ns=9_000)
    if is_early:
        rig.tracing.step_acknowledged(1, 7, acknowledged)
    rig.tracing.step_answered(0, StepTimings(now, 0, 10, 20, 10, now + 50), 0.1)
    if not is_early:
        rig.tracing.step_acknowledged(1, 7, acknowledged)
    (step,) = rig.kept.named("step")
    workers = rig.kept.named("step.worker")
    assert sorted(span.attributes[names.RANK] for span in workers) == [0, 1]
    assert {span.parent_id for span in workers} == {step.context.span_id}
    assert len(rig.kept.named("step.forward")) == 2
    assert rig.tracing.totals is not None
    other = rig.tracing.totals.ranks[1]
    assert (other.num_steps, other.last_step_id, other.forward_ns) == (7, 7, 9_000)


def test_steps_that_never_get_all_answers_are_forgotten() -> None:
    rig = Rig(StepTraceRule(1.0))
    rig.tracing.begin_epoch(5, [RankTotals(rank, f"host:{rank}") for rank in range(2)])
    sequence = rig.request("r1")
    for _ in range(500):
        rig.step(sequence)
    assert len(rig.tracing._open) <= 64
    rig.tracing.end_epoch("gone")
    assert not rig.tracing._open
    rig.tracing.step_acknowledged(1, 3, StepTimings(0, 0, 0, 0, 0))
