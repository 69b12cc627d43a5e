"""Files that commands write."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from stepwire.cli.errors import CommandError


def output_option(default: str, help_text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Adds `-o`, `--output`: the file that a command writes."""
    kind = click.Path(dir_okay=False, path_type=Path)
    return click.option("-o", "--output", type=kind, default=Path(default), show_default=True, help=help_text)


def write_private(path: Path, data: bytes) -> None:
    """Writes a file that this user alone can read. Raises CommandError when that does not work."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
    except OSError as error:
        text = f"{path} cannot be written ({error.strerror or error}): name another file with --output"
        raise CommandError(text) from error
