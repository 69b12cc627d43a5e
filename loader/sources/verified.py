"""Which files were found to hold what they ought to, and have not changed since."""

import contextlib
import hashlib
import json
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from loader.errors import CheckpointError
from loader.files import read_json_object
from loader.sources.lock import Waiting, acquire


class VerifiedFiles:
    """What is known to be sound of one checkpoint, kept below the cache's `directory`.

    Without a folder to write to, nothing is remembered.
    """

    def __init__(self, directory: Path, checkpoint: Path) -> None:
        self._folder = directory / "verified"
        key = hashlib.sha256(os.fsencode(os.path.realpath(checkpoint))).hexdigest()[:32]
        self._path = self._folder / f"{key}.json"
        self._adding = threading.Lock()

    def missing(self, wanted: Sequence[tuple[Path, str]]) -> list[tuple[Path, str]]:
        """Those that were not found to have their hash, or have changed since."""
        held = self._read()
        return [
            (path, expected)
            for path, expected in wanted
            if held.get(os.path.realpath(path)) != _facts_now(path, expected)
        ]

    def add(self, path: Path, status: os.stat_result, sha256: str) -> None:
        """Remembers what was found, if the file is still the one that was read. May be called by several threads."""
        facts = _facts(status, sha256)
        with self._adding, contextlib.suppress(OSError):
            if facts == _facts_now(path, sha256):
                self._folder.mkdir(parents=True, exist_ok=True)
                new = self._path.with_name(f"{self._path.name}.{secrets.token_hex(4)}.new")
                new.write_text(json.dumps({**self._read(), os.path.realpath(path): facts}), encoding="utf-8")
                os.replace(new, self._path)

    @contextlib.contextmanager
    def alone(self, cancelled: Callable[[], bool]) -> Iterator[None]:
        """Keeps other processes from the same work; where that cannot be had, it is done twice."""
        lock = None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            lock = acquire(self._path.with_suffix(".lock"), Waiting(cancelled=cancelled, measure=self._num_bytes))
        except (OSError, CheckpointError):
            pass
        try:
            yield
        finally:
            if lock is not None:
                lock.release()

    def _read(self) -> dict[str, object]:
        try:
            return read_json_object(self._path)
        except CheckpointError:
            return {}

    def _num_bytes(self) -> int:
        """Grows with each file that another process has verified."""
        try:
            return self._path.stat().st_size
        except OSError:
            return 0


def _facts(status: os.stat_result, sha256: str) -> list[object]:
    return [status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev, sha256]


def _facts_now(path: Path, sha256: str) -> list[object] | None:
    try:
        return _facts(path.stat(), sha256)
    except OSError:
        return None
