"""`stepwire serve --placement ray`: the workers are on the nodes of a Ray cluster."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from scheduler_service.settings import SchedulerSettings
from stepwire.cli.errors import CommandError, SettingsError
from stepwire.cli.serve_plan import child_spec, log_path, plan, settings_variables, worker_at
from stepwire.cli.settings_options import Settings
from stepwire.placement.head import Head
from stepwire.placement.place import Place
from stepwire.supervisor.child import ChildSpec
from stepwire.supervisor.settings import SupervisorSettings
from worker_service.settings import WorkerSettings


@contextmanager
def workers_on_ray(
    settings: Settings,
    found: Sequence[Mapping[str, object]],
    asked: SchedulerSettings,
    worker: WorkerSettings,
    supervisor: SupervisorSettings,
) -> Iterator[tuple[SchedulerSettings, Sequence[ChildSpec], Head]]:
    """A place for each worker, held until this is left: the scheduler's settings, how to start the workers, and the
    cluster's head.

    `asked`, `worker` and `supervisor` are the settings of the scheduler, of any worker and of the supervisor, before
    there are places.

    Raises CommandError without Ray, SettingsError, PlacementError where the cluster has no room.
    """
    if settings.each_model[0] is not settings:
        raise SettingsError("models are several, and --placement ray places the workers of one: set --placement local")
    try:
        from stepwire.placement.ray import RayLauncher, RayWish, head, placed_on_ray
    except ImportError as error:
        raise CommandError(f"{error}: install Ray with `pip install 'stepwire[ray]'`") from error
    wish = RayWish(
        address=supervisor.ray_address,
        strategy=supervisor.ray_strategy,
        num_groups=asked.replicas,
        group_size=asked.num_ranks,
        resources=resources_of(str(settings.raw("device")), worker.threads),
        timeout_s=asked.worker_timeout,
    )
    with placed_on_ray(wish, evicts=worker.restart_store == "auto") as placed:
        places = [each.place for each in placed]
        scheduler = plan(settings, found, places=places)[0]

        def spec_at(rank: int, place: Place) -> ChildSpec:
            places[rank] = place
            values = worker_at(settings, scheduler, scheduler, rank, places)
            path = log_path(Path(supervisor.log_dir), rank, scheduler)
            spec = child_spec(f"worker {rank}", "worker", values, path)
            return replace(spec, address=place.address, environment=_secrets(spec))

        yield (
            scheduler,
            [
                replace(
                    spec_at(rank, each.place),
                    launcher=RayLauncher(each, partial(spec_at, rank), settings_variables()),
                )
                for rank, each in enumerate(placed)
            ],
            head(),
        )


def resources_of(device: str, threads: int | None) -> dict[str, float]:
    """What a worker takes of its node, by the settings as they were given. Raises SettingsError."""
    if device == "cuda":
        return {"CPU": 1, "GPU": 1}
    if device.startswith("cuda:"):
        raise SettingsError(f"device is {device}, and Ray chooses each worker's GPU: set --device cuda")
    return {"CPU": threads or 1}


def _secrets(spec: ChildSpec) -> dict[str, str]:
    """What a worker's environment has of settings; the rest of it is its node's own."""
    return {name: value for name, value in spec.environment.items() if name in settings_variables()}
