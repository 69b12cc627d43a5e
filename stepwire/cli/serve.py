"""What `stepwire serve` does: checks, plans the child processes, and supervises them."""

import asyncio
import contextlib
import os
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path

import click
from pydantic import BaseModel

from loader.sources.resolve import Resolved, resolve
from loader.store.folder import default_folder, evict_idle
from scheduler_service.engine.preflight import check_before_start, wish_of
from scheduler_service.settings import SchedulerSettings
from stepwire.cli.errors import CommandError
from stepwire.cli.field_specs import field_specs
from stepwire.cli.health_check import wait_until_serving
from stepwire.cli.settings_groups import GROUPS
from stepwire.cli.settings_options import CONFIG_VARIABLE, Settings
from stepwire.placement.place import Place
from stepwire.supervisor.child import ChildSpec
from stepwire.supervisor.ports import check_free, free_port, free_ports
from stepwire.supervisor.settings import SupervisorSettings
from stepwire.supervisor.supervisor import Supervisor
from worker_service.settings import WorkerSettings

_LOOPBACK = "127.0.0.1"
_MAX_RANKS = 1024
# What a scheduler needs beyond its shutdown_timeout to close connections and send its last spans.
_SCHEDULER_EXIT_S = 10.0


def serve_here(settings: Settings) -> int:
    """Serves until a signal comes, or a child ends that is not to be replaced. Returns the exit status.

    Raises CheckpointError for a model that cannot be brought here, AddressInUse, and StepwireError for a checkpoint
    that cannot be served as the settings say, before anything is started; LogError with nothing left running.
    """
    started = time.monotonic()
    with resolve(str(settings.raw("model") or ""), report=_say) as found:
        return _serve_found(settings, found, started)


def _serve_found(settings: Settings, found: Resolved, started: float) -> int:
    scheduler, workers, supervisor = plan(settings, found)
    check_free(scheduler.host, scheduler.port)
    check_before_start(scheduler.model, replace(wish_of(scheduler), kv_cache_bytes=workers[0].kv_cache_bytes))
    if supervisor.placement == "ray":
        from stepwire.cli.serve_ray import workers_on_ray

        with workers_on_ray(settings, found) as (scheduler, specs):
            return _supervise(scheduler, specs, supervisor, started)
    log_dir = _log_dir(supervisor)
    specs = [
        replace(
            child_spec(f"worker {rank}", "worker", worker, log_path(log_dir, rank, scheduler)),
            address=scheduler.workers[rank],
            has_standby=supervisor.standby,
        )
        for rank, worker in enumerate(workers)
    ]
    try:
        return _supervise(scheduler, specs, supervisor, started)
    finally:
        if workers[0].restart_store == "auto":
            # A worker that was killed left its weights for the next, and there is none.
            evict_idle(default_folder())


def _supervise(
    scheduler: SchedulerSettings, workers: Sequence[ChildSpec], supervisor: SupervisorSettings, started: float
) -> int:
    for worker in workers:
        _say(f"{worker.name} at {worker.address} logs to {worker.log_path}")
    supervised = Supervisor(
        replace(child_spec("scheduler", "scheduler", scheduler), has_standby=supervisor.standby),
        workers,
        drain_s=scheduler.shutdown_timeout + _SCHEDULER_EXIT_S,
        report=_say,
    )
    return asyncio.run(supervised.run(lambda: _announce(scheduler, started)))


def plan(
    settings: Settings, found: Resolved | None = None, places: Sequence[Place] | None = None
) -> tuple[SchedulerSettings, list[WorkerSettings], SupervisorSettings]:
    """The settings of each process, of one worker a rank. Free ports are chosen here, so that all can start at once.

    `found` is where the model lies on this machine, if that is not the path which the settings name. Workers are on
    this machine, unless their `places` are given.
    """
    supervisor = settings.build(SupervisorSettings)
    # Only these processes need it, and without one any user of this machine could command the worker.
    key = settings.raw("cluster_key") or secrets.token_urlsafe(32)
    if places is None:
        places = [Place(_LOOPBACK, port) for port in free_ports(num_ranks(settings), _LOOPBACK)]
    asked = settings.build(SchedulerSettings, workers=[place.address for place in places], cluster_key=key)
    chosen = {
        "model": str((Path(asked.model) if found is None else found.path).expanduser().absolute()),
        "port": asked.port or free_port(asked.host),
        "served_model_name": asked.served_model_name or (None if found is None else found.name),
    }
    scheduler = asked.model_copy(update=chosen)
    return scheduler, [worker_at(settings, scheduler, rank, places) for rank in range(len(places))], supervisor


