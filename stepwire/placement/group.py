"""What is placed on a Ray cluster for one group of ranks: a placement group with an actor a rank."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util import remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from stepwire.placement.place import Place
from stepwire.placement.rank_actor import RankActor

_MOST_CALLS = 16


@dataclass(frozen=True, slots=True)
class RayWish:
    """What is to be placed for one model: groups of ranks, each rank with `resources` of its node, such as one GPU."""

    num_groups: int
    group_size: int
    resources: Mapping[str, float]
    timeout_s: float


class PlacedGroup:
    """A placement group of Ray's, and the actors in it. Calls block on the cluster, and may come from any thread.

    `on_given_back` is called once, when it is held no more.
    """

    def __init__(self, group: Any, on_given_back: Callable[["PlacedGroup"], None] = lambda _group: None) -> None:
        self.group = group
        self.actors: list[Any] = []
        self._on_given_back = on_given_back
        self._lock = threading.Lock()

    def fill(self, wish: RayWish) -> None:
        """Starts an actor a rank in it. Raises RayError."""
        for index in range(wish.group_size):
            self.actors.append(_actor(wish, self.group, index))

    def end(self, actor: Any) -> None:
        """Ends an actor for good; with the last one the group is given back."""
        ray.kill(actor, no_restart=True)
        with self._lock:
            self.actors.remove(actor)
            is_last = not self.actors
        if is_last:
            self._remove()

    def give_back(self) -> None:
        """Ends its actors for good; what was kept for them is free for others."""
        with self._lock:
            actors, self.actors = self.actors, []
        for actor in actors:
            ray.kill(actor, no_restart=True)
        self._remove()

    def _remove(self) -> None:
        remove_placement_group(self.group)
        self._on_given_back(self)


@dataclass(frozen=True, slots=True)
class PlacedActor:
    """An actor, its group, and where it is. Its calls are Ray's, and untyped."""

    actor: Any
    group: PlacedGroup
    incarnation: str
    place: Place


def no_actor(error: RayError) -> str:
    """Why an actor could not be started, and what to do."""
    if isinstance(error, GetTimeoutError):
        return "Ray did not start an actor for each worker in time (worker_timeout); see the logs of its raylets"
    why = first_line(error.cause if isinstance(error, RayTaskError) else error)
    if "No module named" in str(error):
        why = "a node cannot import stepwire"
    return f"Ray cannot start a worker's actor ({why}); install the same stepwire[ray] on every node"


def first_line(error: BaseException) -> str:
    """What an error of Ray's says first; the rest is for whoever debugs Ray."""
    return str(error).strip().partition("\n")[0][:300]


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
