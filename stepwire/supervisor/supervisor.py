"""Runs scheduler and workers as one: starts them together, keeps them going, ends them in order, leaves none behind."""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from stepwire.supervisor.child import ChildSpec
from stepwire.supervisor.keeper import Keeper
from stepwire.supervisor.line import Record

# What ends one child mostly ends others too; the first cause is best told from all of them.
_COLLECT_S = 0.5
_WORKER_EXIT_S = 10.0
# Statuses with which a scheduler says that another one would fare no better: it could not start, it has lost its
# workers for good, or another scheduler has them.
_FINAL_STATUSES = frozenset({1, 3, 4})


class Supervisor:
    """Parent of one scheduler and its workers.

    `report` takes lines for the operator. `drain_s` is how long the scheduler may take to end after
    the first signal; a second signal ends everything at once. `on_record` takes what a scheduler says that is not for
    the supervisor itself, and None when a scheduler has ended and another one takes its place.
    """

    def __init__(
        self,
        scheduler: ChildSpec,
        workers: Sequence[ChildSpec],
        *,
        drain_s: float,
        report: Callable[[str], None],
        on_record: Callable[[Record | None], None] = lambda _record: None,
    ) -> None:
        self._hand_on = on_record
        self._drain_s = drain_s
        self._report = report
        self._scheduler = Keeper(scheduler, self._on_record)
        self._workers = [Keeper(worker, self._on_record) for worker in workers]
        self._leaving: set[Keeper] = set()
        self._tasks: dict[Keeper, asyncio.Task[None]] = {}
        self._signals: list[signal.Signals] = []
        self._stop = asyncio.Event()
        self._kill = asyncio.Event()
        self._is_ready = False
        self._is_cut_off = False
        self._over: asyncio.Event = asyncio.Event()

    async def run(self, until_ready: Callable[[], Awaitable[None]]) -> int:
        """Starts everything and returns the exit status when everything has ended.

        `until_ready` runs beside the children; until it has returned, or the scheduler says that it serves, the end of
        one is the end of all. Afterwards a child that ends is replaced.
        0: ended by a signal, and cleanly. 1: a child ended and was not to be replaced, or could not be ended cleanly;
        or `stop` was called.
        3, 4: the scheduler's own status, see there. 128 + n: a second signal n.
        """
        with self._signal_handlers():
            try:
                return await self._run(until_ready)
            finally:
                await self._kill_all(self._keepers)

    # What changes while they run.

    async def add_workers(self, specs: Sequence[ChildSpec]) -> None:
        """Starts more workers and keeps them going. Raises OSError, LogError, with none of them left running."""
        keepers = [Keeper(spec, self._on_record) for spec in specs]
        self._workers += keepers
        started = await asyncio.gather(*(keeper.start() for keeper in keepers), return_exceptions=True)
        for keeper in keepers:
            if keeper in self._leaving or keeper not in self._workers:
                # It was ended while it started.
                continue
            self._tasks[keeper] = asyncio.create_task(self._keep(keeper), name=f"keeper of {keeper.spec.name}")
            keeper.keep_standby()
        for failure in started:
            if isinstance(failure, BaseException):
                await self.end_workers([spec.address for spec in specs])
                raise failure
        self._tell_places(keepers)

    async def end_workers(self, addresses: Collection[str]) -> None:
        """Ends workers, and keeps them going no more. Unknown ones are none of its own."""
        keepers = [keeper for keeper in self._workers if keeper.spec.address in addresses]
        self._leaving.update(keepers)
        await self._settle(keepers)
        running = [keeper for keeper in keepers if keeper.child is not None and keeper.child.status is None]
        await self._end(running, _WORKER_EXIT_S)
        await self._kill_all(keepers)
        await asyncio.gather(*(self._give_back(keeper.spec) for keeper in keepers))
        self._workers = [keeper for keeper in self._workers if keeper not in keepers]
        self._leaving.difference_update(keepers)
        for keeper in keepers:
            self._tasks.pop(keeper, None)

    async def _give_back(self, spec: ChildSpec) -> None:
        if spec.launcher is not None:
            try:
                await spec.launcher.give_back()
            except OSError as error:
                # Whoever keeps it knows when this process ends, at the latest.
                self._report(f"the place of {spec.name} cannot be given back: {error.strerror or error}")

    def change_scheduler(self, spec: ChildSpec) -> None:
        """Starts such a scheduler in place of the one that runs, once that ends."""
        self._scheduler.change(spec)

    def tell_scheduler(self, record: Record) -> None:
        """Says something to the scheduler that runs."""
        if self._scheduler.child is not None:
            self._scheduler.child.say(record)

    def stop(self, reason: str, within_s: float) -> None:
        """Ends everything in order, as a first signal does, and at once after so many seconds. `run` answers 1 then."""
        for keeper in self._workers:
            if keeper.child is None or keeper.child.status is not None:
                # What waits for it need not wait for the last moment, and is told why.
                self.tell_scheduler({"gone": keeper.spec.address, "text": reason})
        self._report(f"{reason}: ending after the requests that run, within {within_s:.0f} s")
        self._is_cut_off = True
        self._stop.set()
        asyncio.get_running_loop().call_later(within_s, self._kill.set)

    @property
    def _keepers(self) -> Sequence[Keeper]:
        return (*self._workers, self._scheduler)

    async def _run(self, until_ready: Callable[[], Awaitable[None]]) -> int:
        started = await asyncio.gather(*(keeper.start() for keeper in self._keepers), return_exceptions=True)
        for failure in started:
            if isinstance(failure, BaseException):
                raise failure
        beside = asyncio.ensure_future(self._become_ready(until_ready))
        self._tasks = {k: asyncio.create_task(self._keep(k), name=f"keeper of {k.spec.name}") for k in self._keepers}
        try:
            await _first_of(self._stop.wait(), self._over.wait())
        finally:
            beside.cancel()
            await asyncio.gather(beside, return_exceptions=True)
        if not self._stop.is_set():
            return await self._report_end()
        return await self._drain() or int(self._is_cut_off)

    async def _become_ready(self, until_ready: Callable[[], Awaitable[None]]) -> None:
        await until_ready()
        self._is_ready = True
        for keeper in self._keepers:
            keeper.keep_standby()

    # Keeping children going.

    async def _keep(self, keeper: Keeper) -> None:
        """Replaces the child each time that it ends; ends all when it is not to be replaced."""
        while (child := keeper.child) is not None:
            status = await child.wait()
            is_final = keeper is self._scheduler and status in _FINAL_STATUSES
            may_go_on = self._is_ready and not is_final and keeper.may_go_on
            if not may_go_on and self._is_ready and self._is_of_one_group(keeper):
                why = "it ends again and again"
                self._report(f"{child.describe_end()}; it is not started again, since {why}")
                self.tell_scheduler({"gone": keeper.spec.address, "text": why})
                return
            if not may_go_on:
                self._over.set()
                return
            text = child.describe_end()
            self._report(f"{text}; it is started again")
            if keeper is self._scheduler:
                self._hand_on(None)
            else:
                self.tell_scheduler(
                    {"ended": child.spec.address, "process_id": child.process_id, "status": status, "text": text}
                )
            try:
                await keeper.replace()
            except Exception as error:
                # Whatever it was: a place that nobody keeps must not look like one that is kept.
                self._report(f"{keeper.spec.name} cannot be started again: {error}")
                self._over.set()
                return
            self._tell_places(self._workers if keeper is self._scheduler else (keeper,))

    def _tell_places(self, workers: Sequence[Keeper]) -> None:
        """Tells the scheduler where workers are that may be elsewhere than it was told when it was started."""
        scheduler = self._scheduler.child
        for worker in workers:
            if scheduler is not None and worker.child is not None and worker.spec.launcher is not None:
                scheduler.say({"worker": worker.spec.address, "is_at": worker.child.spec.address})

    def _is_of_one_group(self, keeper: Keeper) -> bool:
        """Whether this is a worker, and others are there for something else."""
        return keeper in self._workers and any(other.spec.group != keeper.spec.group for other in self._workers)

    def _on_record(self, record: Record) -> None:
        """A scheduler serves, asks for another worker in place of one that does not answer, or for something else."""
        if "serving" in record:
            # Whoever asks over the network knows later than clients, whose requests must not be lost with a worker.
            self._is_ready = True
        elif "replace" not in record:
            self._hand_on(record)
        for keeper in self._workers:
            child = keeper.child
            if child is None or record.get("replace") != child.spec.address:
                continue
            if record.get("process_id") == child.process_id and child.status is None:
                child.give_up()

    # The end.

    async def _report_end(self) -> int:
        """Says why a child ended by itself; a worker's end is the cause of a scheduler's."""
        children = [keeper.child for keeper in self._keepers if keeper.child is not None]
        await self._settle(self._keepers)
        ends = [asyncio.create_task(child.wait()) for child in children]
        await asyncio.wait(ends, timeout=_COLLECT_S)
        for end in ends:
            end.cancel()
        for child in children:
            if child.status is not None:
                self._report(child.describe_end())
        scheduler = self._scheduler.child
        status = None if scheduler is None else scheduler.status
        return status if self._is_ready and status in _FINAL_STATUSES else 1

    async def _drain(self) -> int:
        """The scheduler ends first, since requests that run need their workers; these are kept going until then."""
        status = 0
        for keepers, limit_s in (((self._scheduler,), self._drain_s), (self._workers, _WORKER_EXIT_S)):
            await self._settle(keepers)
            status |= await self._end(keepers, limit_s)
            if self._kill.is_set():
                return 128 + self._signals[-1] if self._signals else 1
        return status

    async def _settle(self, keepers: Sequence[Keeper]) -> None:
        """Replaces nobody any more."""
        tasks = [self._tasks[keeper] for keeper in keepers if keeper in self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for keeper in keepers:
            await keeper.settle()

    async def _end(self, keepers: Sequence[Keeper], limit_s: float) -> int:
        children = [child for keeper in keepers for child in keeper.started if child.status is None]
        gone = [k.child for k in keepers if k.child is not None and k.child not in children]
        for child in children:
            child.send(signal.SIGTERM)
        ends = asyncio.gather(*(child.wait() for child in children))
        await _first_of(self._kill.wait(), ends, timeout_s=limit_s)
        await asyncio.gather(ends, return_exceptions=True)
        status = 0
        for child in (*children, *gone):
            if child.status is None and not self._kill.is_set():
                self._report(f"{child.spec.name} did not end within {limit_s:g} s and is killed")
                status = 1
            elif child.status and child.status != -signal.SIGTERM:
                # One that was still being started had no handler yet, and ended as it was told to all the same.
                self._report(child.describe_end())
                status = 1
        return status

    async def _kill_all(self, keepers: Sequence[Keeper]) -> None:
        await self._settle(keepers)
        children = [child for keeper in keepers for child in keeper.started]
        for child in children:
            if child.status is None:
                child.send(signal.SIGKILL)
        await asyncio.gather(*(child.wait() for child in children))
        for child in children:
            child.close()

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


async def _first_of(*works: Awaitable[Any], timeout_s: float | None = None) -> None:
    """Waits until one of them is done, or so long; the others are cancelled."""
    futures = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(futures, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for future in futures:
            future.cancel()
        await asyncio.gather(*futures, return_exceptions=True)  # or asyncio says on stderr that nobody did
