"""What ended an epoch: of all that the ranks say within half a second, the one thing that the rest follows from."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import structlog

from scheduler_service.engine.ranks import Rank, rank_failed
from scheduler_service.engine.supervision import ProcessEnd, Supervision
from stepwire.rpc.errors import StepwireError

COLLECT_S = 0.5
_RETRY_AFTER_S = 5.0
OF_OTHERS = frozenset({"PEER_LOST", "RENDEZVOUS_FAILED"})
"""What a rank says that waited for another one in vain."""
# What a rank says of itself that is no fault of what it computed.
_NO_FAULTS = frozenset({"DRAINING", "FENCED"})

_log = structlog.stdlib.get_logger(__name__)


class Kind(IntEnum):
    """How a rank was lost; what is less is nearer to the root."""

    EXIT = 0
    """Its connection broke: the process ended, or its network."""
    OWN_ERROR = 1
    SILENT = 2
    HUNG = 3
    OTHERS = 4
    """It says that another rank is lost."""


@dataclass(slots=True)
class RankFailure:
    """What was seen of one rank. `end` is how its process ended, where that is known."""

    rank: Rank
    kind: Kind
    error: StepwireError
    end: ProcessEnd | None = None

    @classmethod
    def of_stream(cls, rank: Rank, error: StepwireError) -> "RankFailure":
        """What the end of a step stream says."""
        if error.reason in OF_OTHERS:
            return cls(rank, Kind.OTHERS, error)
        # Only what no Stepwire service said carries gRPC's own code.
        return cls(rank, Kind.EXIT if "grpc_code" in error.metadata else Kind.OWN_ERROR, error)

    @property
    def is_fault(self) -> bool | None:
        """Whether a fault inside the worker ended it; None when that cannot be told yet."""
        if self.end is not None:
            return self.end.is_fault
        if self.kind is Kind.EXIT:
            return None
        return self.kind is Kind.HUNG or (self.kind is Kind.OWN_ERROR and self.error.reason not in _NO_FAULTS)


@dataclass(frozen=True, slots=True)
class EpochEnd:
    """Why an epoch ended. `error` is what clients are told if it cannot be mended."""

    epoch: int
    root: RankFailure
    error: StepwireError

    @property
    def is_final(self) -> bool:
        """Whether no new epoch may be begun."""
        return self.root.error.reason == "FENCED"


class Causes:
    """Collects what is seen of the ranks of one epoch once it has begun to end, and finds the root.

    `on_end` is called once the root is known.
    """

    def __init__(
        self,
        epoch: int,
        num_ranks: int,
        supervision: Supervision,
        *,
        on_end: Callable[[EpochEnd], None],
    ) -> None:
        self._epoch = epoch
        self._num_ranks = num_ranks
        self._supervision = supervision
        self._on_end = on_end
        self._failures: list[RankFailure] = []
        self._all_spoke = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_cancelled = False

    @property
    def is_ending(self) -> bool:
        """Whether a rank has failed."""
        return bool(self._failures)

    def add(self, failure: RankFailure) -> None:
        """Notes what is seen of a rank; the first of each counts."""
        if self._is_cancelled or any(seen.rank is failure.rank for seen in self._failures):
            return
        self._failures.append(failure)
        if len(self._failures) == self._num_ranks or failure.error.reason == "FENCED":
            self._all_spoke.set()
        if self._task is None:
            self._task = asyncio.create_task(self._conclude(), name=f"cause of the end of epoch {self._epoch}")

    def cancel(self) -> None:
        """Collects no more, and tells nobody."""
        self._is_cancelled = True
        if self._task is not None:
            self._task.cancel()

    async def _conclude(self) -> None:
        deadline = time.monotonic() + COLLECT_S
        await _within(deadline, self._all_spoke.wait())
        await asyncio.gather(*(self._learn_end(failure, deadline) for failure in self._failures))
        first = root_of(self._failures)
        others = [failure for failure in self._failures if failure is not first]
        end = EpochEnd(self._epoch, first, _error_of(first))
        # A rank's own error is in its own log, as an error; here it is what followed.
        say = _log.warning if first.kind is Kind.OWN_ERROR and not end.is_final else _log.error
        say(
            "epoch_ended",
            epoch=self._epoch,
            reason=end.error.reason,
            error=end.error.message,
            cause_kind=first.kind.name.lower(),
            consequences=[f"rank {other.rank.rank}: {other.error.message}" for other in others],
            **{f"error_{key}": value for key, value in end.error.metadata.items()},
        )
        self._on_end(end)

    async def _learn_end(self, failure: RankFailure, deadline: float) -> None:
        if failure.kind is Kind.EXIT:
            left_s = max(0.0, deadline - time.monotonic())
            failure.end = await self._supervision.end_of(failure.rank.port.address, failure.rank.process_id, left_s)


async def _within(deadline: float, work: Awaitable[object]) -> None:
    try:
        async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
            await work
    except TimeoutError:
        return


def _error_of(failure: RankFailure) -> StepwireError:
    error = failure.error
    if failure.error.reason == "FENCED":
        return rank_failed(failure.rank, "execute_model", error)
    if failure.end is not None:
        metadata = {**error.metadata, "exit_status": str(failure.end.status)}
        error = StepwireError(error.reason, failure.end.text, metadata)
    named = rank_failed(failure.rank, "execute_model", error, "WORKER_FAILED")
    return StepwireError(named.reason, named.message, named.metadata, retry_after_s=_RETRY_AFTER_S)


def root_of(failures: Sequence[RankFailure]) -> RankFailure:
    """The failure nearest to the root; of a kind, what was seen first."""
    return min(failures, key=lambda failure: failure.kind)
