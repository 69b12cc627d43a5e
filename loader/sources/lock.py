"""A lock file that names its owner and cannot hang: a dead or silent owner loses it, and waiting ends.

It keeps work from being done twice. What it guards must stay right without it: an owner that was silent for long, and
comes back, runs beside the next one until it notices.
"""

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from loader.errors import CheckpointError, LoadCancelled, unreadable
from loader.files import read_small
from loader.sources.owner import Owner

HEARTBEAT_S = 5.0
STALE_S = 60.0
_REPORT_EVERY_S = 10.0


def _nothing() -> int:
    return 0


def _silent(_text: str) -> None:
    return


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Waiting:
    """How to wait for another owner.

    `report` is told whom for, at once and every few seconds. `measure` says how far the owner has come, as any number
    that grows: waiting ends when it has not grown for `patience_s`.
    """

    report: Callable[[str], None] = _silent
    cancelled: Callable[[], bool] = _never
    measure: Callable[[], int] = _nothing
    patience_s: float = 600.0
    poll_s: float = 0.2


class Mark:
    """A file that says who holds something, kept fresh by a thread until it is released."""

    def __init__(self, path: Path, owner: Owner) -> None:
        self._path, self._owner = path, owner
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._beat, name=f"heartbeat {path.name}", daemon=True)
        self._thread.start()

    @classmethod
    def try_make(cls, path: Path) -> Self | None:
        """Makes the file; None where there is one. Raises OSError."""
        owner = Owner.here()
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except FileExistsError:
            return None
        try:
            os.write(descriptor, owner.encode())
        except OSError:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        return cls(path, owner)

    def is_held(self) -> bool:
        """Whether the file is still this owner's."""
        held = read_owner(self._path)
        return held is not None and held.nonce == self._owner.nonce

    def release(self) -> None:
        """Removes the file, unless another has it by now."""
        self._released.set()
        self._thread.join()
        if self.is_held():
            self._path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _beat(self) -> None:
        while not self._released.wait(HEARTBEAT_S):
            # Whoever lost it must not keep it fresh for the next one.
            with contextlib.suppress(OSError):
                if self.is_held():
                    os.utime(self._path)


def read_owner(path: Path) -> Owner | None:
    """Who is named in a mark; None where there is none, or nobody is named."""
    try:
        return Owner.parse(read_small(path, 1 << 16))
    except CheckpointError:
        return None


def is_stale(path: Path) -> bool:
    """Whether nobody keeps the mark any more: its owner has ended, or has been silent for `STALE_S`. Raises OSError."""
    owner = read_owner(path)
    if owner is not None and owner.is_gone():
        return True
    try:
        beat = path.stat().st_mtime
    except FileNotFoundError:
        return False
    return _now_there(path.parent) - beat > STALE_S


def acquire(path: Path, waiting: Waiting) -> Mark:
    """Takes the lock at `path`, in a folder that exists; leave its `with` block, or call `release`, to give it back.

    Raises CheckpointError "unavailable" when it waited too long, or the lock cannot be written; LoadCancelled.
    """
    began = time.monotonic()
    moved, last, reported = began, waiting.measure(), -_REPORT_EVERY_S
    while True:
        try:
            mark = Mark.try_make(path)
            if mark is not None:
                return mark
            if is_stale(path):
                _remove_stale(path, waiting.report)
                continue
        except OSError as error:
            raise _unwritable(path, error) from error
        if waiting.cancelled():
            raise LoadCancelled
        now, measured = time.monotonic(), waiting.measure()
        if measured > last:
            moved, last = now, measured
        holder = read_owner(path) or "another process"
        if now - moved >= waiting.patience_s:
            raise CheckpointError(
                "unavailable",
                f"{holder} holds {path} and has not gone on for {now - moved:.0f} s",
                f"end that process, or remove {path} when it does not run",
                file=path,
            )
        if now - began >= reported + _REPORT_EVERY_S:
            reported = now - began
            waiting.report(f"waiting for {holder}, which holds {path}")
        time.sleep(waiting.poll_s)


def _remove_stale(path: Path, report: Callable[[str], None]) -> None:
    """Moves the lock away, which only one of several can do, and puts it back if it was a new one's."""
    before = read_owner(path)
    aside = path.with_name(f"{path.name}.{secrets.token_hex(4)}.stale")
    try:
        path.rename(aside)
    except FileNotFoundError:
        return
    moved = read_owner(aside)
    if moved is not None and moved != before:
        with contextlib.suppress(FileExistsError):
            os.link(aside, path)
    else:
        report(f"took over {path}: {before or 'its owner'} is gone")
    aside.unlink(missing_ok=True)


def _now_there(folder: Path) -> float:
    """The time by the clock that dates the files in `folder`, which may be another machine's."""
    probe = folder / f".clock-{secrets.token_hex(8)}"
    try:
        probe.touch(exist_ok=False)
        return probe.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)


def _unwritable(path: Path, error: OSError) -> CheckpointError:
    found = unreadable(path, error)
    return CheckpointError(
        "unavailable",
        f"{path} cannot be written: {error.strerror or error}",
        "make room there, or choose another folder with STEPWIRE_CACHE",
        file=found.file,
    )
