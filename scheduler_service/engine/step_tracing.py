"""What steps cost, rank by rank, and the traces of some of them.

A step's trace is its own: one trace cannot be the child of the many requests in a step. It links to the sampled ones
among them, and they link back. A share of the steps with a sampled request is traced, and each that is slow. Where
nothing is exported a step costs one look here.
"""

import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from opentelemetry.context import Context
from opentelemetry.trace import Link, Tracer
from opentelemetry.util.types import AttributeValue

from scheduler_service.core.plan import StepPlan
from scheduler_service.engine.clock_offset import ClockOffset
from scheduler_service.engine.ports import StepTimings
from stepwire.telemetry import names
from stepwire.telemetry.trace import context_of, record_span

if TYPE_CHECKING:
    from scheduler_service.engine.tracing import RequestTrace

# A backend shows no more links than this of a span, as a rule; OpenTelemetry's own limit.
_MAX_LINKS = 128
# Traced steps that other ranks may still answer.
_MAX_OPEN = 64
# A clock's offset hardly moves: it is looked at with the first step, then with each of so many.
_STEPS_A_NOTE = 16


class StepMeter(Protocol):
    """Who else measures steps."""

    def step_sent(self, plan: StepPlan) -> None:
        """A step goes to the workers."""

    def step_answered(self, timings: StepTimings, seconds: float) -> None:
        """A step was answered: its parts inside the worker, and its whole as seen from here."""


@dataclass(frozen=True, slots=True)
class StepTraceRule:
    """Which steps are traced: a share (0 to 1) of those with a sampled request, and all that take longer than `slow_s`
    seconds."""

    ratio: float = 0.0
    slow_s: float = float("inf")


@dataclass(slots=True, eq=False)
class RankTotals:
    """A rank in one epoch, and the sum of what its answers say of its steps."""

    rank: int
    address: str
    host: str = ""
    process_id: int = 0
    clock: ClockOffset = field(default_factory=ClockOffset)
    num_steps: int = 0
    forward_ns: int = 0
    last_step_id: int = 0

    def attributes(self) -> dict[str, AttributeValue]:
        """What names the rank, and how far its host's clock is from ours."""
        told: dict[str, AttributeValue] = {names.RANK: self.rank, names.WORKER: self.address}
        if self.host:
            told |= {names.WORKER_HOST: self.host, names.WORKER_PROCESS_ID: self.process_id}
        if self.clock.is_known:
            told |= {names.CLOCK_OFFSET_S: self.clock.offset_s, names.CLOCK_ERROR_S: self.clock.error_s}
        return told


@dataclass(slots=True, eq=False)
class EpochTotals:
    """The ranks of one epoch; the identity of this object is that of the epoch."""

    epoch: int
    ranks: Sequence[RankTotals]


@dataclass(slots=True)
class _SentStep:
    """A step in flight. `planned_ns` and `sent_ns` are wall clock, `planned_at` is on the scheduler's clock."""

    plan: StepPlan
    planned_at: float
    planned_ns: int
    sent_ns: int = 0
    early: list[tuple[RankTotals, StepTimings]] | None = None
    """What other ranks said of it before the output rank did."""


