"""The ranks that together hold one copy of a model, through one epoch: driven step by step, and watched.

One failure of one rank ends the epoch: it is reported once, with its cause. The next epoch is
another group's.
"""

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from scheduler_service.core.plan import StepPlan, StepResult
from scheduler_service.engine.causes import Causes, EpochEnd, Kind, RankFailure
from scheduler_service.engine.contexts import without_span
from scheduler_service.engine.flight import FlightRecorder
from scheduler_service.engine.ports import StepStream, StepTimings, WorkerPort, WorkerStatus
from scheduler_service.engine.ranks import Rank, rank_failed
from scheduler_service.engine.supervision import Supervision
from stepwire.rpc.errors import StepwireError

HEARTBEAT_EVERY_S = 1.0
LOST_AFTER_S = 5.0
_HUNG_FACTOR = 20
_NUM_DURATIONS = 512


@dataclass(frozen=True, slots=True)
class RankReport:
    """How a rank stands: what names it, and the seconds since it was last heard of."""

    rank: int
    address: str
    host: str
    process_id: int
    silent_s: float


class StepObserver(Protocol):
    """Who measures steps."""

    def step_sent(self, plan: StepPlan) -> None:
        """A step goes to the workers."""

    def step_written(self) -> None:
        """The step that was sent last is on its way to all ranks."""

    def step_answered(self, rank: int, timings: StepTimings, seconds: float) -> None:
        """A step was answered by the output rank: its parts there, and its whole as seen from here."""

    def step_acknowledged(self, rank: int, step_id: int, timings: StepTimings) -> None:
        """Another rank has executed all steps up to this one; its timings are those of this step."""


