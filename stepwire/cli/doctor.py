"""`stepwire doctor`."""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, replace

import click

from scheduler_service.engine.preflight import wish_of
from scheduler_service.engine.shares import Share
from stepwire.cli.checks.checkpoint import check_checkpoint, check_log_dir
from stepwire.cli.checks.devices import check_devices
from stepwire.cli.checks.finding import Finding
from stepwire.cli.checks.memory import check_memory, check_several, read_memory
from stepwire.cli.checks.ports import check_port
from stepwire.cli.checks.software import check_software, probe_torch
from stepwire.cli.errors import EXIT_FAILURE
from stepwire.cli.serve_plan import at_places, imagined_places, scheduler_settings, shares_of, worker_settings
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
    entries = settings.each_model
    places = imagined_places(settings)
    of_models = [
        {**fixed, "model": entry.raw("model") or "-"}
        for entry, fixed in zip(entries, at_places(settings, places), strict=True)
    ]
    scheduler = scheduler_settings(settings, of_models)
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
    shares: list[Share] = []
    for entry, model in zip(entries, scheduler.all_models, strict=True):
        own = places[: len(model.workers)]
        workers = worker_settings(entry, model, scheduler, own, first=0, num_others=len(entries) - 1)
        shares += shares_of(model, workers)
        wish = replace(wish_of(model), kv_cache_bytes=workers[0].kv_cache_bytes)
        path = model.model if entry.raw("model") else None
        yield check_checkpoint(path, memory, wish, on_cpu=workers[0].device == "cpu")
    if len(entries) > 1:
        yield check_several(shares)


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
