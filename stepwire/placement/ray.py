"""Workers as actors of a Ray cluster: placement groups say where, and Ray starts each anew that ends.

What Ray carries between this process and its actors is a worker's command line, and the cluster key: an
argument of a call to an actor, which no dashboard and no log of Ray's shows.
"""

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayError, RayTaskError
from ray.util import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from stepwire.placement.head import Head, ray_limit_s
from stepwire.placement.place import Place, PlacementError
from stepwire.placement.rank_actor import Launch, RankActor
from stepwire.supervisor.child import ChildSpec
from stepwire.supervisor.line import Record
from stepwire.supervisor.process import Process

# To import Ray adds a field of its own to all records that this process logs.
logging.setLogRecordFactory(logging.LogRecord)

_CONNECT_TIMEOUT_S = 5.0
_EVICT_TIMEOUT_S = 5.0
_POLL_S = 0.1
# An actor that was told to end, and answers still, is told again.
_ENDS_WITHIN_S = 5.0
_MOST_CALLS = 16


@dataclass(frozen=True, slots=True)
class RayWish:
    """What is to be placed for one model: groups of ranks, each rank with `resources` of its node, such as one GPU."""

    num_groups: int
    group_size: int
    resources: Mapping[str, float]
    timeout_s: float


class PlacedGroup:
    """A placement group of Ray's with `num_ranks` actors in it. Calls block on the cluster."""

    def __init__(self, group: Any, num_ranks: int) -> None:
        self.group = group
        self._num_left = num_ranks

    def end(self, actor: Any) -> None:
        """Ends an actor for good; with the last one the group is given back."""
        ray.kill(actor, no_restart=True)
        self._num_left -= 1
        if self._num_left == 0:
            self.give_back()

    def give_back(self) -> None:
        """What was kept for its actors is free for others. Harmless when it was given back."""
        remove_placement_group(self.group)


@dataclass(frozen=True, slots=True)
class PlacedActor:
    """An actor, its group, and where it is. Its calls are Ray's, and untyped."""

    actor: Any
    group: PlacedGroup
    incarnation: str
    place: Place


@contextmanager
def placed_on_ray(
    address: str, strategy: str, wishes: Sequence[RayWish], *, evicts: bool
) -> Iterator[Sequence[PlacedActor]]:
    """One actor a rank, model by model and group by group, in the cluster whose head is at `address`; leaving ends
    them, and gives the placement groups back.

    With `evicts` the weights that killed workers left on their nodes are dropped then. Raises PlacementError.
    """
    _connect(address)
    try:
        groups = [
            (
                wish,
                PlacedGroup(
                    placement_group([dict(wish.resources)] * wish.group_size, strategy=strategy), wish.group_size
                ),
            )
            for wish in wishes
            for _ in range(wish.num_groups)
        ]
        began = time.monotonic()
        for wish, group in groups:
            if not group.group.wait(max(0.0, began + wish.timeout_s - time.monotonic())):
                raise PlacementError(_no_room(wish, strategy))
        actors = [(group, _actor(wish, group.group, i)) for wish, group in groups for i in range(wish.group_size)]
        try:
            placed = ray.get([actor.place.remote(0) for _, actor in actors], timeout=max(w.timeout_s for w in wishes))
        except RayError as error:
            raise PlacementError(_no_actor(error)) from error
        yield [
            PlacedActor(actor, group, incarnation, Place(host, port, node))
            for (group, actor), (incarnation, node, host, port) in zip(actors, placed, strict=True)
        ]
        if evicts:
            # Of those that were ended there is nothing to hear.
            evictions = [actor.evict.remote() for _, actor in actors]
            ray.wait(evictions, num_returns=len(evictions), timeout=_EVICT_TIMEOUT_S)
        for _, group in groups:
            group.give_back()
    finally:
        ray.shutdown()


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
        await asyncio.to_thread(self._placed.group.end, self._placed.actor)

    async def _start(self, spec: ChildSpec, *, is_first: bool) -> "RayProcess":
        while True:
            if not is_first:
                self._placed = await self._next_incarnation()
                spec = self._spec_at(self._placed.place)
            arguments = spec.command[1:]
            launch = Launch(spec.name, arguments, spec.environment, self._unset, str(spec.log_path), is_first)
            try:
                process_id = await self._placed.actor.start.remote(launch)
            except ActorUnavailableError:
                is_first = False
                continue
            except RayTaskError as error:
                raise OSError(0, f"on {self._placed.place.host}: {_first_line(error.cause)}") from error
            except RayError as error:
                raise OSError(0, _no_actor(error)) from error
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
                raise OSError(0, _no_actor(error)) from error
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
            self._text = f"{name} was lost with its Ray actor: {_first_line(error)}"
        if self._is_given_up:
            self._text = f"{name} did not answer and was killed"
        self.status = status
        return int(status)


def head() -> Head:
    """The head of the cluster that was joined."""
    host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
    return Head(host.strip("[]"), int(port), ray_limit_s())


def _connect(address: str) -> None:
    """Raises PlacementError."""
    # The cluster's own statistics are its operator's; this process adds nothing to them.
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    if address != "auto":
        _check_reachable(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError) as error:
        text = (
            f"no Ray cluster can be joined at {address} ({_first_line(error)}); run this on a node of the cluster, "
            "started with `ray start`, and name its head with --ray-address"
        )
        raise PlacementError(text) from error


def _check_reachable(address: str) -> None:
    """Ray itself would try for minutes. Raises PlacementError."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_TIMEOUT_S).close()
    except (OSError, ValueError) as error:
        text = (
            f"no Ray cluster answers at {address} ({error}); start one with `ray start --head`, or name the host:port "
            "of another head with --ray-address"
        )
        raise PlacementError(text) from error


def _actor(wish: RayWish, group: Any, index: int) -> Any:
    resources = dict(wish.resources)
    return (
        ray.remote(RankActor)
        .options(
            num_cpus=resources.pop("CPU", 0),
            num_gpus=resources.pop("GPU", 0),
            resources=resources,
            max_restarts=-1,
            max_concurrency=_MOST_CALLS,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
        )
        .remote()
    )


def _no_room(wish: RayWish, strategy: str) -> str:
    free = {name: amount for name, amount in ray.available_resources().items() if name in wish.resources}
    groups = f"{wish.num_groups} groups of {wish.group_size}" if wish.num_groups > 1 else f"{wish.group_size}"
    return (
        f"the Ray cluster has no room for {groups} workers with {dict(wish.resources)} each, placed by "
        f"{strategy}, within {wish.timeout_s:g} s (worker_timeout); free on {len(ray.nodes())} nodes together: "
        f"{free}; add nodes, ask for less, or choose another --ray-strategy"
    )


def _no_actor(error: RayError) -> str:
    if isinstance(error, GetTimeoutError):
        return "Ray did not start an actor for each worker in time (worker_timeout); see the logs of its raylets"
    why = _first_line(error.cause if isinstance(error, RayTaskError) else error)
    if "No module named" in str(error):
        why = "a node cannot import stepwire"
    return f"Ray cannot start a worker's actor ({why}); install the same stepwire[ray] on every node"


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:300]
