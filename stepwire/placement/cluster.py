"""The Ray cluster that was joined, and what is held of it, as models come and go."""

import asyncio
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import ray
from ray.exceptions import RayError
from ray.util import list_named_actors, placement_group

from stepwire.placement.apart import apart
from stepwire.placement.group import PlacedActor, PlacedGroup, RayWish, first_line, no_actor
from stepwire.placement.head import Head, ray_limit_s
from stepwire.placement.place import Place, PlacementError

# To import Ray adds a field of its own to all records that this process logs.
logging.setLogRecordFactory(logging.LogRecord)

_CONNECT_TIMEOUT_S = 5.0
_EVICT_TIMEOUT_S = 5.0
# A head that hangs would keep this process for minutes, and with the driver goes all that it holds.
_LEAVE_TIMEOUT_S = 10.0
# Whole seconds: Ray drops the rest.
_LOOK_EVERY_S = 1
# What Ray may take over the time that it was given, unless its head hangs.
_OVER_S = 10.0


class Cluster:
    """What is held of the cluster that was joined: the owner of the placement groups."""

    def __init__(self, strategy: str) -> None:
        self._strategy = strategy
        self.is_left = False
        """Whether Ray has let go of this process, which can end as others do."""
        self._groups: set[PlacedGroup] = set()
        self._num_placing = 0
        self._changed = threading.Condition()
        self.head = _head()

    async def place(self, wish: RayWish) -> list[PlacedActor]:
        """One actor a rank, group by group. The caller gives them back, unless this is cancelled.

        Raises PlacementError, with nothing held: where the cluster has no room within the wish's time, and where its
        head does not answer.
        """
        self._check_head(math.inf)
        unwanted = threading.Event()
        work = apart(lambda: self.place_all([wish], lambda: not unwanted.is_set()))
        # Room, then the start of the actors.
        deadline = time.monotonic() + 2 * wish.timeout_s + _OVER_S
        try:
            while not work.done():
                left_s = deadline - time.monotonic()
                self._check_head(left_s)
                await asyncio.wait([work], timeout=min(_LOOK_EVERY_S, left_s))
        except BaseException:
            unwanted.set()
            work.add_done_callback(_give_back_late)
            raise
        return work.result()

    async def take_back(self, placed: Sequence[PlacedActor]) -> None:
        """Ends these, which nobody uses; waits for Ray as long as it is likely to answer."""
        await asyncio.wait(_give_back(placed), timeout=_LEAVE_TIMEOUT_S)

    def place_all(self, wishes: Sequence[RayWish], is_wanted: Callable[[], bool] = lambda: True) -> list[PlacedActor]:
        """As `place`, for several models at once. Blocks, at the longest until this `is_wanted` no more."""
        groups: list[tuple[RayWish, PlacedGroup]] = []
        self._count_placing(1)
        try:
            for wish in wishes:
                for _ in range(wish.num_groups):
                    bundles = [dict(wish.resources)] * wish.group_size
                    group = PlacedGroup(placement_group(bundles, strategy=self._strategy), self._groups.discard)
                    groups.append((wish, group))
                    self._groups.add(group)
            began = time.monotonic()
            for wish, group in groups:
                while not group.group.wait(_LOOK_EVERY_S):
                    _check_wanted(is_wanted)
                    if time.monotonic() - began >= wish.timeout_s:
                        raise PlacementError(self._no_room(wish, holds_others=len(self._groups) > len(groups)))
            for wish, group in groups:
                group.fill(wish)
            return _places([group for _, group in groups], max(wish.timeout_s for wish in wishes), is_wanted)
        except BaseException as error:
            for _, group in groups:
                with suppress(RayError):  # The first error is the one to tell.
                    group.give_back()
            if isinstance(error, RayError):
                raise PlacementError(no_actor(error)) from error
            raise
        finally:
            self._count_placing(-1)

    def wait_placed(self, timeout_s: float) -> None:
        """Waits so long until nothing is being placed, which nobody wants any more."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_placing, timeout_s)

    def evict(self) -> None:
        """Has weights dropped that killed workers left on the nodes. Of actors that were ended there is nothing to
        hear. Blocks."""
        evictions = [actor.evict.remote() for group in tuple(self._groups) for actor in group.actors]
        if evictions:
            ray.wait(evictions, num_returns=len(evictions), timeout=_EVICT_TIMEOUT_S)

    def give_back(self) -> None:
        """Holds nothing any more. Blocks."""
        for group in tuple(self._groups):
            group.give_back()

    def _check_head(self, left_s: float) -> None:
        """Raises PlacementError when it is known not to answer, or has no time left to."""
        if self.head.trouble or left_s <= 0:
            trouble = self.head.trouble or f"{self.head} does not answer"
            raise PlacementError(f"{trouble}: no worker can be placed; try again when it is back")

    def _count_placing(self, change: int) -> None:
        with self._changed:
            self._num_placing += change
            self._changed.notify_all()

    def _no_room(self, wish: RayWish, *, holds_others: bool) -> str:
        available = ray.available_resources()  # What there is none of is not in it.
        free = {name: available.get(name, 0.0) for name in wish.resources}
        groups = f"{wish.num_groups} groups of {wish.group_size}" if wish.num_groups > 1 else f"{wish.group_size}"
        remedy = "add nodes, ask for less, unload a model" if holds_others else "add nodes, ask for less"
        num_nodes = sum(bool(node["Alive"]) for node in ray.nodes())
        return (
            f"the Ray cluster has no room for {groups} workers with {dict(wish.resources)} each, placed by "
            f"{self._strategy}, within {wish.timeout_s:g} s (worker_timeout); free on {num_nodes} nodes together: "
            f"{free}; {remedy}, or choose another --ray-strategy"
        )


@contextmanager
def joined(address: str, strategy: str, *, evicts: bool) -> Iterator[Cluster]:
    """The cluster whose head is at `address`; leaving ends all that is held of it, as does the end of this process.

    With `evicts` the weights that killed workers left on their nodes are dropped then. A head that does not answer
    holds up no end: the cluster `is_left` or not. Raises PlacementError.
    """
    _connect(address)
    cluster = Cluster(strategy)
    try:
        yield cluster
    finally:
        leaving = threading.Thread(target=_leave, args=(cluster,), kwargs={"evicts": evicts}, daemon=True)
        leaving.start()
        leaving.join(_EVICT_TIMEOUT_S + 2 * _LEAVE_TIMEOUT_S)
        cluster.is_left = not (leaving.is_alive() or cluster.head.trouble)


def _leave(cluster: Cluster, *, evicts: bool) -> None:
    # Ray's calls must not find it shut down.
    cluster.wait_placed(_LEAVE_TIMEOUT_S)
    with suppress(RayError):  # Ray frees what it is not told of, when it misses this process.
        if evicts:
            cluster.evict()
        if not cluster.head.trouble:
            cluster.give_back()
    if not cluster.head.trouble:  # It would be waited for without limit.
        ray.shutdown()


def _places(groups: Sequence[PlacedGroup], timeout_s: float, is_wanted: Callable[[], bool]) -> list[PlacedActor]:
    """Raises RayError, PlacementError."""
    actors = [(group, actor) for group in groups for actor in group.actors]
    answers = [actor.place.remote(0) for _, actor in actors]
    deadline = time.monotonic() + timeout_s
    while ray.wait(answers, num_returns=len(answers), timeout=_LOOK_EVERY_S)[1] and time.monotonic() < deadline:
        _check_wanted(is_wanted)
    return [
        PlacedActor(actor, group, incarnation, Place(host, port, node))
        for (group, actor), (incarnation, node, host, port) in zip(actors, ray.get(answers, timeout=0), strict=True)
    ]


def _check_wanted(is_wanted: Callable[[], bool]) -> None:
    if not is_wanted():
        raise PlacementError("the workers are not wanted any more")


def _give_back_late(work: "asyncio.Future[list[PlacedActor]]") -> None:
    """What was placed after all, and nobody took."""
    if not work.cancelled() and work.exception() is None:
        _give_back(work.result())


def _give_back(placed: Sequence[PlacedActor]) -> list["asyncio.Future[None]"]:
    return [apart(group.give_back) for group in {each.group for each in placed}]


def _head() -> Head:
    """The head of the cluster that was joined."""
    host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
    # Actors that have a name, of which we make none: the smallest answer that only the head can give.
    return Head(host.strip("[]"), int(port), ray_limit_s(), list_named_actors)


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
            f"no Ray cluster can be joined at {address} ({first_line(error)}); run this on a node of the cluster, "
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
