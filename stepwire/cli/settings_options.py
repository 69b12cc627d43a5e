"""Settings from flag, `STEPWIRE_*` variable and file, in this order, and where each one came from."""

import difflib
import functools
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import click
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from scheduler_service.model_settings import OWN_FIELDS, ModelSettings
from stepwire.cli.config_file import read_config_file
from stepwire.cli.errors import SettingsError
from stepwire.cli.field_specs import FieldSpec, parse_bytes
from stepwire.cli.model_entries import Entry, entry_text, parse_entries
from stepwire.cli.settings_groups import GROUPS, SettingsGroup

CONFIG_VARIABLE = "STEPWIRE_CONFIG"
MASK = "********"
# Those that are no settings of a service.
_OTHER_VARIABLES = frozenset(
    {
        CONFIG_VARIABLE,
        *(
            f"STEPWIRE_{name}"
            for name in (
                "CACHE",
                "CACHE_BYTES",
                "KERNELS",
                "MODEL_DIR",
                "PEERS",
                "TARGET",
                "TEST_FULL",
                "WORKER_MEMORY",
            )
        ),
    }
)

# The kinds of settings that have more than one value.
_SEVERAL = ("list", "entries")

Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value came from; `name` is the flag, the variable or the key and its file."""

    kind: Literal["flag", "variable", "file", "default"]
    name: str


@dataclass(frozen=True, slots=True)
class Setting:
    """A value as it was given, not yet checked, and where it came from."""

    value: object
    origin: Origin


class Settings:
    """The settings of one run of a command, or of one of the models that it serves."""

    def __init__(
        self, group: SettingsGroup, given: Mapping[str, Setting], models: "Sequence[Settings]" = (), place: str = ""
    ) -> None:
        self.group = group
        self._given = given
        self._models = models
        self._place = place

    @property
    def each_model(self) -> "Sequence[Settings]":
        """Those of each model that is served: these, unless `models` names several."""
        return self._models or [self]

    def of_model(self, entry: Entry, place: str, source: Origin) -> "Settings":
        """Those of a model: what `entry` says, and else what these say and is no model's own.

        `place` and `source` say where the entry stands. Raises SettingsError.
        """
        own: dict[str, Setting] = {}
        for name, value in entry.items():
            origin = Origin(source.kind, f"{name} of {place} ({source.name})")
            if name not in self.group.of_each_model:
                raise SettingsError(f"{origin.name}: {_no_such(name, self.group.of_each_model)}")
            spec = self.group.specs[name]
            if isinstance(value, list) and spec.kind not in _SEVERAL and source.kind != "file":
                raise SettingsError(f"{origin.name}: given {len(value)} times, and it has one value: give it once")
            own[name] = Setting(_convert(spec, value, origin), origin)
        common = {name: setting for name, setting in self._given.items() if name not in OWN_FIELDS}
        return Settings(self.group, {**common, **own}, place=place)

    def origin(self, name: str) -> Origin:
        """Where a setting came from."""
        given = self._given.get(name)
        return given.origin if given else Origin("default", "default")

    def raw(self, name: str) -> object:
        """A setting as it was given, or its default."""
        given = self._given.get(name)
        return given.value if given else self.group.specs[name].default

    def build(self, model: type[Model], /, **fixed: object) -> Model:
        """The checked settings of one model; `fixed` wins. Raises SettingsError naming each wrong value's source."""
        data = {name: given.value for name, given in self._given.items() if name in model.model_fields}
        if self._models and "models" in model.model_fields and "models" not in fixed:
            data["models"] = [each.build(ModelSettings) for each in self._models]
        try:
            return model(**{**data, **fixed})
        except ValidationError as error:
            lines = [self._problem(details) for details in error.errors(include_url=False, include_context=False)]
            raise SettingsError("\n".join(dict.fromkeys(lines))) from error

    def _problem(self, details: ErrorDetails) -> str:
        name = str(details["loc"][0]) if details["loc"] else ""
        spec = self.group.specs.get(name)
        text = details["msg"].removeprefix("Value error, ")
        if spec is None:
            return f"{name or self._place}: {text}" if name or self._place else text
        if details["type"] == "missing":
            if self._place:
                return f"{name} of {self._place} is not set"
            return f"{name} is not set: give {spec.flag}, {spec.variable} or {name} in the settings file"
        refusal = _refusal(spec, self.origin(name), self.raw(name))
        # What a validator of our own says is more than what can be told from the field's type.
        return f"{refusal}: {text}" if details["type"] == "value_error" else refusal


def settings_options(
    group: SettingsGroup, *, needs_all: bool = True
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Adds the group's options to a command, whose function gets a `Settings` as its first argument.

    Unless the command `needs_all`, its help calls no setting required.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, config: str | None, **options: Any) -> Any:
            flags = {name: options.pop(name) for name in group.specs}
            return function(gather(group, flags, os.environ, config), *args, **options)

        command: Callable[..., Any] = wrapper
        for spec in reversed(group.specs.values()):
            command = _option(spec, needs_all=needs_all)(command)
        help_text = f"TOML file with settings. [{CONFIG_VARIABLE}]"
        return click.option("--config", metavar="FILE", type=click.Path(dir_okay=False), help=help_text)(command)

    return decorate


