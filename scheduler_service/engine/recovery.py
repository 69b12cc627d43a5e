"""The life of a worker group over its epochs: when one ends, the next is begun, and steps go on.

Whoever must know of epochs, the engine first of all, is an EpochObserver: this is the one place where
epochs begin and end.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import structlog
from opentelemetry.trace import Status, StatusCode, Tracer

from scheduler_service.core.plan import StepPlan, StepResult
from scheduler_service.engine.causes import EpochEnd, Kind
from scheduler_service.engine.contexts import without_span
from scheduler_service.engine.flight import FlightRecorder
from scheduler_service.engine.group import StepObserver, WorkerGroup
from scheduler_service.engine.ports import WorkerPort
from scheduler_service.engine.ranks import Rank
from scheduler_service.engine.start import GroupStarter, StartedGroup
from stepwire.rpc.errors import StepwireError
from stepwire.telemetry import names

# An epoch that was ready for so long counts as good, even if nobody asked for a step.
_GOOD_AFTER_S = 60.0
_LEAST_PAUSE_S = 0.1
_MOST_PAUSE_S = 2.0

_log = structlog.stdlib.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Epoch:
    """One incarnation of a group, ready for steps. `follows_fault`: the one before ended by a fault inside a worker."""

    number: int
    ranks: Sequence[Rank]
    follows_fault: bool = False


class EpochObserver(Protocol):
    """Who is told, on the event loop, of the beginning and the end of each epoch."""

    def epoch_began(self, epoch: Epoch) -> None:
        """All ranks are ready; no step of it was sent."""

    def epoch_ended(self, end: EpochEnd) -> None:
        """No more steps of it are answered."""


Preparation = Callable[[Sequence[WorkerPort], int], Awaitable[None]]
"""Called with the workers of an epoch and its number; may raise StepwireError, which ends the attempt."""


@dataclass(frozen=True, slots=True)
class LifePlan:
    """How a worker group is kept going: who starts its epochs, how many may end in vain, who keeps the last
    steps, and who else is told."""

    starter: GroupStarter
    step_timeout_s: float
    restart_budget: int
    flight: FlightRecorder = field(default_factory=lambda: FlightRecorder(0))
    observers: Sequence[EpochObserver] = ()
    model: str = ""
    """The name of the model that is served, for traces."""


class RestartBudget:
    """How many epochs in a row may end without an applied step."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._num_fruitless = 0

    def count(self, num_results: int, ready_s: float) -> bool:
        """Counts the end of an epoch; answers whether another one may be begun."""
        is_good = num_results > 0 or ready_s >= _GOOD_AFTER_S
        self._num_fruitless = 0 if is_good else self._num_fruitless + 1
        return self._num_fruitless <= self._limit