class WorkerGroup:
    """A group that is ready to execute steps, in one epoch.

    `on_result` is called with each step's result, in order; `on_end` once, with the cause, when a rank
    is lost. Both on the event loop. `flight`, which whoever made the group may set, keeps steps.
    """

    def __init__(
        self,
        ranks: Sequence[Rank],
        epoch: int,
        *,
        step_timeout_s: float,
        observer: StepObserver,
        supervision: Supervision,
        on_result: Callable[[StepResult], None],
        on_end: Callable[[EpochEnd], None],
    ) -> None:
        self._ranks = list(ranks)
        self.epoch = epoch
        self._step_timeout_s = step_timeout_s
        self._observer = observer
        self._on_result = on_result
        self._causes = Causes(epoch, len(self._ranks), supervision, on_end=on_end)
        self._streams: list[StepStream] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._sent_at: deque[float] = deque()
        self._durations: deque[float] = deque(maxlen=_NUM_DURATIONS)
        self._last_result_at = 0.0
        self._seen_at = [time.monotonic()] * len(self._ranks)
        self.opened_at = time.monotonic()
        self.num_results = 0
        self.flight = FlightRecorder(0)

    @property
    def ports(self) -> list[WorkerPort]:
        """Its workers, by rank."""
        return [rank.port for rank in self._ranks]

    async def open(self) -> None:
        """Opens the step streams and begins to watch. Raises StepwireError."""
        for rank in self._ranks:
            try:
                self._streams.append(await rank.port.open_stream(self.epoch))
            except StepwireError as error:
                raise rank_failed(rank, "open_stream", error) from error
        self._seen_at = [time.monotonic()] * len(self._ranks)
        for rank, stream in zip(self._ranks, self._streams, strict=True):
            self._begin(self._read(rank, stream), f"results of rank {rank.rank}")
            self._begin(self._watch(rank), f"heartbeat of rank {rank.rank}")

    def _begin(self, work: Coroutine[Any, Any, None], name: str) -> None:
        # In a context of its own: the caller's span, that of the start, is over long before this work is.
        self._tasks.append(asyncio.create_task(work, name=name, context=without_span()))

    async def send(self, plan: StepPlan) -> None:
        """Sends a step to every rank. A broken stream is reported by `on_end`, not here."""
        if self._causes.is_ending:
            return
        self._sent_at.append(time.monotonic())
        self._observer.step_sent(plan)
        self.flight.sent(plan)
        step = self._ranks[0].port.encode_step(plan, self.epoch)
        sends = [self._send(rank, stream, step) for rank, stream in zip(self._ranks, self._streams, strict=True)]
        if len(sends) == 1:
            await sends[0]
        else:
            # One after the other they would each wait for gRPC's own thread: 64 ranks then take three times as long.
            await asyncio.gather(*sends)
        if not self._causes.is_ending:
            self._observer.step_written()

    async def _send(self, rank: Rank, stream: StepStream, step: bytes) -> None:
        try:
            await stream.send(step)
        except StepwireError as error:
            self._lose(rank, error)

    @property
    def is_alive(self) -> bool:
        """Whether every rank has lately been heard of."""
        return not self._causes.is_ending and time.monotonic() - min(self._seen_at) < LOST_AFTER_S

    def rank_reports(self) -> list[RankReport]:
        """How each rank stands."""
        now = time.monotonic()
        return [
            RankReport(rank.rank, rank.port.address, rank.host, rank.process_id, now - seen_at)
            for rank, seen_at in zip(self._ranks, self._seen_at, strict=True)
        ]

    async def close(self) -> None:
        """Ends streams and tasks. The connections to the workers stay."""
        self._causes.cancel()
        for stream in self._streams:
            stream.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _read(self, rank: Rank, stream: StepStream) -> None:
        try:
            while not self._causes.is_ending:
                result, timings = await stream.receive()
                now = time.monotonic()
                self._seen_at[rank.rank] = now
                if not rank.place.is_output:
                    self._observer.step_acknowledged(rank.rank, result.step_id, timings)
                    continue
                duration_s = now - max(self._sent_at.popleft(), self._last_result_at)
                self._durations.append(duration_s)
                self._last_result_at = now
                self._observer.step_answered(rank.rank, timings, duration_s)
                self.num_results += 1
                self.flight.answered(result, timings)
                self._on_result(result)
        except StepwireError as error:
            self._lose(rank, error)

    async def _watch(self, rank: Rank) -> None:
        """Asks the rank how it stands, every second; ends the epoch when it is silent or hangs."""
        while not self._causes.is_ending:
            await asyncio.sleep(HEARTBEAT_EVERY_S)
            with contextlib.suppress(StepwireError):
                status = await rank.port.get_status(timeout_s=LOST_AFTER_S / 2)
                self._seen_at[rank.rank] = time.monotonic()
                self._check_epoch(rank, status)
            silent_s = time.monotonic() - self._seen_at[rank.rank]
            if silent_s > LOST_AFTER_S:
                error = StepwireError("WORKER_FAILED", f"no sign of life for {silent_s:.1f} s")
                self._causes.add(RankFailure(rank, Kind.SILENT, error))
            self._check_hung(rank)

    def _check_epoch(self, rank: Rank, status: WorkerStatus) -> None:
        if status.epoch > self.epoch:
            self._causes.add(RankFailure(rank, Kind.OWN_ERROR, fenced(status.epoch, status.scheduler_id)))
        elif status.epoch < self.epoch:
            text = f"it was started anew: it is in epoch {status.epoch}"
            self._causes.add(RankFailure(rank, Kind.EXIT, StepwireError("WORKER_FAILED", text)))

    def _check_hung(self, rank: Rank) -> None:
        if not self._sent_at:
            return
        limit_s = max(self._step_timeout_s, _HUNG_FACTOR * self._slow_step_s())
        # A step that waits behind another one starts when that one ends.
        age_s = time.monotonic() - max(self._sent_at[0], self._last_result_at)
        if age_s > limit_s:
            text = f"a step has been running for {age_s:.1f} s; the limit is {limit_s:.1f} s (step_timeout)"
            error = StepwireError("WORKER_FAILED", text, {"limit_s": f"{limit_s:.1f}"})
            self._causes.add(RankFailure(rank, Kind.HUNG, error))

    def _slow_step_s(self) -> float:
        """The 99th percentile of the last steps' durations, in seconds."""
        if not self._durations:
            return 0.0
        ordered = sorted(self._durations)
        return ordered[math.ceil(0.99 * len(ordered)) - 1]

    def _lose(self, rank: Rank, error: StepwireError) -> None:
        """The step stream of a rank has ended."""
        if error.reason in ("STALE_EPOCH", "STREAM_DISPLACED"):
            error = fenced(error.metadata.get("held", "?"), error.metadata.get("held_by", ""))
        self._causes.add(RankFailure.of_stream(rank, error))


def fenced(epoch: object, scheduler_id: str) -> StepwireError:
    """Another scheduler owns a worker's epoch; whoever began the last one serves."""
    owner = f" ({scheduler_id})" if scheduler_id else ""
    return StepwireError(
        "FENCED",
        f"another scheduler{owner} has taken the worker over: it is in epoch {epoch}; this one serves no more, so "
        "stop one of the two, or give them workers of their own",
        {"held": str(epoch), "held_by": scheduler_id},
    )
