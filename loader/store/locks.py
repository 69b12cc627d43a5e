"""Locks of open files (flock): released by the kernel when their holder ends, however it ends."""

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loader.store.errors import StoreBusy

_RETRY_EVERY_S = 0.01


def try_lock(descriptor: int, *, shared: bool) -> bool:
    """Takes the lock of an open file, or changes the one held; False when another holder stands against it."""
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EINTR):
            return False
        raise
    return True


@contextmanager
def locked(descriptor: int, path: Path, timeout_s: float = 5.0) -> Iterator[None]:
    """Holds the exclusive lock of an open file. Raises StoreBusy when it is not free in time."""
    deadline = time.monotonic() + timeout_s
    while not try_lock(descriptor, shared=False):
        if time.monotonic() > deadline:
            raise StoreBusy(path, timeout_s)
        time.sleep(_RETRY_EVERY_S)
    try:
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def holders(status: os.stat_result, locks: Path = Path("/proc/locks")) -> tuple[int, ...]:
    """Ids of the processes that took a flock of this file, as far as the kernel shows them to us."""
    wanted = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    found = set()
    try:
        lines = locks.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return ()
    for line in lines:
        # "1: FLOCK  ADVISORY  READ 1234 00:1a:5678 0 EOF"; "->" instead of the number's end marks one who waits.
        words = line.split()
        if len(words) >= 6 and words[1] == "FLOCK" and words[5] == wanted and words[4].isdigit():
            found.add(int(words[4]))
    return tuple(sorted(found))