class GroupLife:
    """Keeps one worker group going. The step loop sends its steps here.

    `preparations` bring what sequences need to the workers of each new epoch, before any of its steps.
    `group` is the one of the epoch that lasts, None between two. `on_give_up` is called once, with the cause, when the
    restart budget is spent, or another scheduler has taken the workers.
    """

    def __init__(
        self,
        plan: LifePlan,
        tracer: Tracer,
        *,
        observer: StepObserver,
        on_result: Callable[[StepResult], None],
        on_give_up: Callable[[StepwireError], None],
    ) -> None:
        self.observers: list[EpochObserver] = list(plan.observers)
        self.preparations: list[Preparation] = []
        self._starter = plan.starter
        self._budget = RestartBudget(plan.restart_budget)
        self._tracer = tracer
        self._step_timeout_s = plan.step_timeout_s
        self._model = plan.model
        self._flight = plan.flight
        self._observer = observer
        self._on_result = on_result
        self._on_give_up = on_give_up
        self.group: WorkerGroup | None = None
        self._recovery: asyncio.Task[None] | None = None

    async def begin(self, started: StartedGroup) -> None:
        """Opens the step streams of the first epoch. Raises StepwireError."""
        await self._open(started, follows_fault=False)

    async def send(self, plan: StepPlan) -> None:
        """Sends a step. One that falls into the end of an epoch is lost, and planned again in the next."""
        if self.group is not None:
            await self.group.send(plan)

    @property
    def is_alive(self) -> bool:
        """Whether every rank has lately been heard of, and no epoch has just ended."""
        return self.group is not None and self.group.is_alive

    async def close(self) -> None:
        """Ends streams, tasks and a recovery under way."""
        if self._recovery is not None:
            self._recovery.cancel()
            await asyncio.gather(self._recovery, return_exceptions=True)
        if self.group is not None:
            await self.group.close()

    async def _open(self, started: StartedGroup, *, follows_fault: bool) -> None:
        for prepare in self.preparations:
            await prepare([rank.port for rank in started.ranks], started.epoch)
        self._flight.begin_epoch()
        group = WorkerGroup(
            started.ranks,
            started.epoch,
            step_timeout_s=self._step_timeout_s,
            observer=self._observer,
            supervision=self._starter.supervision,
            on_result=self._on_result,
            on_end=self._epoch_ended,
        )
        group.flight = self._flight
        try:
            await group.open()
        except BaseException:
            await group.close()
            raise
        self.group = group
        for observer in self.observers:
            observer.epoch_began(Epoch(started.epoch, started.ranks, follows_fault))

    def _epoch_ended(self, end: EpochEnd) -> None:
        for observer in self.observers:
            observer.epoch_ended(end)
        # In a context of its own: this is called from within the old epoch's tasks.
        self._recovery = asyncio.create_task(self._recover_or_give_up(end), name="recovery", context=without_span())

    async def _recover_or_give_up(self, end: EpochEnd) -> None:
        try:
            await self._recover(end)
        except Exception as error:
            # Nobody waits for this task: requests would wait for ever.
            _log.exception("recovery_failed", reason="INTERNAL")
            text = f"the recovery failed: {error!r}; its log has the cause"
            self._on_give_up(StepwireError("INTERNAL", text, end.error.metadata))

    async def _recover(self, end: EpochEnd) -> None:
        began, group = time.monotonic(), self.group
        if group is None:
            raise RuntimeError("an epoch ended that had not begun")
        await group.close()
        num_results, ready_s = group.num_results, began - group.opened_at
        self.group = None
        if end.is_final:
            self._on_give_up(end.error)
            return
        problem: StepwireError | None = None
        self._ask_to_replace(end)
        process_id, pause_s = end.root.rank.process_id, _LEAST_PAUSE_S
        with self._span(end):
            while self._budget.count(num_results, ready_s):
                num_results, ready_s = 0, 0.0
                try:
                    started = await self._starter.start()
                    # A process that is another now ended by itself, as far as anybody knows.
                    is_fault = end.root.is_fault
                    follows = end.root.rank.process_id != process_id if is_fault is None else is_fault
                    await self._open(started, follows_fault=follows)
                except StepwireError as error:
                    _log.warning("recovery_failed", reason=error.reason, error=error.message)
                    problem = error
                    if error.reason == "FENCED":
                        break
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, _MOST_PAUSE_S)
                    continue
                seconds = round(time.monotonic() - began, 3)
                _log.info("recovered", epoch=started.epoch, seconds=seconds, follows_fault=follows)
                return
        self._on_give_up(_given_up(end.error, problem))

    def _ask_to_replace(self, end: EpochEnd) -> None:
        """A process that hangs or does not answer will not end by itself."""
        rank = end.root.rank
        if end.root.kind in (Kind.SILENT, Kind.HUNG):
            _log.info("worker_replaced", rank=rank.rank, address=rank.port.address, process_id=rank.process_id)
            self._starter.supervision.replace(rank.port.address, rank.process_id)

    @contextmanager
    def _span(self, end: EpochEnd) -> Iterator[None]:
        """The root span of a recovery; the phases of the new epoch are below it."""
        attributes: dict[str, str | int | bool] = {
            names.GEN_AI_REQUEST_MODEL: self._model,
            names.EPOCH: end.epoch,
            names.RANK: end.root.rank.rank,
            names.WORKER: end.root.rank.port.address,
            names.ERROR_TYPE: end.error.reason,
            names.KEEP: True,
        }
        with self._tracer.start_as_current_span(names.SPAN_GROUP_RECOVERY, attributes=attributes) as span:
            span.add_event(names.EVENT_WORKER_LOST, {names.ERROR_MESSAGE: end.error.message})
            yield
            if self.group is None:
                span.set_status(Status(StatusCode.ERROR, "not recovered"))


def _given_up(first: StepwireError, last: StepwireError | None) -> StepwireError:
    """What requests end with: why the worker was lost, and why it did not come back. Nobody is told to try again."""
    if last is not None and last.reason == "FENCED":
        return last
    text = f"the workers were lost too often in a row (restart_budget): {first.message}"
    if last is None:
        return StepwireError(first.reason, text, first.metadata)
    metadata = {**first.metadata, **last.metadata, "cause_reason": last.reason}
    return StepwireError(first.reason, f"{text}; the last start of new ones failed: {last.message}", metadata)
