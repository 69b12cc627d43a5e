"""`stepwire serve`, `scheduler` and `worker`."""

import click

from scheduler_service.settings import SchedulerSettings
from stepwire.cli.settings_groups import SCHEDULER, SERVE, WORKER
from stepwire.cli.settings_options import Settings, settings_options
from stepwire.supervisor.parent import end_with_supervisor, is_standby
from worker_service.settings import WorkerSettings


@click.command()
@settings_options(SERVE)
def serve(settings: Settings) -> int:
    """Serve a model, or several, on this machine.

    Starts a scheduler and workers as processes of its own, and ends them when it ends. The first
    SIGTERM or Ctrl-C lets running requests finish, the second ends at once.
    """
    from stepwire.cli.serve import serve_here

    return serve_here(settings)


@click.command()
@settings_options(SCHEDULER)
def scheduler(settings: Settings) -> int:
    """Run a scheduler.

    It holds the request queue and the KV blocks, and answers clients. It connects to workers that
    run already or come up within --worker-timeout.
    """
    line = end_with_supervisor()
    settings.build(SchedulerSettings)
    from scheduler_service.main import serve as serve_scheduler
    from stepwire.cli.serve_plan import located, scheduler_settings
    from stepwire.cli.supervised import Supervised
    from stepwire.rpc.run import run

    if line is not None and is_standby():
        line.wait_for_go()
    supervision = None if line is None else Supervised(line)
    with located(settings, report=lambda text: click.echo(f"stepwire scheduler: {text}", err=True)) as found:
        return run(serve_scheduler(scheduler_settings(settings, found), supervision))


@click.command()
@settings_options(WORKER)
def worker(settings: Settings) -> int:
    """Run a worker.

    It owns one device, loads what a scheduler tells it to and runs forward passes.
    """
    line = end_with_supervisor()
    values = settings.build(WorkerSettings)
    from stepwire.rpc.run import run
    from worker_service.main import preload
    from worker_service.main import serve as serve_worker

    if line is not None and is_standby():
        preload(values)
        line.wait_for_go()
    return run(serve_worker(values))
