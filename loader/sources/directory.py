"""Where the cache is. Imports nothing that is slow."""

import os
from pathlib import Path

DIRECTORY_VARIABLE, LIMIT_VARIABLE = "STEPWIRE_CACHE", "STEPWIRE_CACHE_BYTES"


def default_directory() -> Path:
    """The folder that STEPWIRE_CACHE names, or ~/.cache/stepwire."""
    named = os.environ.get(DIRECTORY_VARIABLE)
    if named:
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stepwire"