class StepTracing:
    """Follows the steps and the requests of one engine. Used on the event loop alone."""

    def __init__(self, tracer: Tracer, meter: StepMeter, rule: StepTraceRule, model: str = "") -> None:
        self._model = model
        self.tracer = tracer
        self.totals: EpochTotals | None = None
        self._meter = meter
        self._rule = rule
        self._requests: dict[str, RequestTrace] = {}
        self._in_flight: deque[_SentStep] = deque()
        # Steps whose traces still wait for some ranks, by step id: their spans' contexts, and when they were sent.
        self._open: dict[int, tuple[Context, int]] = {}
        # A span that is never ended, and so never sent, tells whether any would be.
        probe = tracer.start_span("probe", Context(), attributes={names.KEEP: True})
        self._is_on = probe.is_recording()

    # Requests and epochs.

    def follow(self, request: "RequestTrace") -> None:
        """Tells the request from now on what happens to its workers and its steps."""
        self._requests[request.request_id] = request

    def forget(self, request: "RequestTrace") -> None:
        """Ends that."""
        if self._requests.get(request.request_id) is request:
            del self._requests[request.request_id]

    def begin_epoch(self, epoch: int, ranks: Sequence[RankTotals]) -> None:
        """Steps go to these ranks from now on."""
        self.totals = EpochTotals(epoch, ranks)
        self._forget_steps()
        for request in self._requests.values():
            request.recovered(epoch)

    def end_epoch(self, message: str) -> None:
        """The workers are lost, for the reason given; what is in flight is never answered."""
        if self.totals is None:
            return
        self.totals = None
        self._forget_steps()
        for request in self._requests.values():
            request.worker_lost(message)

    # Steps.

    def step_sent(self, plan: StepPlan) -> None:
        """A step goes to the workers. Whether it is traced, slow or not, is drawn here: then all ranks answer it."""
        self._meter.step_sent(plan)
        if self._is_on:
            plan.is_traced = random.random() < self._rule.ratio and bool(self._sampled_members(plan))
            self._in_flight.append(_SentStep(plan, time.monotonic(), time.time_ns()))

    def step_written(self) -> None:
        """The step that was sent last is on its way to all ranks."""
        if self._is_on and self._in_flight:
            self._in_flight[-1].sent_ns = time.time_ns()

    def step_answered(self, rank: int, timings: StepTimings, seconds: float) -> None:
        """The oldest step in flight was answered by a rank: its parts there, and its whole as seen from here."""
        self._meter.step_answered(timings, seconds)
        if not self._in_flight or self.totals is None:
            return
        step, totals = self._in_flight.popleft(), self.totals.ranks[rank]
        totals.num_steps += 1
        totals.forward_ns += timings.forward_ns
        totals.last_step_id = step_id = step.plan.step_id
        is_slow = seconds > self._rule.slow_s
        is_recorded = is_slow or step.plan.is_traced
        if is_recorded or step_id % _STEPS_A_NOTE == 1:
            now = time.time_ns()
            totals.clock.note(step.planned_ns, timings, now)
            if is_recorded:
                self._record(step, totals, timings, now, is_slow=is_slow)

    def step_acknowledged(self, rank: int, step_id: int, timings: StepTimings) -> None:
        """Another rank has executed all steps up to this one; its timings are those of this step."""
        if not self._is_on or self.totals is None:
            return
        totals = self.totals.ranks[rank]
        totals.num_steps = totals.last_step_id = step_id
        totals.forward_ns = timings.total_forward_ns
        now = time.time_ns()
        sent = next((step for step in self._in_flight if step.plan.step_id == step_id), None)
        if sent is not None:
            # Ahead of the output rank: there may be no trace of the step yet.
            totals.clock.note(sent.planned_ns, timings, now)
            sent.early = [*(sent.early or ()), (totals, timings)]
        elif step_id in self._open:
            parent, sent_ns = self._open[step_id]
            totals.clock.note(sent_ns, timings, now)
            self._record_rank(parent, totals, timings)

    def _forget_steps(self) -> None:
        self._in_flight.clear()
        self._open.clear()

    def _record(self, step: _SentStep, rank: RankTotals, timings: StepTimings, now: int, *, is_slow: bool) -> None:
        """Writes the trace of one step."""
        epoch = 0 if self.totals is None else self.totals.epoch
        members = self._sampled_members(step.plan)
        start = step.planned_ns - round((step.planned_at - step.plan.sent_at) * 1e9)
        sent = max(step.planned_ns, step.sent_ns)
        span = self.tracer.start_span(
            names.SPAN_STEP,
            Context(),
            attributes={
                **_describe(step.plan),
                names.GEN_AI_REQUEST_MODEL: self._model,
                names.EPOCH: epoch,
                names.KEEP: True,
                names.IS_SLOW: is_slow,
            },
            links=[Link(member.context) for member in members],
            start_time=start,
        )
        parent = context_of(span)
        for name, times in (
            (names.SPAN_STEP_PLAN, (start, step.planned_ns)),
            (names.SPAN_STEP_SEND, (step.planned_ns, sent)),
            (names.SPAN_STEP_WAIT, (sent, now)),
        ):
            record_span(self.tracer, name, parent, times)
        for known, its_timings in ((rank, timings), *(step.early or ())):
            self._record_rank(parent, known, its_timings)
        if self.totals is not None and len(self.totals.ranks) > 1:
            self._open[step.plan.step_id] = (parent, step.planned_ns)
            if len(self._open) > _MAX_OPEN:
                del self._open[next(iter(self._open))]
        for member in members:
            member.link_step(span.get_span_context())
        span.end(now)

    def _record_rank(self, parent: Context, rank: RankTotals, timings: StepTimings) -> None:
        """The step on a rank, from its answer: by the clock of the rank's host, whose offset stands beside it."""
        start = timings.start_unix_ns
        parts = (
            (names.SPAN_STEP_DEVICE_WAIT, -timings.queue_ns, 0),
            (names.SPAN_STEP_PREPARE, 0, timings.prepare_ns),
            (names.SPAN_STEP_FORWARD, timings.prepare_ns, timings.prepare_ns + timings.forward_ns),
            (names.SPAN_STEP_SAMPLE, timings.prepare_ns + timings.forward_ns, timings.busy_ns),
        )
        times = (start - timings.queue_ns, start + timings.busy_ns)
        worker = record_span(self.tracer, names.SPAN_STEP_WORKER, parent, times, attributes=rank.attributes())
        within = context_of(worker)
        for name, begin, end in parts:
            record_span(self.tracer, name, within, (start + begin, start + end))

    def _sampled_members(self, plan: StepPlan) -> "list[RequestTrace]":
        """The sampled requests with a sequence in the step, each once, up to the limit."""
        found: dict[str, RequestTrace] = {}
        for sequence in plan.sequences:
            request = self._requests.get(sequence.request.request_id)
            if request is not None and request.is_recording:
                found[request.request_id] = request
                if len(found) == _MAX_LINKS:
                    break
        return list(found.values())


def _describe(plan: StepPlan) -> dict[str, AttributeValue]:
    num_decoding = plan.scheduled_token_counts.count(1)
    return {
        names.STEP_ID: plan.step_id,
        names.NUM_SEQUENCES: len(plan.sequence_ids),
        names.NUM_TOKENS: plan.num_tokens,
        names.NUM_DECODING: num_decoding,
        names.NUM_STARTED: len(plan.new_sequences),
        names.NUM_PREEMPTED: len(plan.preempted_sequence_ids),
    }
