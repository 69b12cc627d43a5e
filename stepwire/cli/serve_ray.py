"""`stepwire serve --placement ray`: the workers are on the nodes of a Ray cluster."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from scheduler_service.model_settings import ModelSettings
from scheduler_service.settings import SchedulerSettings
from stepwire.cli.errors import CommandError, SettingsError
from stepwire.cli.serve_plan import LOOPBACK, by_model, child_spec, log_path, plan, settings_variables, worker_at
from stepwire.cli.settings_options import Settings
from stepwire.placement.head import Head
from stepwire.placement.place import Place
from stepwire.supervisor.child import ChildSpec
from stepwire.supervisor.settings import SupervisorSettings
from worker_service.settings import WorkerSettings

if TYPE_CHECKING:
    from stepwire.placement.cluster import Cluster
    from stepwire.placement.group import PlacedActor, RayWish


@dataclass(frozen=True, slots=True)
class _Ranks:
    """The workers of one model: its settings, where they are now, and the number of the first among all workers, of
    which other models have `num_others`."""

    settings: Settings
    model: ModelSettings
    scheduler: SchedulerSettings
    log_dir: Path
    places: list[Place]
    first: int
    num_others: int

    def spec_at(self, rank: int, place: Place) -> ChildSpec:
        """How to start the worker of a rank, which is at this place from now on."""
        self.places[rank] = place
        numbers = {"first": self.first, "num_others": self.num_others}
        values = worker_at(self.settings, self.model, self.scheduler, rank, self.places, **numbers)
        path = log_path(self.log_dir, self.first + rank, self.scheduler)
        spec = child_spec(f"worker {self.first + rank}", "worker", values, path)
        return replace(spec, address=place.address, environment=_secrets(spec), group=self.model.name)


class RayPlacement:
    """How models' workers get places on the cluster that was joined, and are started there."""

    def __init__(self, cluster: "Cluster", log_dir: Path) -> None:
        self._cluster = cluster
        self._log_dir = log_dir

    @property
    def head(self) -> Head:
        """The cluster's head."""
        return self._cluster.head

    @property
    def is_left(self) -> bool:
        """Whether Ray has let go of this process."""
        return self._cluster.is_left

    def place_first(
        self, settings: Settings, found: Sequence[Mapping[str, object]], asked: SchedulerSettings
    ) -> tuple[SchedulerSettings, list[ChildSpec]]:
        """The scheduler's settings, and how to start the workers of the models that there are at first, model by
        model; `asked` are the settings before there are places. Blocks.

        Raises SettingsError, PlacementError where the cluster has no room.
        """
        wishes = [_wish(entry, model) for entry, model in zip(settings.each_model, asked.all_models, strict=True)]
        placed = self._cluster.place_all(wishes)
        scheduler = plan(settings, found, places=[each.place for each in placed])[0]
        specs: list[ChildSpec] = []
        for entry, (model, own) in zip(settings.each_model, by_model(scheduler.all_models, placed), strict=True):
            specs += self._specs(entry, model, scheduler, own, first=len(specs), num_others=len(placed) - len(own))
        return scheduler, specs

    async def place(
        self, settings: Settings, model: ModelSettings, scheduler: SchedulerSettings, *, first: int, num_others: int
    ) -> list[ChildSpec]:
        """How to start the workers of one model more; whoever does not start them gives their launchers back.

        Raises SettingsError; PlacementError where the cluster has no room within the model's `worker_timeout`.
        """
        placed = await self._cluster.place(_wish(settings, model))
        try:
            return self._specs(settings, model, scheduler, placed, first=first, num_others=num_others)
        except BaseException:
            await self._cluster.take_back(placed)
            raise

    def _specs(
        self,
        settings: Settings,
        model: ModelSettings,
        scheduler: SchedulerSettings,
        placed: Sequence["PlacedActor"],
        *,
        first: int,
        num_others: int,
    ) -> list[ChildSpec]:
        from stepwire.placement.ray import RayLauncher

        places = [each.place for each in placed]
        ranks = _Ranks(settings, model, scheduler, self._log_dir, places, first, num_others)
        specs: list[ChildSpec] = []
        for rank, each in enumerate(placed):
            launcher = RayLauncher(each, partial(ranks.spec_at, rank), settings_variables())
            specs.append(replace(ranks.spec_at(rank, each.place), launcher=launcher))
        return specs


@contextmanager
def ray_placement(supervisor: SupervisorSettings, workers: Sequence[WorkerSettings]) -> Iterator[RayPlacement]:
    """The cluster, joined until this is left, which gives all of it back. Raises CommandError without Ray,
    PlacementError.

    `workers` are the settings of those that there are at first.
    """
    try:
        from stepwire.placement.cluster import joined
    except ImportError as error:
        raise CommandError(f"{error}: install Ray with `pip install 'stepwire[ray]'`") from error
    evicts = any(worker.restart_store == "auto" for worker in workers)
    with joined(supervisor.ray_address, supervisor.ray_strategy, evicts=evicts) as cluster:
        yield RayPlacement(cluster, Path(supervisor.log_dir))


def _wish(settings: Settings, model: ModelSettings) -> "RayWish":
    """Raises SettingsError."""
    from stepwire.placement.group import RayWish

    return RayWish(model.replicas, model.num_ranks, resources_of(settings), timeout_s=model.worker_timeout)


def resources_of(settings: Settings) -> dict[str, float]:
    """What a worker of a model takes of its node, by the settings as they were given. Raises SettingsError."""
    device = str(settings.raw("device"))
    if device == "cuda":
        return {"CPU": 1, "GPU": 1}
    if device.startswith("cuda:"):
        raise SettingsError(f"device is {device}, and Ray chooses each worker's GPU: set --device cuda")
    return {"CPU": settings.build(WorkerSettings, host=LOOPBACK, port=0).threads or 1}


def _secrets(spec: ChildSpec) -> dict[str, str]:
    """What a worker's environment has of settings; the rest of it is its node's own."""
    return {name: value for name, value in spec.environment.items() if name in settings_variables()}