def num_ranks(settings: Settings) -> int:
    """How many workers are asked for; 1 for numbers that are none, of which the settings' own check will tell."""
    try:
        return max(1, min(_MAX_RANKS, prod(int(str(settings.raw(name))) for name in ("replicas", "tp", "pp"))))
    except ValueError:
        return 1


def worker_at(settings: Settings, scheduler: SchedulerSettings, rank: int, places: Sequence[Place]) -> WorkerSettings:
    """The settings of the worker of a rank at its place of all places."""
    place = places[rank]
    # The workers' metrics are on the ports above the scheduler's.
    metrics_port = scheduler.metrics_port + 1 + rank if scheduler.metrics_port else scheduler.metrics_port
    fixed = {
        "host": place.host,
        "port": place.port,
        "cluster_key": scheduler.cluster_key,
        "metrics_port": metrics_port,
        "local_ranks": sum(other.node == place.node for other in places),
    }
    if place.node:
        fixed["collective_interface"] = place.host
        fixed["model_roots"] = _roots(scheduler)
    elif len(places) > 1 and settings.raw("device") == "cuda":
        fixed["device"] = f"cuda:{rank}"
    if scheduler.adapter and settings.origin("adapter_slots").kind == "default":
        fixed["adapter_slots"] = len(scheduler.adapters)
    return settings.build(WorkerSettings, **fixed)


def _roots(scheduler: SchedulerSettings) -> list[str]:
    """What workers off this machine may load: what the scheduler will name, and the files that its links lead to."""
    named = [scheduler.model, *scheduler.adapters.values()]
    folders = [folder for path in named if (folder := Path(path)).is_dir()]
    linked = [str(file.resolve()) for folder in folders for file in folder.iterdir() if file.is_symlink()]
    return [*named, *linked, *scheduler.adapter_roots]


def log_path(folder: Path, rank: int, scheduler: SchedulerSettings) -> Path:
    """The log file of the worker of a rank."""
    return folder / f"worker-{rank}.{scheduler.port}.log"


def child_spec(name: str, command: str, values: BaseModel, log_path: Path | None = None) -> ChildSpec:
    """How to start one service with just these settings, whatever the environment says."""
    arguments: list[str] = []
    environment = without_settings(os.environ)
    for spec in field_specs(type(values)).values():
        value = getattr(values, spec.name)
        if value == spec.default:
            continue
        if spec.secret:
            # A command line can be read by every user of the machine.
            environment[spec.variable] = str(value)
        elif isinstance(value, bool):
            arguments.append(spec.flag if value else f"--no-{spec.flag[2:]}")
        else:
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            arguments.append(f"{spec.flag}={text}")
    return ChildSpec(name, (sys.executable, "-m", "stepwire.cli.main", command, *arguments), environment, log_path)


def without_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment less every variable that is a setting."""
    settings = settings_variables()
    return {name: value for name, value in environ.items() if name not in settings}


def settings_variables() -> set[str]:
    """Every variable that is a setting of a service."""
    return {spec.variable for group in GROUPS.values() for spec in group.specs.values()} | {CONFIG_VARIABLE}


def _log_dir(supervisor: SupervisorSettings) -> Path:
    folder = Path(supervisor.log_dir).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        text = f"logs cannot be written to {folder} ({error.strerror or error}): choose another folder with --log-dir"
        raise CommandError(text) from error
    return folder


async def _announce(scheduler: SchedulerSettings, started: float) -> None:
    host = _LOOPBACK if scheduler.host in ("0.0.0.0", "::") else scheduler.host
    target = f"[{host}]:{scheduler.port}" if ":" in host else f"{host}:{scheduler.port}"
    await wait_until_serving(target)
    _say(f"ready after {time.monotonic() - started:.1f} s on {target}")
    _say(f'try: stepwire generate --target {target} --chat "What is the capital of France?"')


def _say(text: str) -> None:
    # Whoever read what is said may have gone; the children are to be looked after all the same.
    with contextlib.suppress(OSError):
        click.echo(f"stepwire serve: {text}", err=True)
