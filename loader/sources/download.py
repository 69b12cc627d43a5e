"""Bringing the files of a remote model here: in parallel, going on where an earlier download stopped, checked."""

import contextlib
import errno
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from loader.errors import CheckpointError, LoadCancelled
from loader.files import read_json_object
from loader.sources.remote import RemoteFile, RemoteModel

PART_SUFFIX = ".part"
_SUMS_NAME = ".sums.json"
_NUM_THREADS = 4
_ATTEMPTS = 5
_HASH_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Watch:
    """What a download tells and asks. `progress` gets bytes that are here and bytes in all, from several threads;
    `pause_s` lies before each new try of a source that failed."""

    progress: Callable[[int, int], None]
    cancelled: Callable[[], bool]
    pause_s: float = 1.0


def download(model: RemoteModel, folder: Path, watch: Watch) -> dict[str, str]:
    """Brings all files into `folder`, which exists and may hold parts of them; returns their SHA-256 by name.

    What is there already is kept, and where the source knows hashes held against them. Raises CheckpointError:
    "unavailable" when the source or the disk fails, after which another call goes on where this one stopped, "invalid"
    for content that is not what the source announced; LoadCancelled.
    """
    sums = _read_sums(folder)
    state = _State(model, folder, watch, sums)
    try:
        with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="download") as pool:
            futures = [pool.submit(state.fetch, file) for file in model.files]
            try:
                for future in as_completed(futures):
                    name, sha256 = future.result()
                    sums[name] = sha256
                    _write_sums(folder, sums)
            except BaseException:
                state.stop = True
                raise
    except OSError as error:
        raise _disk_error(folder, model, error) from error
    (folder / _SUMS_NAME).unlink(missing_ok=True)
    return {file.name: sums[file.name] for file in model.files}


def stats_below(folder: Path) -> Iterator[os.stat_result]:
    """Of all files below `folder`, which others may fill, move or remove meanwhile; of none when it is not there."""
    for parent, _, names in os.walk(folder):  # passes over a folder that is gone, as `Path.rglob` does not
        for name in names:
            with contextlib.suppress(OSError):
                yield os.lstat(os.path.join(parent, name))


def present_bytes(folder: Path) -> int:
    """Bytes of all files below `folder`; 0 when it is not there."""
    return sum(stat.st_size for stat in stats_below(folder))


class _State:
    """A download that is running."""

    def __init__(self, model: RemoteModel, folder: Path, watch: Watch, sums: dict[str, str]) -> None:
        self.stop = False
        self._model, self._folder, self._watch, self._sums = model, folder, watch, dict(sums)
        self._here: dict[str, int] = {}

    def fetch(self, file: RemoteFile) -> tuple[str, str]:
        """Brings one file here; answers its name and SHA-256."""
        path = self._folder / file.name
        if file.name in self._sums and path.is_file() and path.stat().st_size == file.num_bytes:
            self._report(file, file.num_bytes)
            return file.name, self._sums[file.name]
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + PART_SUFFIX)
        failures, before = 0, -1
        while True:
            try:
                sha256 = self._append(file, part)
                break
            except _SourceFailed as error:
                here = part.stat().st_size
                failures = 0 if here > before else failures + 1
                before = here
                if failures >= _ATTEMPTS:
                    raise CheckpointError(
                        "unavailable",
                        f"{self._model.url}/{file.name} cannot be read: {error}",
                        "start again when the source answers: it goes on where it stopped",
                    ) from error
                time.sleep(self._watch.pause_s)
        os.replace(part, path)
        return file.name, sha256

    def _append(self, file: RemoteFile, part: Path) -> str:
        """Completes a part; answers its SHA-256. What is wrong is removed, so that the next try begins anew."""
        with part.open("a+b") as stream:
            if stream.tell() > file.num_bytes:
                stream.truncate(0)
            digest = hashlib.sha256()
            stream.seek(0)
            while data := stream.read(_HASH_BYTES):
                self._check_stop()
                digest.update(data)
            size = stream.tell()
            self._report(file, size)
            chunks = self._model.reader.chunks(file, size) if size < file.num_bytes else iter(())
            while True:
                self._check_stop()
                try:
                    data = next(chunks, b"")
                except OSError as error:
                    raise _SourceFailed(error) from error
                if not data:
                    break
                size += len(data)
                if size > file.num_bytes:
                    break
                stream.write(data)
                stream.flush()
                digest.update(data)
                self._report(file, size)
            if size < file.num_bytes:
                raise _SourceFailed(f"it ended after {size} of {file.num_bytes} bytes")
            os.fsync(stream.fileno())
        sha256 = digest.hexdigest()
        self._check_content(file, part, size, sha256)
        return sha256

    def _check_content(self, file: RemoteFile, part: Path, size: int, sha256: str) -> None:
        expected, found = f"{file.num_bytes} bytes", f"{size} bytes"
        if size == file.num_bytes:
            if file.sha256 in (None, sha256):
                return
            expected, found = str(file.sha256), sha256
        part.unlink()
        raise CheckpointError(
            "invalid",
            f"{self._model.url}/{file.name} is not what its source announces",
            "start again; if it stays so, tell the publisher",
            expected=expected,
            found=found,
        )

    def _check_stop(self) -> None:
        if self.stop or self._watch.cancelled():
            raise LoadCancelled

    def _report(self, file: RemoteFile, size: int) -> None:
        self._here[file.name] = size
        self._watch.progress(sum(list(self._here.values())), self._model.num_bytes)


class _SourceFailed(Exception):
    """The source broke off; what is here is right as far as it goes."""


def _read_sums(folder: Path) -> dict[str, str]:
    """Hashes of the files that are complete already."""
    path = folder / _SUMS_NAME
    if not path.exists():
        return {}
    try:
        return {name: str(value) for name, value in read_json_object(path).items()}
    except CheckpointError:
        return {}


def _write_sums(folder: Path, sums: dict[str, str]) -> None:
    path = folder / _SUMS_NAME
    new = path.with_name(_SUMS_NAME + ".new")
    new.write_text(json.dumps(sums), encoding="utf-8")
    os.replace(new, path)


def _disk_error(folder: Path, model: RemoteModel, error: OSError) -> CheckpointError:
    remedy = "choose another folder with STEPWIRE_CACHE"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        remedy = f"make room for {model.num_bytes} bytes, then start again: it goes on where it stopped"
    return CheckpointError("unavailable", f"{folder} cannot be written: {error.strerror or error}", remedy, file=folder)
