"""What `stepwire serve` does: checks, plans the child processes, and supervises them."""

import asyncio
import atexit
import contextlib
import os
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

import click

from loader.checkpoint import open_checkpoint
from loader.errors import CheckpointError
from loader.store.folder import default_folder, evict_idle
from loader.text_side import look_at_text_side
from scheduler_service.settings import SchedulerSettings
from stepwire.cli.errors import CommandError
from stepwire.cli.health_check import wait_until_serving
from stepwire.cli.serve_models import Fleet
from stepwire.cli.serve_plan import LOOPBACK, Planned, by_model, check_models, located, plan
from stepwire.cli.serve_ray import ray_placement
from stepwire.cli.settings_options import Settings
from stepwire.placement.head import Head
from stepwire.supervisor.child import ChildSpec
from stepwire.supervisor.ports import check_free
from stepwire.supervisor.settings import SupervisorSettings
from stepwire.supervisor.supervisor import Supervisor

# What a scheduler needs beyond its shutdown_timeout to close connections and send its last spans.
_SCHEDULER_EXIT_S = 10.0


def serve_here(settings: Settings) -> int:
    """Serves until a signal comes, or a child ends that is not to be replaced. Returns the exit status.

    Raises CheckpointError for a model that cannot be brought here, AddressInUse, and StepwireError for a checkpoint
    that cannot be served as the settings say, or models that claim more than a device has, before anything is started;
    LogError with nothing left running.
    """
    started = time.monotonic()
    with located(settings, report=_say) as found:
        return _serve_found(settings, found, started)


def _serve_found(settings: Settings, found: Sequence[Mapping[str, object]], started: float) -> int:
    planned = scheduler, workers, supervisor = plan(settings, found)
    check_free(scheduler.host, scheduler.port)
    check_models(scheduler.all_models, workers, are_here=supervisor.placement == "local")
    if supervisor.placement == "ray":
        return _serve_on_ray(settings, found, planned, started)
    fleet = Fleet(settings, scheduler, supervisor, _log_dir(supervisor), _say)
    here = [spec for each in by_model(scheduler.all_models, workers) for spec in fleet.worker_specs(*each)]
    try:
        return _supervise(fleet, scheduler, here, started)
    finally:
        if any(worker.restart_store == "auto" for worker in workers):
            # A worker that was killed left its weights for the next, and there is none.
            evict_idle(default_folder())


def _serve_on_ray(settings: Settings, found: Sequence[Mapping[str, object]], planned: Planned, started: float) -> int:
    """`planned` are the settings of each process before there are places."""
    asked, workers, supervisor = planned
    status, on_ray = 1, None
    try:
        with ray_placement(supervisor, workers) as on_ray:
            scheduler, specs = on_ray.place_first(settings, found, asked)
            fleet = Fleet(settings, scheduler, supervisor, Path(), _say, on_ray)
            fleet.hold_placed(specs)
            status = _supervise(fleet, scheduler, specs, started, on_ray.head)
        return status
    finally:
        if on_ray is not None and not on_ray.is_left:
            # What Ray does itself at the end of a process waits for its head without limit, or crashes.
            atexit.register(_end_at_once, status)


def _end_at_once(status: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def _supervise(
    fleet: Fleet,
    scheduler: SchedulerSettings,
    workers: Sequence[ChildSpec],
    started: float,
    head: Head | None = None,
) -> int:
    fleet.supervisor = Supervisor(
        fleet.scheduler_spec(),
        workers,
        drain_s=scheduler.shutdown_timeout + _SCHEDULER_EXIT_S,
        report=_say,
        on_record=fleet.take,
    )
    return asyncio.run(_run(fleet.supervisor, lambda: _announce(scheduler, started), head))


async def _run(supervisor: Supervisor, announce: Callable[[], Awaitable[None]], head: Head | None) -> int:
    """Ends in order when the head of the cluster that holds the workers is lost."""
    watch = None if head is None else asyncio.create_task(head.watch(_say, supervisor.stop), name="head")
    try:
        return await supervisor.run(announce)
    finally:
        if watch is not None:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)


def _log_dir(supervisor: SupervisorSettings) -> Path:
    folder = Path(supervisor.log_dir).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        text = f"logs cannot be written to {folder} ({error.strerror or error}): choose another folder with --log-dir"
        raise CommandError(text) from error
    return folder


async def _announce(scheduler: SchedulerSettings, started: float) -> None:
    host = LOOPBACK if scheduler.host in ("0.0.0.0", "::") else scheduler.host
    target = f"[{host}]:{scheduler.port}" if ":" in host else f"{host}:{scheduler.port}"
    await wait_until_serving(target)
    _say(f"ready after {time.monotonic() - started:.1f} s on {target}")
    _say(f"try: {await asyncio.to_thread(suggestion, scheduler.all_models[0].path, target)}")


def suggestion(model: str, target: str) -> str:
    """A command that the model at this path can answer: without a chat template no messages can be sent to it.

    Blocks on files.
    """
    try:
        has_template = look_at_text_side(open_checkpoint(Path(model))).has_chat_template
    except CheckpointError:
        # It is served already, so whatever this is about, a suggestion is not the place to say it.
        has_template = False
    prompt = '--chat --temperature 0 "What is the capital of France?"'
    if not has_template:
        prompt = '--temperature 0 "The capital of France is"'
    return f"stepwire generate --target {target} {prompt}"


def _say(text: str) -> None:
    # Whoever read what is said may have gone; the children are to be looked after all the same.
    with contextlib.suppress(OSError):
        click.echo(f"stepwire serve: {text}", err=True)
