"""The scheduler's own core against a cost model, in virtual time: an hour of requests in seconds."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.errors import NeverFits, QueueFull, Refused
from scheduler_service.core.plan import EndEvent, PromptEvent, StepPlan, StepResult, TokenEvent
from scheduler_service.core.request import FinishReason, Request
from scheduler_service.core.scheduler import Scheduler
from stepwire.simulation.arrivals import Arrival
from stepwire.simulation.cost import CostModel
from stepwire.simulation.records import RequestRecord
from stepwire.simulation.series import Series
from stepwire.simulation.worker import VirtualWorker

SERIES = ("running", "waiting", "blocks used", "tokens/s")

_FAILURES = {
    FinishReason.DEADLINE: "DEADLINE_EXCEEDED",
    FinishReason.CANCELLED: "CANCELLED",
    FinishReason.ERROR: "SEQUENCE_FAILED",
}


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What the scheduler is told of the arrivals.

    `max_tokens` is what clients ask for, more when the answer is longer: None tells the scheduler how long each
    answer gets. `is_blind` keeps priorities and deadlines from it, so that it serves first come, first served;
    a request is then ended when its deadline passes, but by the world outside.
    """

    max_tokens: int | None = None
    is_blind: bool = False


@dataclass(slots=True)
class SimulationResult:
    """What a run brought. `num_blocks_peak` and `num_blocks_mean`, over time, count blocks that sequences hold."""

    records: list[RequestRecord]
    duration_s: float = 0.0
    busy_s: float = 0.0
    num_steps: int = 0
    num_step_tokens: int = 0
    num_preemptions: int = 0
    num_blocks: int = 0
    num_blocks_peak: int = 0
    num_blocks_mean: float = 0.0
    num_running_peak: int = 0
    num_waiting_peak: int = 0
    num_waiting_mean: float = 0.0
    series: Series = field(default_factory=lambda: Series(SERIES))


