"""One replica of a model: a worker group, and the scheduler and step loop that drive it."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog
from opentelemetry.trace import Tracer

from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.plan import StepResult
from scheduler_service.core.request import Request
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.engine.causes import EpochEnd
from scheduler_service.engine.grammars import GrammarHold, Grammars
from scheduler_service.engine.group import RankReport, WorkerGroup
from scheduler_service.engine.live import LiveRequest
from scheduler_service.engine.loop import StepLoop
from scheduler_service.engine.metrics import EngineMetrics
from scheduler_service.engine.ports import SleepLevel, WorkerPort
from scheduler_service.engine.recovery import Epoch, GroupLife, LifePlan
from scheduler_service.engine.served import ServedModel
from scheduler_service.engine.start import StartedGroup
from scheduler_service.engine.step_tracing import RankTotals, StepTraceRule, StepTracing
from stepwire.rpc.errors import StepwireError

# A request that was moved so often stays with its replica: it may be what the workers break on, and is tried there.
MAX_MOVES = 2

_log = structlog.stdlib.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ReplicaParts:
    """What all replicas of a model share. `on_defect` is called when a step loop itself fails."""

    model_name: str
    model: ServedModel
    tracer: Tracer
    metrics: EngineMetrics
    step_traces: StepTraceRule
    on_defect: Callable[[BaseException], None]


class Replica:
    """Serves requests of one model on one worker group, epoch after epoch.

    `on_epoch_begin` and `on_epoch_end` are called when an epoch has begun and ended, `on_lost` once, with the cause,
    when no other will follow.
    """

    def __init__(
        self,
        number: int,
        parts: ReplicaParts,
        config: SchedulerConfig,
        life: LifePlan,
        *,
        on_epoch_begin: "Callable[[Replica], None]",
        on_epoch_end: "Callable[[Replica], None]",
        on_lost: "Callable[[Replica, StepwireError], None]",
    ) -> None:
        self.number = number
        self.scheduler_id = life.starter.scheduler_id
        """Whom its workers say that they belong to."""
        self.tracing = StepTracing(parts.tracer, parts.metrics, parts.step_traces, parts.model_name)
        self.is_leaving = False
        """Whether it takes no new requests, because it was told to drain."""
        self.sleep_level = SleepLevel.AWAKE
        """What its workers have given back."""
        self.failure: StepwireError | None = None
        self.ports: Sequence[WorkerPort] = ()
        """Its workers, by rank."""
        self._is_recovering = False
        self._reports: list[RankReport] = []
        self._on_epoch_begin = on_epoch_begin
        self._on_epoch_end = on_epoch_end
        self._on_lost = on_lost
        self._life = GroupLife(
            life, parts.tracer, observer=self.tracing, on_result=self._take_result, on_give_up=self._give_up
        )
        self._life.observers += [self, parts.metrics]
        self.grammars = Grammars()
        """Those that its live requests use."""
        self._life.preparations.append(self.grammars.begin_epoch)
        checker = parts.model.grammars
        life.flight.grammars = lambda keys: {**checker.texts(keys), **self.grammars.texts(keys)}
        detokenizer = parts.model.tokens.detokenizer
        self.loop = StepLoop(Scheduler(config, time.monotonic), self._life, detokenizer, parts.on_defect)

    async def begin(self, started: StartedGroup) -> None:
        """Serves on workers that are ready. Raises StepwireError when their step streams cannot be opened."""
        self.ports = [rank.port for rank in started.ranks]
        await self._life.begin(started)
        self.loop.start()
        self.rank_reports()

    async def close(self) -> None:
        """Ends loop and group. Requests must have ended, or been moved."""
        await self.loop.close()
        await self._life.close()

    # How it stands.

    @property
    def scheduler(self) -> Scheduler:
        """For its counts; nobody else changes it."""
        return self.loop.scheduler

    @property
    def group(self) -> WorkerGroup | None:
        """Its workers; None between two epochs."""
        return self._life.group

    def rank_reports(self) -> list[RankReport]:
        """How each of its workers stands; those of the epoch before between two."""
        if self.group is not None:
            self._reports = self.group.rank_reports()
        return self._reports

    @property
    def is_recovering(self) -> bool:
        """Whether an epoch has ended and the next has not begun."""
        return self._is_recovering and self.failure is None

    @property
    def is_healthy(self) -> bool:
        """Whether its step loop goes round, and its workers are heard of."""
        return self.failure is None and not self._is_recovering and self.loop.is_alive and self._life.is_alive

    @property
    def takes_requests(self) -> bool:
        """Whether new requests may be given to it: also while it recovers, when they wait."""
        return self.failure is None and not self.is_leaving

    def cost(self, request: Request) -> int:
        """Prompt tokens to compute before this request's first token: its own that are not cached, and those of what
        waits. A sequence that runs counts as one.

        Its own count twice: they also take blocks of the cache from what other requests would have found there.
        """
        scheduler = self.scheduler
        own = len(request.prompt_token_ids) - scheduler.num_cached_tokens(request)
        return 2 * own + scheduler.num_queued_tokens + scheduler.num_running

    # Requests that go elsewhere.

    async def move_all(self, target: "Replica", *, limit: int | None = MAX_MOVES) -> None:
        """Gives the requests that live here to another replica, but those that were moved `limit` times.

        What was sampled for them is delivered first. One that the other cannot take stays. Those whose output has a
        form go when the other's workers have its grammar.
        """
        await self.loop.settle()
        leaving = [live for live in self.loop.live if self._may_leave(live, target, limit)]
        self._give(target, [live for live in leaving if live.grammar is None])
        moves = (self._move_with(live.grammar, live, target, limit) for live in leaving if live.grammar is not None)
        await asyncio.gather(*moves)

    async def _move_with(self, held: GrammarHold, live: LiveRequest, target: "Replica", limit: int | None) -> None:
        try:
            hold = await target.grammars.acquire(held.grammar)
        except StepwireError as error:
            _log.info(
                "request_not_moved", request_id=live.request.request_id, replica=target.number, error=error.message
            )
            return
        try:
            await self.loop.settle()
            if self._may_leave(live, target, limit):
                live.grammar, hold = hold, held
                self._give(target, [live])
        finally:
            hold.release()

    def _may_leave(self, live: LiveRequest, target: "Replica", limit: int | None) -> bool:
        """Whether a request lives here, and may go on there."""
        is_movable = target.takes_requests and (limit is None or live.num_moves < limit)
        return is_movable and live in self.loop.live and self.loop.can_move(live) and target.loop.can_adopt(live)

    def _give(self, target: "Replica", leaving: Sequence[LiveRequest]) -> None:
        for live, withdrawn in zip(leaving, self.loop.withdraw(leaving), strict=True):
            target.loop.adopt(live, withdrawn)
            live.num_moves += 1
            live.loop = target.loop
            live.trace.moved(target.tracing, target.number)

    # Epochs.

    def epoch_ended(self, end: EpochEnd) -> None:
        """See EpochObserver: what runs pauses, or goes elsewhere, and what comes waits."""
        self._is_recovering = True
        if self.sleep_level is not SleepLevel.AWAKE:
            # The next epoch begins awake.
            self.sleep_level = SleepLevel.AWAKE
            self.loop.release()
        self.tracing.end_epoch(end.error.message)
        self.loop.pause()
        self._on_epoch_end(self)

    def epoch_began(self, epoch: Epoch) -> None:
        """See EpochObserver: everything goes on."""
        self._is_recovering = False
        ranks = [RankTotals(rank.rank, rank.port.address, rank.host, rank.process_id) for rank in epoch.ranks]
        self.tracing.begin_epoch(epoch.number, ranks)
        self.loop.resume(follows_fault=epoch.follows_fault)
        self._on_epoch_begin(self)

    def _give_up(self, error: StepwireError) -> None:
        self.failure = error
        self.tracing.end_epoch(error.message)
        self._on_lost(self, error)

    def _take_result(self, result: StepResult) -> None:
        self.loop.take_result(result)
