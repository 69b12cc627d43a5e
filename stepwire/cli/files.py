"""Files that commands write."""

import os
from pathlib import Path

from stepwire.cli.errors import CommandError


def write_private(path: Path, data: bytes) -> None:
    """Writes a file that this user alone can read. Raises CommandError when that does not work."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
    except OSError as error:
        text = f"{path} cannot be written ({error.strerror or error}): name another file with --output"
        raise CommandError(text) from error
