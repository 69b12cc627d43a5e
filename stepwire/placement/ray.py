"""Workers as children of actors of a Ray cluster, which starts each actor anew that ends.

What Ray carries between this process and its actors is a worker's command line, and the cluster key: an
argument of a call to an actor, which no dashboard and no log of Ray's shows.
"""

import asyncio
import signal
import time
from collections.abc import Callable, Collection
from dataclasses import replace

import ray
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError

from stepwire.placement.apart import apart
from stepwire.placement.group import PlacedActor, first_line, no_actor
from stepwire.placement.place import Place
from stepwire.placement.rank_actor import Launch
from stepwire.supervisor.child import ChildSpec
from stepwire.supervisor.line import Record
from stepwire.supervisor.process import Process

_POLL_S = 0.1
# An actor that was told to end, and answers still, is told again.
_ENDS_WITHIN_S = 5.0
# A head that hangs gives nothing back; when it is well again, or this process has ended, Ray does.
_GIVE_BACK_TIMEOUT_S = 10.0


class RayLauncher:
    """Starts the workers of one rank, one after the other, each in an incarnation of its own of the rank's actor.

    Implements stepwire.supervisor.process.Launcher. `spec_at` says what to start at a place, and `unset` which
    variables of the node's environment the worker must not see.
    """

    def __init__(self, placed: PlacedActor, spec_at: Callable[[Place], ChildSpec], unset: Collection[str]) -> None:
        self._placed = placed
        self._spec_at = spec_at
        self._unset = tuple(unset)
        self._settled = asyncio.Event()

    async def start(self, spec: ChildSpec, *, is_first: bool) -> Process:
        """See Launcher."""
        start = asyncio.ensure_future(self._start(spec, is_first=is_first))
        settled = asyncio.ensure_future(self._settled.wait())
        try:
            await asyncio.wait((start, settled), return_when=asyncio.FIRST_COMPLETED)
            if start.done():
                return start.result()
            raise OSError(0, f"{spec.name} is not wanted any more")
        finally:
            for task in (start, settled):
                task.cancel()
            await asyncio.gather(start, settled, return_exceptions=True)

    def settle(self) -> None:
        """See Launcher."""
        self._settled.set()

    async def give_back(self) -> None:
        """See Launcher."""
        ended = apart(self._placed.group.end, self._placed.actor)
        await asyncio.wait([ended], timeout=_GIVE_BACK_TIMEOUT_S)
        if not ended.done():
            raise OSError(0, f"Ray did not take it back within {_GIVE_BACK_TIMEOUT_S:g} s")
        error = ended.exception()
        if error is not None:
            raise OSError(0, first_line(error)) from error

    async def _start(self, spec: ChildSpec, *, is_first: bool) -> "RayProcess":
        while True:
            if not is_first:
                self._placed = await self._next_incarnation()
            # At its own address; `spec` has the one by which the scheduler knows it, which may be another.
            spec = self._spec_at(self._placed.place)
            arguments = spec.command[1:]
            launch = Launch(spec.name, arguments, spec.environment, self._unset, str(spec.log_path), is_first)
            try:
                process_id = await self._placed.actor.start.remote(launch)
            except ActorUnavailableError:
                is_first = False
                continue
            except RayTaskError as error:
                raise OSError(0, f"on {self._placed.place.host}: {first_line(error.cause)}") from error
            except RayError as error:
                raise OSError(0, no_actor(error)) from error
            return RayProcess(spec, self._placed, process_id)

    async def _next_incarnation(self) -> PlacedActor:
        """Ends the actor, if it did not end already, and waits until Ray has started it again. Raises OSError."""
        actor, place, told_at = self._placed.actor, self._placed.place, 0.0
        while True:
            try:
                incarnation, node, host, port = await actor.place.remote(place.port)
            except ActorUnavailableError:
                await asyncio.sleep(_POLL_S)
                continue
            except RayError as error:
                raise OSError(0, no_actor(error)) from error
            if incarnation != self._placed.incarnation:
                return replace(self._placed, incarnation=incarnation, place=Place(host, port, node))
            if time.monotonic() - told_at > _ENDS_WITHIN_S:
                told_at = time.monotonic()
                ray.kill(actor, no_restart=False)
            await asyncio.sleep(_POLL_S)


class RayProcess:
    """A worker that an actor has started. Implements stepwire.supervisor.process.Process."""

    def __init__(self, spec: ChildSpec, placed: PlacedActor, process_id: int) -> None:
        self.spec = spec
        self.was_told = False
        self.process_id = process_id
        self.status: int | None = None
        self._placed = placed
        self._text = ""
        self._is_given_up = False
        self._end = asyncio.create_task(self._watch(), name=f"end of {spec.name}")

    async def wait(self) -> int:
        """See Process."""
        return await asyncio.shield(self._end)

    def say(self, record: Record) -> None:
        """Workers are told nothing."""

    def give_up(self) -> None:
        """See Process: the actor is ended, which its worker does not outlive."""
        self.was_told = self._is_given_up = True
        ray.kill(self._placed.actor, no_restart=False)

    def close(self) -> None:
        """Nothing is held of it here."""

    def send(self, number: signal.Signals) -> None:
        """See Process."""
        self.was_told = True
        self._placed.actor.send.remote(int(number))

    def describe_end(self) -> str:
        """See Process."""
        return f"{self._text} (on {self._placed.place.host})"

    async def _watch(self) -> int:
        name = self.spec.name
        try:
            status, self._text = await self._placed.actor.wait.remote()
        except RayError as error:
            status = -signal.SIGKILL
            self._text = f"{name} was lost with its Ray actor: {first_line(error)}"
        if self._is_given_up:
            self._text = f"{name} did not answer and was killed"
        self.status = status
        return int(status)