def gather(
    group: SettingsGroup, flags: Mapping[str, object], environ: Mapping[str, str], config: str | None
) -> Settings:
    """Collects what was given for each setting. Raises SettingsError for a file that cannot be used.

    In `flags`, None and the empty tuple mean that an option was not given.
    """
    path = config or environ.get(CONFIG_VARIABLE)
    known = {name: each.specs for name, each in {**GROUPS, group.name: group}.items()}
    in_file = read_config_file(Path(path), group.name, known) if path else {}
    given: dict[str, Setting] = {}
    for name, spec in group.specs.items():
        flag = flags.get(name)
        if flag is not None and flag != ():
            shown = f"--no-{spec.flag[2:]}" if flag is False else spec.flag
            given[name] = Setting(_convert(spec, flag, Origin("flag", shown)), Origin("flag", shown))
        elif environ.get(spec.variable):
            origin = Origin("variable", spec.variable)
            given[name] = Setting(_convert(spec, environ[spec.variable], origin), origin)
        elif name in in_file:
            origin = Origin("file", in_file[name].where)
            given[name] = Setting(_convert(spec, in_file[name].value, origin), origin)
    return Settings(group, given, _models(Settings(group, given)))


def _models(settings: Settings) -> list[Settings]:
    """The settings of each of several models; none where `models` names none. Raises SettingsError."""
    if "models" not in settings.group.specs:
        return []
    entries, source = settings.raw("models"), settings.origin("models")
    if not isinstance(entries, list) or not entries:
        return []
    for name in sorted(OWN_FIELDS & settings.group.of_each_model):
        if settings.origin(name).kind != "default":
            raise SettingsError(f"{settings.origin(name).name}: with models, give each of them a {name} in its entry")
    return [settings.of_model(entry, f"models[{number}]", source) for number, entry in enumerate(entries)]


def stray_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """`STEPWIRE_*` variables that nothing reads, with the nearest one that something does, or ""."""
    known = {spec.variable for group in GROUPS.values() for spec in group.specs.values()} | _OTHER_VARIABLES
    stray = sorted(name for name in environ if name.startswith("STEPWIRE_") and name not in known)
    return {name: next(iter(difflib.get_close_matches(name, known, n=1)), "") for name in stray}


def shown(spec: FieldSpec, value: object) -> object:
    """A value as it may be shown: secrets masked, an entry as a line."""
    if isinstance(value, list) and spec.kind == "entries":
        return [
            entry_text(each.model_dump(exclude_unset=True) if isinstance(each, BaseModel) else each) for each in value
        ]
    return MASK if spec.secret and value is not None else value


def _convert(spec: FieldSpec, value: object, origin: Origin) -> object:
    if spec.kind == "list" and isinstance(value, str | tuple):
        parts = [value] if isinstance(value, str) else value
        return [item.strip() for part in parts for item in str(part).split(",") if item.strip()]
    if spec.kind == "entries":
        return _entries(spec, value, origin)
    if spec.kind == "list" and isinstance(value, list):
        return value
    if isinstance(value, list | dict) or (isinstance(value, bool) and spec.kind != "switch"):
        raise SettingsError(_refusal(spec, origin, value))
    if spec.kind == "bytes" and isinstance(value, str):
        try:
            return parse_bytes(value)
        except ValueError as error:
            raise SettingsError(_refusal(spec, origin, value)) from error
    return value


def _entries(spec: FieldSpec, value: object, origin: Origin) -> list[Entry]:
    if isinstance(value, str | tuple):
        try:
            return [entry for text in ([value] if isinstance(value, str) else value) for entry in parse_entries(text)]
        except ValueError as error:
            raise SettingsError(f"{origin.name}: {error}") from error
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise SettingsError(_refusal(spec, origin, value))
    return value


def _no_such(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return (
        f"no such setting of a model; {f'did you mean {near[0]}?' if near else 'known are ' + ', '.join(sorted(known))}"
    )


def _refusal(spec: FieldSpec, origin: Origin, value: object) -> str:
    return f"{origin.name}: {shown(spec, value)!r} is not allowed; {spec.name} is {spec.allowed}"


def _option(spec: FieldSpec, *, needs_all: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    default = _default_text(spec) if needs_all or not spec.required else ""
    help_text = f"{spec.description} [{spec.variable}{'; ' + default if default else ''}]"
    if spec.kind == "switch":
        names = f"{spec.flag}/--no-{spec.flag[2:]}"
        return click.option(names, spec.name, default=None, help=help_text)
    metavar = "[" + "|".join(spec.choices) + "]" if spec.choices else spec.kind.upper()
    multiple = spec.kind in _SEVERAL
    return click.option(spec.flag, spec.name, metavar=metavar, multiple=multiple, help=help_text)


def _default_text(spec: FieldSpec) -> str:
    if spec.required:
        return "required"
    if spec.default is None or spec.default == []:
        return ""
    if isinstance(spec.default, list):
        return ",".join(map(str, spec.default))
    return {True: "on", False: "off"}[spec.default] if isinstance(spec.default, bool) else str(spec.default)