class Simulation:
    """One run: a scheduler, a device that runs one step after the other, and the requests that arrive.

    Things happen in the order of the real step loop: what has been answered is applied, what has expired is
    ended, then steps are planned as long as the scheduler allows another one in flight, so the plan of a
    step is made before the answer to the one ahead of it. Planning and messages take no time.
    """

    def __init__(self, config: SchedulerConfig, cost: CostModel, assumptions: Assumptions | None = None) -> None:
        self._assumptions = assumptions or Assumptions()
        self._cost = cost
        self._now = 0.0
        self._scheduler = Scheduler(config, lambda: self._now)
        self._worker = VirtualWorker()
        self._flight: deque[tuple[float, StepPlan, StepResult]] = deque()
        self._device_free = 0.0
        self._records: dict[str, RequestRecord] = {}
        self._impatient: list[tuple[float, str]] = []
        self._num_tokens = 0
        self._used_s = self._waiting_s = 0.0
        self._result = SimulationResult([], num_blocks=config.num_blocks)

    @property
    def scheduler(self) -> Scheduler:
        """The core, for its counts."""
        return self._scheduler

    def run(self, arrivals: Sequence[Arrival]) -> SimulationResult:
        """Runs until all is done. Arrivals are in order of time. Raises RuntimeError when the scheduler gets stuck."""
        self._watch_patience(arrivals)
        num_arrived = 0
        while True:
            arrival_s = arrivals[num_arrived].time_s if num_arrived < len(arrivals) else None
            wake_s = self._next_wake(arrival_s)
            if wake_s is None:
                break
            self._hold(wake_s)
            while num_arrived < len(arrivals) and arrivals[num_arrived].time_s <= self._now:
                self._arrive(num_arrived, arrivals[num_arrived])
                num_arrived += 1
            self._turn()
        if self._scheduler.num_running + self._scheduler.num_waiting:
            raise RuntimeError("the scheduler plans nothing, though requests wait")
        return self._finish()

    def _next_wake(self, arrival_s: float | None) -> float | None:
        """When something happens next. Deadlines of the world's own clients count while their requests live."""
        while self._impatient and self._is_over(self._impatient[-1][1]):
            self._impatient.pop()
        times = [
            arrival_s,
            self._flight[0][0] if self._flight else None,
            self._scheduler.next_deadline(),
            self._impatient[-1][0] if self._impatient else None,
        ]
        known = [time_s for time_s in times if time_s is not None]
        return max(self._now, min(known)) if known else None

    def _turn(self) -> None:
        scheduler = self._scheduler
        while self._flight and self._flight[0][0] <= self._now:
            self._take(scheduler.apply(self._flight.popleft()[2]))
        self._take(scheduler.expire())
        while self._impatient and self._impatient[-1][0] <= self._now:
            self._take(scheduler.end_request(self._impatient.pop()[1], FinishReason.DEADLINE))
        while (plan := scheduler.schedule()) is not None:
            self._send(plan)

    def _send(self, plan: StepPlan) -> None:
        answer, load = self._worker.execute(plan)
        seconds = self._cost.step_seconds(load)
        begin = max(self._now, self._device_free)
        self._device_free = begin + seconds
        self._flight.append((self._device_free, plan, answer))
        for new in plan.new_sequences:
            record = self._records[new.sequence.request.request_id]
            if record.started_s is None:
                record.started_s = begin
                record.num_cached_tokens = new.sequence.cached
        result = self._result
        result.busy_s += seconds
        result.num_steps += 1
        result.num_step_tokens += load.num_tokens
        result.num_running_peak = max(result.num_running_peak, self._scheduler.num_running)
        used = result.num_blocks - self._scheduler.num_free_blocks
        result.num_blocks_peak = max(result.num_blocks_peak, used)

    def _arrive(self, index: int, arrival: Arrival) -> None:
        request_id = str(index)
        told = self._assumptions
        record = RequestRecord(
            self._now, arrival.priority, arrival.deadline_s, num_prompt_tokens=arrival.num_prompt_tokens
        )
        self._records[request_id] = record
        is_told = not told.is_blind
        request = Request(
            request_id=request_id,
            prompt_token_ids=prompt_ids(index, arrival),
            max_tokens=max(arrival.num_output_tokens, told.max_tokens or 0),
            priority=arrival.priority if is_told else 0,
            tenant=arrival.tenant if is_told else "",
            deadline=self._now + arrival.deadline_s if is_told and arrival.deadline_s is not None else None,
            sampling=arrival,
        )
        try:
            self._scheduler.add_request(request)
        except Refused as error:
            record.end_s = self._now
            record.error = _refusal(error)
        self._result.num_waiting_peak = max(self._result.num_waiting_peak, self._scheduler.num_waiting)

    def _take(self, events: Iterable[TokenEvent | PromptEvent | EndEvent]) -> None:
        for event in events:
            record = self._records[event.sequence.request.request_id]
            if isinstance(event, TokenEvent):
                self._num_tokens += 1
                record.num_output_tokens += 1
                if record.first_token_s is None:
                    record.first_token_s = self._now
                if event.finish_reason is not None:
                    record.end_s = self._now
            elif isinstance(event, EndEvent):
                record.end_s = self._now
                record.error = _FAILURES.get(event.finish_reason, event.finish_reason.value)

    def _hold(self, until_s: float) -> None:
        """Lets time pass."""
        scheduler, span = self._scheduler, until_s - self._now
        if span > 0:
            used = self._result.num_blocks - scheduler.num_free_blocks
            self._used_s += used * span
            self._waiting_s += scheduler.num_waiting * span
            figures = (scheduler.num_running, scheduler.num_waiting, used, self._num_tokens / span)
            self._result.series.hold(until_s, figures)
            self._num_tokens = 0
        self._now = until_s

    def _watch_patience(self, arrivals: Sequence[Arrival]) -> None:
        """Notes when clients give up of whose deadlines the scheduler does not know; the latest first."""
        if self._assumptions.is_blind:
            self._impatient = sorted(
                (
                    (arrival.time_s + arrival.deadline_s, str(index))
                    for index, arrival in enumerate(arrivals)
                    if arrival.deadline_s is not None
                ),
                reverse=True,
            )

    def _is_over(self, request_id: str) -> bool:
        record = self._records.get(request_id)
        return record is not None and record.end_s is not None

    def _finish(self) -> SimulationResult:
        result = self._result
        self._scheduler.check_integrity()
        result.records = list(self._records.values())
        result.duration_s = self._now
        result.num_preemptions = self._scheduler.stats.num_preemptions
        if self._now > 0:
            result.num_blocks_mean = self._used_s / self._now
            result.num_waiting_mean = self._waiting_s / self._now
        return result


def prompt_ids(index: int, arrival: Arrival) -> Sequence[int]:
    """Token ids of a prompt that no other request shares, but for the shared prefix. They fit 32 bits."""
    own = (index * 1_000_003) % 2**30
    if not arrival.num_prefix_tokens:
        return range(own, own + arrival.num_prompt_tokens)
    shared = 2**30 + (arrival.prefix * 1_000_003) % 2**29
    return [
        *range(shared, shared + arrival.num_prefix_tokens),
        *range(own, own + arrival.num_prompt_tokens - arrival.num_prefix_tokens),
    ]


def _refusal(error: Refused) -> str:
    if isinstance(error, QueueFull):
        return "QUEUE_FULL"
    return "PROMPT_TOO_LONG" if isinstance(error, NeverFits) else type(error).__name__
