"""The settings file: TOML, checked key by key.

Keys at the top hold for every command that knows them; those in `[serve]`, `[scheduler]` or
`[worker]` for that command alone, and win.
"""

import difflib
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from stepwire.cli.errors import SettingsError


@dataclass(frozen=True, slots=True)
class FileValue:
    """A value of the file, and where in it."""

    value: object
    where: str


def read_config_file(path: Path, command: str, known: Mapping[str, Collection[str]]) -> dict[str, FileValue]:
    """The values that the file sets for `command`. `known` holds the settings of every command.

    Raises SettingsError for a file that cannot be read and for keys that no command knows.
    """
    content = _parse(path)
    tables = {key: value for key, value in content.items() if isinstance(value, dict)}
    top = {key: value for key, value in content.items() if key not in tables}
    everywhere = sorted({name for names in known.values() for name in names})
    problems = [_unknown(path, key, [*everywhere, *known]) for key in top if key not in everywhere]
    for table, values in tables.items():
        if table not in known:
            problems.append(_unknown(path, f"[{table}]", [f"[{name}]" for name in known]))
        else:
            problems.extend(
                _unknown(path, f"[{table}] {key}", known[table]) for key in values if key not in known[table]
            )
    if problems:
        raise SettingsError("\n".join(problems))
    wanted = known[command]
    found = {key: FileValue(value, f"{key} in {path}") for key, value in top.items() if key in wanted}
    own = tables.get(command, {})
    return found | {key: FileValue(value, f"[{command}] {key} in {path}") for key, value in own.items()}


def _parse(path: Path) -> dict[str, object]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise SettingsError(f"settings file {path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"settings file {path} is not TOML: {error}") from error


def _unknown(path: Path, key: str, known: Collection[str]) -> str:
    name = key.rpartition(" ")[2]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else f"; known are {', '.join(sorted(known))}"
    return f"{key} in {path}: no such setting{hint}"
