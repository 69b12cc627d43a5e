"""`stepwire config`."""

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import click
from pydantic import BaseModel

from scheduler_service.model_settings import OWN_FIELDS
from scheduler_service.settings import SchedulerSettings
from stepwire.cli.errors import SettingsError
from stepwire.cli.serve_plan import at_places, imagined_places, scheduler_settings
from stepwire.cli.settings_groups import GROUPS, SERVE, SettingsGroup
from stepwire.cli.settings_options import Settings, settings_options, shown, stray_variables
from stepwire.supervisor.settings import SupervisorSettings
from worker_service.settings import WorkerSettings

# What each command builds of its settings, and what it sets itself, which is no setting. The last that has a
# field shows it.
_PARTS: Mapping[str, Sequence[tuple[type[BaseModel], Mapping[str, object]]]] = {
    "serve": ((WorkerSettings, {"host": "127.0.0.1", "port": 0}), (SchedulerSettings, {}), (SupervisorSettings, {})),
    "scheduler": ((SchedulerSettings, {}),),
    "worker": ((WorkerSettings, {}),),
}


@click.group()
def config() -> None:
    """Show the settings in force and where each one came from.

    Takes the same options, variables and settings file as the command it is asked about. Exits with
    2 when the command would refuse them.
    """


def effective(settings: Settings) -> dict[str, object]:
    """Every setting as the command would use it; as it was given where the command would refuse it."""
    values = {name: settings.raw(name) for name in settings.group.specs}
    for model, fixed in _PARTS[settings.group.name]:
        try:
            built = _build(settings, model, fixed)
        except SettingsError:
            continue
        # Of several models each has its own.
        left_out = fixed.keys() | (OWN_FIELDS if getattr(built, "models", ()) else ())
        values |= {name: getattr(built, name) for name in values if name in model.model_fields and name not in left_out}
    return {name: shown(settings.group.specs[name], value) for name, value in values.items()}


def _show(settings: Settings, *, as_json: bool) -> None:
    values = effective(settings)
    if as_json:
        click.echo(json.dumps({name: _entry(settings, name, value) for name, value in values.items()}, indent=2))
        return
    width = max(map(len, values))
    texts = {name: _text(value) for name, value in values.items()}
    value_width = min(40, max(map(len, texts.values())))
    for name, text in texts.items():
        click.echo(f"{name:{width}}  {text:{value_width}}  {settings.origin(name).name}")


def _entry(settings: Settings, name: str, value: object) -> dict[str, object]:
    origin = settings.origin(name)
    return {"value": value, "origin": origin.kind, "source": origin.name}


def _text(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "on" if value else "off"
    return ",".join(map(str, value)) or "-" if isinstance(value, list) else str(value)


def _check(settings: Settings) -> None:
    """Raises SettingsError for settings that the command would refuse."""
    for model, fixed in _PARTS[settings.group.name]:
        _build(settings, model, fixed)
        for entry in settings.each_model if model is WorkerSettings else ():
            entry.build(model, **fixed)


def _build(settings: Settings, model: type[BaseModel], fixed: Mapping[str, object]) -> BaseModel:
    if settings.group is SERVE and model is SchedulerSettings:
        # It finds ports for its workers itself.
        return scheduler_settings(settings, at_places(settings, imagined_places(settings)))
    return settings.build(model, **fixed)


def _command(group: SettingsGroup) -> click.Command:
    @click.command(group.name, help=f"Show the settings of `stepwire {group.name}`.")
    @click.option("--json", "as_json", is_flag=True, help="As JSON.")
    @settings_options(group)
    def command(settings: Settings, **options: Any) -> None:
        _show(settings, **options)
        for name, near in stray_variables(os.environ).items():
            hint = f"; did you mean {near}?" if near else ""
            click.echo(f"Warning: nothing reads the variable {name}{hint}", err=True)
        _check(settings)

    return command


for _group in GROUPS.values():
    config.add_command(_command(_group))
