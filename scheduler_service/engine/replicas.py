"""The replicas of one model: which one takes a request, and what becomes of requests when one is lost."""

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterator
from typing import Any

import structlog

from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.request import Request
from scheduler_service.engine.changes import Changes
from scheduler_service.engine.contexts import without_span
from scheduler_service.engine.grammars import EPOCH_ENDS
from scheduler_service.engine.live import LiveRequest
from scheduler_service.engine.placing import Placing
from scheduler_service.engine.recovery import LifePlan
from scheduler_service.engine.refusals import not_ready
from scheduler_service.engine.replica import Replica, ReplicaParts
from scheduler_service.engine.start import StartedGroup
from stepwire.rpc.errors import StepwireError

# How long a request waits for workers that can take its grammar.
_NEXT_EPOCH_S = 60.0
_log = structlog.stdlib.get_logger(__name__)


class Replicas:
    """All replicas of one model, in the order in which they came. On the event loop.

    When an epoch of one ends, its requests go on at once with another one that serves, if there is any; else they wait
    for whichever recovers first. `on_removed` is called when one serves no more, `on_all_lost` when the last has given
    up.
    """

    def __init__(self, *, on_removed: Callable[[Replica], None], on_all_lost: Callable[[StepwireError], None]) -> None:
        self._on_removed = on_removed
        self._on_all_lost = on_all_lost
        self._replicas: list[Replica] = []
        self._placing = Placing()
        self._moves = Changes("move requests", takes_errors=False)
        self._num_made = 0
        self._next_epoch = asyncio.Event()

    def __iter__(self) -> Iterator[Replica]:
        return iter(tuple(self._replicas))

    def __len__(self) -> int:
        return len(self._replicas)

    # They come and go.

    async def add(self, parts: ReplicaParts, started: StartedGroup, config: SchedulerConfig, life: LifePlan) -> int:
        """Serves on these workers, too; answers the replica's number, counted from 0.

        Raises StepwireError when their step streams cannot be opened, FIELD_INVALID when they hold fewer KV blocks than
        another replica: what was accepted there could not go on here.
        """
        needed = max((replica.scheduler.config.num_blocks for replica in self._replicas), default=0)
        if config.num_blocks < needed:
            text = f"the new workers hold {config.num_blocks} KV blocks, others {needed}; give them more memory"
            raise StepwireError("FIELD_INVALID", text, {"field": "workers", "needed_blocks": str(needed)})
        number, self._num_made = self._num_made, self._num_made + 1
        replica = Replica(
            number,
            parts,
            config,
            life,
            on_epoch_begin=self._take_in,
            on_epoch_end=self._rescue,
            on_lost=self._lost,
        )
        try:
            await replica.begin(started)
        except BaseException:
            await replica.close()
            raise
        self._replicas.append(replica)
        return number

    async def drain(self, number: int) -> None:
        """Takes a replica out of service: its requests go on elsewhere, those that cannot end there first.

        Raises FIELD_INVALID for one that is not there, or that is the last to serve.
        """
        replica = next((each for each in self._replicas if each.number == number and each.takes_requests), None)
        if replica is None or len(self._open()) < 2:
            numbers = ", ".join(str(each.number) for each in self._open())
            text = f"replica {number} cannot be drained: these serve: {numbers}, and one must stay"
            raise StepwireError("FIELD_INVALID", text, {"field": "replica", "found": str(number)})
        replica.is_leaving = True
        self._placing.forget(replica)
        if (target := self._other(replica)) is not None:
            await replica.move_all(target)
        await replica.loop.live.wait_empty()
        await self._remove(replica)

    async def close(self) -> None:
        """Ends all of them. Requests must have ended."""
        await self._moves.close()
        for replica in self:
            await replica.close()

    def end_all(self, error: StepwireError) -> None:
        """Ends every request with an error."""
        for replica in self._replicas:
            replica.loop.end_all(error)

    # Requests.

    def check_queues(self, num_sequences: int, num_arriving: int) -> None:
        """Raises QUEUE_FULL when no replica lets so many sequences wait beside those that are being tokenized."""
        places, refusal = self._open(), None
        for replica in places:
            try:
                replica.loop.check_queue(num_sequences, num_arriving // len(places))
            except StepwireError as error:
                refusal = error
            else:
                return
        raise refusal or not_ready()

    def choose(self, request: Request, *, but: Collection[Replica] = ()) -> Replica:
        """The replica for a request, one of `but` only where there are no others. Raises REQUEST_ALREADY_EXISTS,
        MODEL_NOT_READY."""
        places = self._open()
        places = [replica for replica in places if replica not in but] or places
        if not places:
            raise not_ready()
        for replica in self._replicas:
            # Wherever it lives: it may be moved.
            replica.loop.live.check_id(request.request_id)
        return self._placing.choose(request, places)

    async def choose_with(self, grammar: str, live: LiveRequest) -> Replica:
        """The replica for a request that holds a grammar from now on, which all of its workers have.

        Where workers are lost meanwhile another replica is asked, or the first that recovers. Raises as `choose` does,
        and what the workers raise.
        """
        lost: set[Replica] = set()
        while True:
            next_epoch = self._next_epoch
            replica = self.choose(live.request, but=lost)
            try:
                hold = await replica.grammars.acquire(grammar)
            except StepwireError as error:
                if error.reason not in EPOCH_ENDS:
                    raise
                lost.add(replica)
                if not any(each.is_healthy for each in self._open() if each not in lost):
                    await _wait_for(next_epoch, error)
                    lost.clear()
                continue
            if replica.takes_requests:
                live.grammar = hold
                return replica
            hold.release()

    def _open(self) -> list[Replica]:
        return [replica for replica in self._replicas if replica.takes_requests]

    def _other(self, replica: Replica) -> Replica | None:
        """The one with least to do among the others that serve."""
        others = [each for each in self._open() if each is not replica and each.is_healthy]
        return min(others, key=lambda each: each.scheduler.num_queued_tokens + each.scheduler.num_running, default=None)

    # Losses.

    def _rescue(self, replica: Replica) -> None:
        if (target := self._other(replica)) is not None:
            self._begin(replica.move_all(target))

    def _take_in(self, replica: Replica) -> None:
        """One is back: requests of those that are not go on with it."""
        self._wake()
        for other in self._replicas:
            if other is not replica and other.is_recovering:
                self._begin(other.move_all(replica))

    def _lost(self, replica: Replica, error: StepwireError) -> None:
        self._wake()
        if all(each.failure is not None for each in self._replicas):
            self._on_all_lost(error)
            return
        _log.error("replica_lost", replica=replica.number, reason=error.reason, error=error.message)
        self._begin(self._abandon(replica, error))

    async def _abandon(self, replica: Replica, error: StepwireError) -> None:
        for other in self._open():
            await replica.move_all(other, limit=None)
        replica.loop.end_all(error)
        await self._remove(replica)

    async def _remove(self, replica: Replica) -> None:
        self._placing.forget(replica)
        if replica in self._replicas:
            self._replicas.remove(replica)
            self._on_removed(replica)
            await replica.close()

    def _wake(self) -> None:
        """Lets those that wait for a replica look again."""
        self._next_epoch.set()
        self._next_epoch = asyncio.Event()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        # In a context of its own: this is called from within the old epoch's tasks.
        self._moves.begin(work, context=without_span())


async def _wait_for(event: asyncio.Event, error: StepwireError) -> None:
    """Raises `error` when it does not come in time."""
    try:
        async with asyncio.timeout(_NEXT_EPOCH_S):
            await event.wait()
    except TimeoutError:
        raise error from None
