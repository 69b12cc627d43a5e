"""The ranks that together hold one copy of a model: walked to readiness, driven step by step, watched.

One failure of one rank ends the group: it is reported once, with its cause, and every later use
raises it again.
"""

import asyncio
import contextlib
import contextvars
import math
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from scheduler_service.core.plan import StepPlan, StepResult
from scheduler_service.engine.ports import StepStream, StepTimings, WorkerPort
from stepwire.rpc.errors import StepwireError

HEARTBEAT_EVERY_S = 1.0
LOST_AFTER_S = 5.0
_HUNG_FACTOR = 20
_NUM_DURATIONS = 512


@dataclass(slots=True)
class Rank:
    """One worker of a group; host and process id as it says itself."""

    rank: int
    port: WorkerPort
    host: str = ""
    process_id: int = 0

    def describe(self) -> dict[str, str]:
        """What names this rank in an error's metadata."""
        known = {"rank": str(self.rank), "address": self.port.address}
        if self.host:
            known |= {"host": self.host, "process_id": str(self.process_id)}
        return known


@dataclass(frozen=True, slots=True)
class RankReport:
    """How a rank stands: what names it, and the seconds since it was last heard of."""

    rank: int
    address: str
    host: str
    process_id: int
    silent_s: float


def rank_failed(rank: Rank, phase: str, error: StepwireError, reason: str | None = None) -> StepwireError:
    """An error of a rank, with where it happened. The reason stays the rank's own unless one is given."""
    where = f"rank {rank.rank} at {rank.port.address}" + (f" on host {rank.host}" if rank.host else "")
    metadata = {**error.metadata, **rank.describe(), "phase": phase, "cause": error.message}
    if reason is not None and reason != error.reason:
        metadata["cause_reason"] = error.reason
    return StepwireError(reason or error.reason, f"{phase} failed on {where}: {error.message}", metadata)


class StepObserver(Protocol):
    """Who measures steps."""

    def step_sent(self, plan: StepPlan) -> None:
        """A step goes to the workers."""

    def step_written(self) -> None:
        """The step that was sent last is on its way to all ranks."""

    def step_answered(self, rank: int, timings: StepTimings, seconds: float) -> None:
        """A step was answered by a rank: its parts there, and its whole as seen from here."""


class WorkerGroup:
    """A group that is ready to execute steps, in one epoch.

    `on_result` is called with each step's result, in order; `on_failure` once, with the cause, when
    a rank is lost. Both on the event loop.
    """

    def __init__(
        self,
        ranks: Sequence[Rank],
        epoch: int,
        *,
        step_timeout_s: float,
        observer: StepObserver,
        on_result: Callable[[StepResult], None],
        on_failure: Callable[[StepwireError], None],
    ) -> None:
        self._ranks = list(ranks)
        self.epoch = epoch
        self._step_timeout_s = step_timeout_s
        self._observer = observer
        self._on_result = on_result
        self._on_failure = on_failure
        self._streams: list[StepStream] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._sent_at: deque[float] = deque()
        self._durations: deque[float] = deque(maxlen=_NUM_DURATIONS)
        self._last_result_at = 0.0
        self._seen_at = [time.monotonic()] * len(self._ranks)
        self.failure: StepwireError | None = None

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
        self._tasks.append(asyncio.create_task(work, name=name, context=contextvars.Context()))

    async def send(self, plan: StepPlan) -> None:
        """Sends a step to every rank. A broken stream is reported by `on_failure`, not here."""
        if self.failure is not None:
            return
        self._sent_at.append(time.monotonic())
        self._observer.step_sent(plan)
        for rank, stream in zip(self._ranks, self._streams, strict=True):
            try:
                await stream.send(plan)
            except StepwireError as error:
                self._fail(rank, error)
                return
        self._observer.step_written()

    @property
    def is_alive(self) -> bool:
        """Whether every rank has lately been heard of."""
        return self.failure is None and time.monotonic() - min(self._seen_at) < LOST_AFTER_S

    def rank_reports(self) -> list[RankReport]:
        """How each rank stands."""
        now = time.monotonic()
        return [
            RankReport(rank.rank, rank.port.address, rank.host, rank.process_id, now - seen_at)
            for rank, seen_at in zip(self._ranks, self._seen_at, strict=True)
        ]

    async def close(self) -> None:
        """Ends streams and tasks, and closes the connections."""
        for stream in self._streams:
            stream.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for rank in self._ranks:
            await rank.port.close()

    async def _read(self, rank: Rank, stream: StepStream) -> None:
        try:
            while self.failure is None:
                result, timings = await stream.receive()
                now = time.monotonic()
                self._seen_at[rank.rank] = now
                duration_s = now - max(self._sent_at.popleft(), self._last_result_at)
                self._durations.append(duration_s)
                self._last_result_at = now
                self._observer.step_answered(rank.rank, timings, duration_s)
                self._on_result(result)
        except StepwireError as error:
            self._fail(rank, error)

    async def _watch(self, rank: Rank) -> None:
        """Asks the rank how it stands, every second; fails the group when it is silent or hangs."""
        while self.failure is None:
            await asyncio.sleep(HEARTBEAT_EVERY_S)
            with contextlib.suppress(StepwireError):
                status = await rank.port.get_status(timeout_s=LOST_AFTER_S / 2)
                self._seen_at[rank.rank] = time.monotonic()
                if status.epoch != self.epoch:
                    text = f"another scheduler has taken the worker over: it is in epoch {status.epoch}"
                    self._fail(rank, StepwireError("STALE_EPOCH", text, {"epoch": str(status.epoch)}))
            silent_s = time.monotonic() - self._seen_at[rank.rank]
            if silent_s > LOST_AFTER_S:
                self._fail(rank, StepwireError("WORKER_FAILED", f"no sign of life for {silent_s:.1f} s"))
            self._check_hung(rank)

    def _check_hung(self, rank: Rank) -> None:
        if not self._sent_at:
            return
        limit_s = max(self._step_timeout_s, _HUNG_FACTOR * self._slow_step_s())
        # A step that waits behind another one starts when that one ends.
        age_s = time.monotonic() - max(self._sent_at[0], self._last_result_at)
        if age_s > limit_s:
            text = f"a step has been running for {age_s:.1f} s; the limit is {limit_s:.1f} s (step_timeout)"
            self._fail(rank, StepwireError("WORKER_FAILED", text, {"limit_s": f"{limit_s:.1f}"}))

    def _slow_step_s(self) -> float:
        """The 99th percentile of the last steps' durations, in seconds."""
        if not self._durations:
            return 0.0
        ordered = sorted(self._durations)
        return ordered[math.ceil(0.99 * len(ordered)) - 1]

    def _fail(self, rank: Rank, error: StepwireError) -> None:
        if self.failure is not None:
            return
        failure = rank_failed(rank, "execute_model", error, "WORKER_FAILED")
        self.failure = StepwireError(failure.reason, failure.message, failure.metadata, retry_after_s=5.0)
        for stream in self._streams:
            stream.cancel()
        self._on_failure(self.failure)
