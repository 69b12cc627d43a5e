"""`stepwire doctor`."""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, replace

import click

from scheduler_service.engine.preflight import wish_of
from scheduler_service.settings import SchedulerSettings
from stepwire.cli.checks.checkpoint import check_checkpoint, check_log_dir
from stepwire.cli.checks.devices import check_devices
from stepwire.cli.checks.finding import Finding
from stepwire.cli.checks.memory import check_memory, read_memory
from stepwire.cli.checks.ports import check_port
from stepwire.cli.checks.software import check_software, probe_torch
from stepwire.cli.errors import EXIT_FAILURE
from stepwire.cli.settings_groups import SERVE
from stepwire.cli.settings_options import Settings, settings_options, stray_variables
from stepwire.supervisor.settings import SupervisorSettings
from worker_service.settings import WorkerSettings

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="As JSON, one object a line.")
@settings_options(SERVE, needs_all=False)
def doctor(settings: Settings, *, as_json: bool) -> int:
    """Check this machine for `stepwire serve`, in the order people debug one.

    Takes the same settings as `stepwire serve`; starts nothing. Each line is ok, warn or fail, the
    last two with a remedy. Exits with 1 when a line fails.
    """
    failed = False
    for finding in findings(settings):
        failed |= finding.status == "fail"
        _show(finding, as_json=as_json)
    return EXIT_FAILURE if failed else 0


def findings(settings: Settings) -> Iterator[Finding]:
    """All checks, in order. Raises SettingsError for settings that `serve` would refuse."""
    model = settings.raw("model")
    scheduler = settings.build(SchedulerSettings, model=model or "-")
    worker = settings.build(WorkerSettings, host="127.0.0.1", port=0)
    supervisor = settings.build(SupervisorSettings)
    torch = probe_torch()
    memory = read_memory()
    yield from check_software(torch)
    yield from _check_variables()
    yield from check_devices(torch, worker.device, worker.threads)
    yield from check_memory(memory)
    yield check_port(scheduler.host, scheduler.port)
    yield check_log_dir(supervisor.log_dir)
    wish = replace(wish_of(scheduler), kv_cache_bytes=worker.kv_cache_bytes)
    yield check_checkpoint(scheduler.model if model else None, memory, wish, on_cpu=worker.device == "cpu")


def _check_variables() -> Iterator[Finding]:
    for name, near in stray_variables(os.environ).items():
        remedy = f"did you mean {near}?" if near else "`stepwire config serve` shows what is read"
        yield Finding("warn", "environment", f"nothing reads the variable {name}", remedy)


def _show(finding: Finding, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(asdict(finding)))
        return
    click.echo(
        f"{click.style(f'{finding.status:4}', fg=_COLOURS[finding.status])}  {finding.subject:13}  {finding.text}"
    )
    if finding.remedy:
        click.echo(f"      {'':13}  -> {finding.remedy}")
