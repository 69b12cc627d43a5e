"""Runs scheduler and workers as one: starts them together, ends them in order, leaves none behind."""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager

from stepwire.supervisor.child import Child, ChildSpec

# What ends one child mostly ends others too; the first cause is best told from all of them.
_COLLECT_S = 0.5
_WORKER_EXIT_S = 10.0


class Supervisor:
    """Parent of one scheduler and its workers.

    `report` takes lines for the operator. `drain_s` is how long the scheduler may take to end after
    the first signal; a second signal ends everything at once.
    """

    def __init__(
        self, scheduler: ChildSpec, workers: Sequence[ChildSpec], *, drain_s: float, report: Callable[[str], None]
    ) -> None:
        self._specs = (*workers, scheduler)
        self._drain_s = drain_s
        self._report = report
        self._children: list[Child] = []
        self._signals: list[signal.Signals] = []
        self._stop = asyncio.Event()
        self._kill = asyncio.Event()

    async def run(self, while_running: Callable[[], Awaitable[None]]) -> int:
        """Starts everything and returns the exit status when everything has ended.

        `while_running` runs beside the children and is cancelled when they are to end.
        0: ended by a signal, and cleanly. 1: a child ended by itself or could not be ended cleanly.
        128 + n: a second signal n.
        """
        with self._signal_handlers():
            try:
                return await self._run(while_running)
            finally:
                await self._kill_all()

    async def _run(self, while_running: Callable[[], Awaitable[None]]) -> int:
        started = await asyncio.gather(*map(Child.start, self._specs), return_exceptions=True)
        self._children.extend(child for child in started if isinstance(child, Child))
        for failure in started:
            if isinstance(failure, BaseException):
                raise failure
        beside = asyncio.ensure_future(while_running())
        try:
            await self._until_stop_or_end()
        finally:
            beside.cancel()
            await asyncio.gather(beside, return_exceptions=True)
        if not self._stop.is_set():
            return await self._report_end()
        return await self._drain()

    async def _until_stop_or_end(self) -> None:
        waits = [asyncio.create_task(child.wait()) for child in self._children]
        waits.append(asyncio.create_task(self._stop.wait()))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def _report_end(self) -> int:
        """Says why a child ended by itself; a worker's end is the cause of a scheduler's."""
        ends = [asyncio.create_task(child.wait()) for child in self._children]
        await asyncio.wait(ends, timeout=_COLLECT_S)
        for end in ends:
            end.cancel()
        order = {spec.name: index for index, spec in enumerate(self._specs)}
        ended = sorted(
            (child for child in self._children if child.status is not None), key=lambda c: order[c.spec.name]
        )
        for child in ended:
            self._report(child.describe_end())
        return 1

    async def _drain(self) -> int:
        """The scheduler ends first, since requests that run need their workers."""
        *worker_specs, scheduler_spec = self._specs
        status = 0
        for specs, limit_s in (((scheduler_spec,), self._drain_s), (worker_specs, _WORKER_EXIT_S)):
            children = [child for child in self._children if child.spec in specs]
            for child in children:
                child.send(signal.SIGTERM)
            status |= await self._await_ends(children, limit_s)
            if self._kill.is_set():
                return 128 + self._signals[-1]
        return status

    async def _await_ends(self, children: Sequence[Child], limit_s: float) -> int:
        killed = asyncio.create_task(self._kill.wait())
        ends = asyncio.gather(*(child.wait() for child in children))
        try:
            await asyncio.wait((killed, ends), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            killed.cancel()
            ends.cancel()
            await asyncio.gather(killed, ends, return_exceptions=True)  # or asyncio says on stderr that nobody did
        status = 0
        for child in children:
            if child.status is None and not self._kill.is_set():
                self._report(f"{child.spec.name} did not end within {limit_s:g} s and is killed")
                status = 1
            elif child.status and child.status != -signal.SIGTERM:
                # One that was still being started had no handler yet, and ended as it was told to all the same.
                self._report(child.describe_end())
                status = 1
        return status

    async def _kill_all(self) -> None:
        for child in self._children:
            if child.status is None:
                child.send(signal.SIGKILL)
        await asyncio.gather(*(child.wait() for child in self._children))

    @contextmanager
    def _signal_handlers(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        for number in numbers:
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def _on_signal(self, number: signal.Signals) -> None:
        self._signals.append(number)
        if len(self._signals) == 1:
            self._stop.set()
            self._report(f"{number.name}: ending after the requests that run; once more ends at once")
        else:
            self._kill.set()
