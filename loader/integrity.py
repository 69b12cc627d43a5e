"""Whether files hold what they were published with: each is read once, and the result remembered. Imports no torch.

Headers cannot tell a file of the right size with wrong bytes from a sound one. Where a SHA-256 is known (see
`loader.known_hashes`) a file is held against it before it is first loaded. The result is kept under the cache directory
by path, size, time of change, inode and device, so that later loads cost nothing; any change has the file read again.
"""

import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from loader.checkpoint import Checkpoint
from loader.errors import CheckpointError, LoadCancelled
from loader.files import open_regular
from loader.known_hashes import KnownHashes
from loader.sources.directory import default_directory
from loader.sources.verified import VerifiedFiles
from loader.tensors import files_of

_READ_BYTES = 4 << 20
_MAX_THREADS = 8
# Files beside the weights that say how to use them.
_SMALL_NAMES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")

Progress: TypeAlias = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Verification:
    """What became of a checkpoint's files. `verified` were read now, `remembered` had been before, and of `unknown`
    nothing tells what they ought to hold."""

    verified: tuple[Path, ...]
    remembered: tuple[Path, ...]
    unknown: tuple[Path, ...]


def verify_once(
    checkpoint: Checkpoint, progress: Progress | None = None, cancelled: Callable[[], bool] | None = None
) -> Verification:
    """Holds the files against the hashes that are known of them, unless that was done before. Raises like
    `verify_files`."""
    return verify_files(checkpoint, progress or _unheard, cancelled or _never)


def bytes_to_verify(checkpoint: Checkpoint) -> int:
    """Bytes that `verify_once` would read now. Raises CheckpointError for a file that is gone."""
    known = KnownHashes()
    hashes = ((path, known.of(path)) for path in _files(checkpoint))
    wanted = [(path, sha256) for path, sha256 in hashes if sha256 is not None]
    return sum(_size(path) for path, _ in VerifiedFiles(default_directory(), checkpoint.path).missing(wanted))


def verify_files(
    checkpoint: Checkpoint, progress: Progress, cancelled: Callable[[], bool], *, again: bool = False
) -> Verification:
    """Holds the files of a checkpoint against the hashes that are known of them; with `again`, those done before too.

    Files are read in parallel; `progress` gets bytes read and bytes to read. Of several processes on one machine that
    load the same checkpoint one reads, and the others wait for what it finds. Raises CheckpointError "invalid" for the
    first file whose content is another, with both hashes; LoadCancelled.
    """
    known = KnownHashes()
    hashes = [(path, known.of(path)) for path in _files(checkpoint)]
    unknown = tuple(path for path, sha256 in hashes if sha256 is None and path.name not in _SMALL_NAMES)
    wanted = [(path, sha256) for path, sha256 in hashes if sha256 is not None]
    memory = VerifiedFiles(default_directory(), checkpoint.path)
    rest = wanted if again else memory.missing(wanted)
    if rest:
        with memory.alone(cancelled):
            rest = rest if again else memory.missing(rest)
            _verify_all(rest, memory, progress, cancelled)
    done = {path for path, _ in rest}
    remembered = tuple(path for path, _ in wanted if path not in done)
    return Verification(tuple(path for path, _ in rest), remembered, unknown)


def _files(checkpoint: Checkpoint) -> list[Path]:
    """The files of weights, and the small ones that are there, in order."""
    weights = set(files_of(checkpoint.tensors.values()))
    folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    return sorted(weights | {folder / name for name in _SMALL_NAMES if (folder / name).is_file()})


def _verify_all(
    wanted: Sequence[tuple[Path, str]], memory: VerifiedFiles, progress: Progress, cancelled: Callable[[], bool]
) -> None:
    total = sum(_size(path) for path, _ in wanted)
    counter = _Counter(progress, total)
    stopped = False

    def verify(path: Path, expected: str) -> None:
        with open_regular(path) as (descriptor, status):
            digest, offset = hashlib.sha256(), 0
            while data := os.pread(descriptor, _READ_BYTES, offset):
                if stopped or cancelled():
                    raise LoadCancelled
                digest.update(data)
                offset += len(data)
                counter.add(path, offset)
        found = digest.hexdigest()
        if found != expected:
            raise _wrong_content(path, expected, found)
        memory.add(path, status, expected)

    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1), thread_name_prefix="verify") as pool:
        futures = [pool.submit(verify, path, expected) for path, expected in wanted]
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        stopped = True
        for future in futures:
            future.cancel()
        # What was stopped because of another says less than that other.
        errors = [error for error in (future.exception() for future in done) if error is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, LoadCancelled)):
            raise error


class _Counter:
    """Adds up what several threads have read."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._total = progress, total
        self._read: dict[Path, int] = {}

    def add(self, path: Path, num_bytes: int) -> None:
        self._read[path] = num_bytes
        self._progress(min(self._total, sum(list(self._read.values()))), self._total)


def _size(path: Path) -> int:
    with open_regular(path) as (_, status):
        return status.st_size


def _wrong_content(path: Path, expected: str, found: str) -> CheckpointError:
    return CheckpointError(
        "invalid",
        f"{path} does not hold what it was published with: its SHA-256 is {found[:12]}…, expected {expected[:12]}…",
        "download the file again; if it was changed on purpose, correct the list of hashes beside it",
        file=path,
        expected=expected,
        found=found,
    )


def _unheard(_done: int, _total: int) -> None:
    return


def _never() -> bool:
    return False
