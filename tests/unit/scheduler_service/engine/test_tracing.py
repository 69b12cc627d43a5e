"""A request's parts, events and attempts over what may happen to it."""

from collections.abc import Callable

import pytest
from opentelemetry.trace import StatusCode

from scheduler_service.core.plan import StepPlan
from scheduler_service.core.request import Request
from scheduler_service.engine.ports import StepTimings
from scheduler_service.engine.step_tracing import RankTotals, StepTraceRule, StepTracing
from scheduler_service.engine.tracing import RequestTrace
from stepwire.rpc.errors import StepwireError
from stepwire.telemetry import names
from stepwire.telemetry.spans import SpanRecorder
from tests.support.spans import Kept


class NoMeter:
    def step_sent(self, plan: StepPlan) -> None:
        """Counts nothing."""

    def step_answered(self, timings: StepTimings, seconds: float) -> None:
        """Counts nothing."""


class Rig:
    """One request on `num_ranks` ranks of epoch 1."""

    def __init__(self, *, ratio: float = 1.0, num_ranks: int = 1) -> None:
        self.kept = Kept()
        self.num_ranks = num_ranks
        self.tracing = StepTracing(SpanRecorder(self.kept, ratio), NoMeter(), StepTraceRule())
        self.tracing.begin_epoch(1, self.ranks())
        self.trace = RequestTrace(self.tracing.tracer, "chat", "tiny", "r1")
        self.trace.accepted(Request("r1", [1, 2, 3], 5), self.tracing)

    def ranks(self) -> list[RankTotals]:
        return [RankTotals(rank, f"host:{rank}", "host", 100 + rank) for rank in range(self.num_ranks)]

    def step(self, step_id: int) -> None:
        self.tracing.step_sent(StepPlan(step_id))
        self.tracing.step_written()
        self.tracing.step_answered(0, StepTimings(0, 0, 10, 2_000_000, 10), 0.002)

    def parts(self) -> list[str]:
        """Of the ended request, checked to be without gaps."""
        (request,) = self.kept.named("chat tiny")
        parts = [span for span in self.kept.spans if span.name in names.REQUEST_PARTS]
        assert all(part.parent_id == request.context.span_id for part in parts)
        assert (parts[0].start_ns, parts[-1].end_ns) == (request.start_ns, request.end_ns)
        assert [part.end_ns for part in parts[:-1]] == [part.start_ns for part in parts[1:]]
        assert sum(self.trace.parts_ns.values()) == request.end_ns - request.start_ns
        return [part.name for part in parts]

    def events(self) -> list[str]:
        (request,) = self.kept.named("chat tiny")
        return [name for name, _, _ in request.events]

    def attempts(self) -> list[tuple[object, ...]]:
        keys = (names.EPOCH, names.RANK, names.FIRST_STEP_ID, names.LAST_STEP_ID, names.NUM_STEPS, names.OUTCOME)
        return [tuple(span.attributes[key] for key in keys) for span in self.kept.named(names.SPAN_ATTEMPT)]


def test_a_plain_request_queues_computes_decodes_and_streams() -> None:
    rig = Rig()
    rig.step(1)
    rig.trace.placed(0, 2, 16)
    rig.step(2)
    rig.trace.token_came(is_first=True)
    rig.step(3)
    rig.trace.sequence_ended(0)
    rig.trace.delivered()
    rig.trace.end(None, {})
    assert rig.parts() == ["queue", "prefill", "decode", "stream"]
    assert rig.events() == [names.EVENT_PREFIX_CACHE_HIT, names.EVENT_FIRST_TOKEN]
    assert rig.attempts() == [(1, 0, 2, 3, 2, "finished")]
    (attempt,) = rig.kept.named(names.SPAN_ATTEMPT)
    assert attempt.attributes[names.FORWARD_S] == pytest.approx(0.004)
    assert attempt.attributes[names.WORKER] == "host:0"


def test_preempted_only_while_no_sequence_of_it_runs() -> None:
    rig = Rig()
    rig.trace.placed(0, 1, 0)
    rig.trace.placed(1, 1, 0)
    rig.trace.token_came(is_first=True)
    rig.trace.preempted(0)
    rig.trace.sequence_ended(1)
    rig.trace.placed(0, 2, 0)
    rig.trace.preempted(0)
    rig.trace.placed(0, 3, 0)
    rig.trace.token_came(is_first=False)
    rig.trace.delivered()
    rig.trace.end(None, {})
    assert rig.parts() == ["queue", "prefill", "decode", "preempted", "prefill", "decode", "stream"]
    assert rig.events().count(names.EVENT_PREEMPTED) == rig.events().count(names.EVENT_RESUMED) == 2
    assert rig.trace.num_preemptions == 2


def test_a_lost_worker_leaves_an_attempt_of_each_rank_and_a_recovery() -> None:
    rig = Rig(num_ranks=2)
    rig.trace.placed(0, 1, 0)
    rig.step(1)
    rig.trace.token_came(is_first=True)
    rig.tracing.end_epoch("rank 1 was killed")
    rig.tracing.begin_epoch(2, rig.ranks())
    rig.trace.placed(0, 1, 0)
    rig.step(1)
    rig.trace.token_came(is_first=False)
    rig.trace.delivered()
    rig.trace.end(None, {})
    assert rig.parts() == ["queue", "prefill", "decode", "recovery", "prefill", "decode", "stream"]
    expected = [names.EVENT_FIRST_TOKEN, names.EVENT_WORKER_LOST, names.EVENT_RECOVERED, names.EVENT_RESUMED]
    assert rig.events() == expected
    assert [attempt[:2] + attempt[-1:] for attempt in rig.attempts()] == [
        (1, 0, "epoch_ended"),
        (1, 1, "epoch_ended"),
        (2, 0, "finished"),
        (2, 1, "finished"),
    ]
    assert rig.trace.num_epochs == 2


def test_who_waits_in_the_queue_takes_no_part_in_a_recovery() -> None:
    rig = Rig()
    rig.tracing.end_epoch("gone")
    rig.tracing.begin_epoch(2, rig.ranks())
    rig.trace.placed(0, 1, 0)
    rig.trace.end(None, {})
    assert rig.parts() == ["queue", "prefill"]
    assert rig.trace.num_epochs == 1


@pytest.mark.parametrize(
    "begin",
    [lambda rig: None, lambda rig: rig.trace.placed(0, 1, 0), lambda rig: rig.trace.delivered()],
)
@pytest.mark.parametrize(("reason", "status"), [("CANCELLED", StatusCode.UNSET), ("QUEUE_FULL", StatusCode.ERROR)])
def test_an_early_end_closes_the_part_it_is_in(begin: Callable[[Rig], None], reason: str, status: StatusCode) -> None:
    rig = Rig()
    begin(rig)
    rig.trace.end(StepwireError(reason, "why"), {})
    rig.parts()
    (request,) = rig.kept.named("chat tiny")
    assert request.attributes[names.ERROR_TYPE] == reason
    assert request.status is status
    # Whatever comes late changes nothing.
    rig.tracing.end_epoch("gone")
    assert len(rig.kept.named("chat tiny")) == 1


def test_an_unsampled_request_knows_its_times_and_leaves_no_span() -> None:
    rig = Rig(ratio=0.0)
    rig.trace.placed(0, 1, 3)
    rig.trace.token_came(is_first=True)
    rig.tracing.end_epoch("gone")
    rig.trace.end(None, {})
    assert set(rig.trace.parts_ns) == {"queue", "prefill", "decode", "recovery"}
    assert not rig.kept.spans
    assert rig.trace.traceparent == ""
