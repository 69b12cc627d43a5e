"""One place of the supervisor: the process that stands there, the next one in its place, and the one that stands by."""

import asyncio
import signal
import time
from collections.abc import Callable

from stepwire.supervisor.child import Child, ChildSpec
from stepwire.supervisor.line import Record
from stepwire.supervisor.process import Process

# A stand-by is made when the processor has nothing better to do, as far as one can tell.
STANDBY_AFTER_S = 3.0
# One that ends by itself so soon has not got going; so many in a row will not either.
_QUICK_S = 5.0
_MOST_QUICK_ENDS = 5
_BY_OTHERS = frozenset({-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT})
_LEAST_PAUSE_S, _MOST_PAUSE_S = 0.1, 2.0


class Keeper:
    """Keeps one child of a supervisor going.

    `child` is the one that stands there now. `started` are all that were, and may still run.
    """

    def __init__(self, spec: ChildSpec, on_record: Callable[[Record], None]) -> None:
        self.spec = spec
        self.child: Process | None = None
        self.started: list[Process] = []
        self._on_record = on_record
        self._standby: Process | None = None
        self._starts: set[asyncio.Task[Process]] = set()
        self._standby_task: asyncio.Task[None] | None = None
        self._num_quick_ends = 0
        self._began = 0.0

    async def start(self) -> None:
        """Starts the first one. Raises OSError, LogError."""
        self.child = await self._start(is_first=True)
        self._began = time.monotonic()

    async def replace(self) -> None:
        """Starts the next one in place of the child that has ended; one that stands by goes first."""
        await asyncio.sleep(self._pause_s())
        standby, self._standby = self._standby, None
        if standby is not None and standby.status is None:
            standby.say({"go": True})
            self.child = standby
        else:
            self.child = await self._start()
        self._began = time.monotonic()
        self.keep_standby()

    def change(self, spec: ChildSpec) -> None:
        """Starts such ones from now on; one that stands by gives way to another."""
        self.spec = spec
        standby, self._standby = self._standby, None
        if standby is not None:
            standby.send(signal.SIGKILL)
            self.keep_standby()

    def keep_standby(self) -> None:
        """Sees to it that a process will stand by, if the place is to have one."""
        if self.spec.has_standby and (self._standby_task is None or self._standby_task.done()):
            self._standby_task = asyncio.create_task(self._make_standby(), name=f"stand-by of {self.spec.name}")

    @property
    def may_go_on(self) -> bool:
        """Whether another one may be started, now that the child has ended."""
        return self._count_end() <= _MOST_QUICK_ENDS

    async def settle(self) -> None:
        """Begins nothing more. What has been started by then is in `started`."""
        if self._standby_task is not None:
            self._standby_task.cancel()
            await asyncio.gather(self._standby_task, return_exceptions=True)
        if self.spec.launcher is not None:
            self.spec.launcher.settle()
        await asyncio.gather(*self._starts, return_exceptions=True)

    def _count_end(self) -> int:
        child = self.child
        by_itself = child is not None and not child.was_told and child.status not in _BY_OTHERS
        is_quick = by_itself and time.monotonic() - self._began < _QUICK_S
        self._num_quick_ends = self._num_quick_ends + 1 if is_quick else 0
        return self._num_quick_ends

    def _pause_s(self) -> float:
        num = self._num_quick_ends
        return min(_MOST_PAUSE_S, _LEAST_PAUSE_S * 2 ** (num - 1)) if num else 0.0

    async def _make_standby(self) -> None:
        await asyncio.sleep(STANDBY_AFTER_S)
        while self._standby is None or self._standby.status is not None:
            spec, standby = self.spec, await self._start(is_standby=True)
            if spec is self.spec:
                self._standby = standby
            else:
                standby.send(signal.SIGKILL)

    async def _start(self, *, is_first: bool = False, is_standby: bool = False) -> Process:
        """A child that is in `started` even if whoever waits for it is cancelled."""
        start = asyncio.create_task(self._launch(is_first=is_first, is_standby=is_standby), name=self.spec.name)
        self._starts.add(start)
        start.add_done_callback(self._note_start)
        return await asyncio.shield(start)

    async def _launch(self, *, is_first: bool, is_standby: bool) -> Process:
        if self.spec.launcher is not None:
            return await self.spec.launcher.start(self.spec, is_first=is_first)
        return await Child.start(self.spec, self._on_record, is_first=is_first, is_standby=is_standby)

    def _note_start(self, start: asyncio.Task[Process]) -> None:
        self._starts.discard(start)
        if start.cancelled() or start.exception() is not None:
            return
        for child in self.started:
            if child.status is not None:
                child.close()
        self.started = [child for child in self.started if child.status is None] + [start.result()]
