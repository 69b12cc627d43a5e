"""A file system of a few hundred KiB, which commands see that are started with a prefix, and nobody else does."""

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

# $0 is the folder, $1 the size; what follows is the command, which it becomes.
_MOUNT = 'mount -t tmpfs -o "size=$1,mode=700" stepwire-test "$0" && shift && exec "$@"'
_FILL = 'cat /dev/zero > "$0/of-somebody-else" 2>/dev/null; exec "$@"'


def cannot_mount() -> str:
    """Why no file system can be mounted here; empty where one can."""
    if shutil.which("unshare") is None:
        return "unshare is not installed"
    done = subprocess.run(
        [*small_disk(Path("/tmp"), "64k"), "true"], capture_output=True, text=True, check=False, timeout=20
    )
    return "" if done.returncode == 0 else f"file systems cannot be mounted here: {done.stderr.strip()}"


def small_disk(folder: Path, size: str) -> Sequence[str]:
    """A prefix for a command that is to see a tmpfs of this size in place of a folder."""
    return ["unshare", "--mount", "--propagation=private", "sh", "-c", _MOUNT, str(folder), size]


def filled(folder: Path) -> Sequence[str]:
    """A prefix for a command, to go behind that of `small_disk`: somebody else has filled it to the last byte."""
    return ["sh", "-c", _FILL, str(folder)]
