"""Sleep and wake: the workers give their devices' memory back while nobody needs it.

Requests that arrive meanwhile wait, or are refused, as `SleepRule` says; those that wait keep their
deadlines. A worker that is lost in its sleep is replaced like any other, and then the group is awake.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog

from scheduler_service.engine.changes import Changes, all_of
from scheduler_service.engine.group import WorkerGroup
from scheduler_service.engine.ports import SleepLevel, WorkerPort
from scheduler_service.engine.replica import Replica
from stepwire.rpc.errors import StepwireError

_RETRY_AFTER_S = 5.0

_log = structlog.stdlib.get_logger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SleepRule:
    """Whether running sequences are preempted, rather than finished, and requests that arrive refused."""

    preempts: bool = False
    refuses: bool = False


class Sleeper:
    """Puts the workers of a model's replicas to sleep and wakes them, all of them. One change at a time.

    `restore` makes workers that have dropped their weights hold again what they held beside them.
    """

    def __init__(
        self,
        replicas: Iterable[Replica],
        rule: SleepRule,
        restore: Callable[[Sequence[WorkerPort], int], Coroutine[Any, Any, None]],
    ) -> None:
        self._replicas = replicas
        self._rule = rule
        self._restore = restore
        self._lock = asyncio.Lock()
        self._is_going = False
        self._changes = Changes("sleep", takes_errors=True)
        self._interruptible: set[asyncio.Task[Any]] = set()

    @property
    def level(self) -> SleepLevel:
        """What the workers of every replica have given back."""
        return min((replica.sleep_level for replica in self._replicas), default=SleepLevel.AWAKE)

    @property
    def is_down(self) -> bool:
        """Whether all sleep, or are about to."""
        return self._is_going or self.level is not SleepLevel.AWAKE

    @property
    def is_closed(self) -> bool:
        """Whether requests are refused for it."""
        return self._rule.refuses and self.is_down

    def require_open(self) -> None:
        """Raises MODEL_ASLEEP where requests are refused for it."""
        if self.is_closed:
            text = "the model sleeps and takes no requests (sleep_arrivals); wake it up with stepwire admin wake"
            raise StepwireError("MODEL_ASLEEP", text, retry_after_s=_RETRY_AFTER_S)

    async def sleep(self, level: SleepLevel) -> SleepLevel:
        """Waits until nothing runs, then has all workers give memory back; answers the level in force.

        A caller that leaves while sequences still run undoes it; later it goes on. Raises MODEL_NOT_READY, and what a
        worker raises: then all that were awake are so again.
        """
        return await self._change(self._sleep(level))

    async def wake_up(self) -> None:
        """Has all workers take their memory again. Raises what one of them raises: then its replica sleeps on, and may
        be woken again."""
        await self._change(self._wake_up())

    async def close(self) -> None:
        """Ends changes under way."""
        await self._changes.close()

    async def _change(self, change: Coroutine[Any, Any, T]) -> T:
        task = self._changes.begin(change)
        self._interruptible.add(task)
        task.add_done_callback(self._interruptible.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task in self._interruptible:
                task.cancel()
            raise

    async def _sleep(self, level: SleepLevel) -> SleepLevel:
        async with self._lock:
            shallower = [replica for replica in self._replicas if replica.sleep_level < level]
            if not shallower:
                return self.level
            awake = [replica for replica in shallower if replica.sleep_level is SleepLevel.AWAKE]
            self._is_going = True
            try:
                await asyncio.gather(*(each.loop.quiesce(preempt=self._rule.preempts) for each in awake))
                self._go_on_when_left()
                await self._send_all_to_sleep(shallower, level)
            except BaseException:
                for replica in awake:
                    replica.loop.release()
                raise
            finally:
                self._is_going = False
            _log.info("asleep", level=level.name)
            return self.level

    async def _send_all_to_sleep(self, replicas: Sequence[Replica], level: SleepLevel) -> None:
        """Has the workers of quiet replicas give memory back; where one cannot, those that were awake are so again."""
        awake = [replica for replica in replicas if replica.sleep_level is SleepLevel.AWAKE]
        try:
            await all_of(_send_to_sleep(replica, level) for replica in replicas)
        except BaseException:
            for replica in awake:
                replica.loop.forget_content()
            await asyncio.gather(*(self._wake_replica(replica) for replica in awake), return_exceptions=True)
            for replica in awake:
                # A worker that could not be woken refuses its next step, and its next epoch is awake.
                replica.sleep_level = SleepLevel.AWAKE
            raise

    async def _wake_up(self) -> None:
        async with self._lock:
            self._go_on_when_left()
            asleep = [replica for replica in self._replicas if replica.sleep_level is not SleepLevel.AWAKE]
            await all_of(self._wake_replica(replica) for replica in asleep)
            if asleep:
                _log.info("awake")

    async def _wake_replica(self, replica: Replica) -> None:
        group = _group_of(replica)
        await all_of(port.wake_up(group.epoch) for port in group.ports)
        if replica.sleep_level is SleepLevel.DROP_WEIGHTS:
            await self._restore(group.ports, group.epoch)
        replica.sleep_level = SleepLevel.AWAKE
        replica.loop.release()

    def _go_on_when_left(self) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._interruptible.discard(task)


async def _send_to_sleep(replica: Replica, level: SleepLevel) -> None:
    """Has the workers of a quiet replica give memory back."""
    group = _group_of(replica)
    await all_of(port.sleep(group.epoch, level) for port in group.ports)
    replica.loop.forget_content()
    replica.sleep_level = level


def _group_of(replica: Replica) -> WorkerGroup:
    if replica.group is None:
        text = "the workers are being replaced; try again"
        raise StepwireError("MODEL_NOT_READY", text, retry_after_s=1.0)
    return replica.group
