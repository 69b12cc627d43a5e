"""`stepwire serve --placement ray`: the workers are on the nodes of a Ray cluster."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

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


@contextmanager
def workers_on_ray(
    settings: Settings,
    found: Sequence[Mapping[str, object]],
    asked: SchedulerSettings,
    workers: Sequence[WorkerSettings],
    supervisor: SupervisorSettings,
) -> Iterator[tuple[SchedulerSettings, Sequence[ChildSpec], Head]]:
    """A place for each worker, held until this is left: the scheduler's settings, how to start the workers, model by
    model, and the cluster's head.

    `asked`, `workers` and `supervisor` are the settings of each process before there are places.

    Raises CommandError without Ray, SettingsError, PlacementError where the cluster has no room.
    """
    try:
        from stepwire.placement.ray import RayLauncher, RayWish, head, placed_on_ray
    except ImportError as error:
        raise CommandError(f"{error}: install Ray with `pip install 'stepwire[ray]'`") from error
    wishes = [
        RayWish(model.replicas, model.num_ranks, resources_of(entry), timeout_s=model.worker_timeout)
        for entry, model in zip(settings.each_model, asked.all_models, strict=True)
    ]
    evicts = any(worker.restart_store == "auto" for worker in workers)
    with placed_on_ray(supervisor.ray_address, supervisor.ray_strategy, wishes, evicts=evicts) as placed:
        scheduler = plan(settings, found, places=[each.place for each in placed])[0]
        specs: list[ChildSpec] = []
        for entry, (model, own) in zip(settings.each_model, by_model(scheduler.all_models, placed), strict=True):
            places, num_others = [each.place for each in own], len(placed) - len(own)
            ranks = _Ranks(entry, model, scheduler, Path(supervisor.log_dir), places, len(specs), num_others)
            for rank, each in enumerate(own):
                launcher = RayLauncher(each, partial(ranks.spec_at, rank), settings_variables())
                specs.append(replace(ranks.spec_at(rank, each.place), launcher=launcher))
        yield scheduler, specs, head()


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
