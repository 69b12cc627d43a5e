"""The folder of the restart store: who may use it, what lies in it, and what is evicted for what. Imports no torch.

All files are reached through the descriptor of the folder that was checked, so that nothing put in its place later is
used. An entry that a process maps, and a file that one writes, are locked (flock) as long as that process has them.
"""

import errno
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from loader.store.errors import EntryInUse, StoreBusy, StoreFull, StoreRefused
from loader.store.format import PREFIX_BYTES, Header, decode_header, header_length
from loader.store.locks import holders, locked, try_lock

ENTRY_SUFFIX = ".weights"
_TEMPORARY_SUFFIX = ".writing"
_LOCK_NAME = ".lock"
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of the store. `header` is None for what cannot be read; `is_whole` is False while it is written."""

    name: str
    num_bytes: int
    last_used_s: float
    is_whole: bool
    header: Header | None
    pids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Limits:
    """What the store may take: `total_bytes` of all entries (None: what the file system has), and `free_memory`,
    which says how many bytes of memory may still be taken."""

    total_bytes: int | None
    free_memory: Callable[[], int]


def default_folder() -> Path:
    """This user's folder on the tmpfs that every Linux has."""
    return Path(f"/dev/shm/stepwire-{os.geteuid()}")


class StoreFolder:
    """An open store. Close it, or use it as a context manager."""

    def __init__(self, path: Path, *, create: bool) -> None:
        """Opens the folder, and makes it with mode 0700 when it is missing and `create` is set.

        Raises StoreRefused for a folder that is missing, no folder, a link, another user's, or open to others.
        """
        self.path = path
        try:
            if create:
                with suppress(FileExistsError):
                    os.mkdir(path, 0o700)
            self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _FLAGS)
        except OSError as error:
            raise _refusal(path, error) from error
        try:
            _check_owner(path, os.fstat(self._descriptor))
            self._lock = os.open(_LOCK_NAME, os.O_RDWR | os.O_CREAT | _FLAGS, 0o600, dir_fd=self._descriptor)
        except OSError as error:
            os.close(self._descriptor)
            raise _refusal(path, error) from error
        except StoreRefused:
            os.close(self._descriptor)
            raise

    def __enter__(self) -> "StoreFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Lets go of the folder; entries that are mapped stay so."""
        os.close(self._lock)
        os.close(self._descriptor)

    def open_file(self, name: str) -> int:
        """A descriptor of an entry, to read. Raises FileNotFoundError, and OSError for what is no file of ours."""
        descriptor = os.open(name + ENTRY_SUFFIX, os.O_RDONLY | os.O_NONBLOCK | _FLAGS, dir_fd=self._descriptor)
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            os.close(descriptor)
            raise OSError(errno.EPERM, "it is not a file of this user")
        return descriptor

    def entries(self) -> list[Entry]:
        """All entries and unfinished files, the one used last first."""
        found = [entry for file_name in os.listdir(self._descriptor) if (entry := self._entry(file_name))]
        return sorted(found, key=lambda entry: (-entry.last_used_s, entry.name))

    @contextmanager
    def create(self, name: str, num_bytes: int, limits: Limits, *, memory_bytes: int | None = None) -> Iterator[int]:
        """Gives the descriptor of a new file of `num_bytes` to be written, and makes it the entry `name` afterwards.

        Evicts what was used longest ago, of what nobody has in use, until there is room, and `memory_bytes` of memory
        (by default what the file takes). When the block raises, nothing is left; when another process made the entry
        meanwhile, that one stays. Raises StoreFull, StoreBusy, OSError.
        """
        temporary = f"{name}.{os.getpid()}-{time.monotonic_ns()}{_TEMPORARY_SUFFIX}"
        with locked(self._lock, self.path):
            self._make_room(num_bytes, num_bytes if memory_bytes is None else memory_bytes, limits)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | _FLAGS
            descriptor = os.open(temporary, flags, 0o600, dir_fd=self._descriptor)
            try_lock(descriptor, shared=False)
        try:
            os.ftruncate(descriptor, num_bytes)
            yield descriptor
            with locked(self._lock, self.path):
                if not self._exists(name + ENTRY_SUFFIX):
                    fd = self._descriptor
                    os.rename(temporary, name + ENTRY_SUFFIX, src_dir_fd=fd, dst_dir_fd=fd)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=self._descriptor)
            os.close(descriptor)

    def evict(self, name: str) -> int:
        """Removes an entry and answers its bytes. Raises EntryInUse, FileNotFoundError."""
        with locked(self._lock, self.path):
            return self._remove(name + ENTRY_SUFFIX)

    def remove_damaged(self, name: str, descriptor: int) -> None:
        """Removes the entry that `descriptor` is of, also from under those that map it: they keep what they have."""
        with locked(self._lock, self.path), suppress(FileNotFoundError):
            there = os.stat(name + ENTRY_SUFFIX, dir_fd=self._descriptor, follow_symlinks=False)
            if os.path.samestat(there, os.fstat(descriptor)):
                os.unlink(name + ENTRY_SUFFIX, dir_fd=self._descriptor)

    def sweep(self) -> None:
        """Removes what writers that have ended left unfinished."""
        with locked(self._lock, self.path):
            self._sweep()

    def _make_room(self, num_bytes: int, memory_bytes: int, limits: Limits) -> None:
        self._sweep()
        entries = self.entries()
        idle = [entry for entry in reversed(entries) if entry.is_whole and not entry.pids]
        evictable = sum(entry.num_bytes for entry in idle)
        # Nothing is evicted for what would find no room even so.
        if short := self._shortage(num_bytes - evictable, memory_bytes - evictable, limits, entries):
            raise _full(num_bytes, short)
        while short := self._shortage(num_bytes, memory_bytes, limits, self.entries()):
            if not idle:
                raise _full(num_bytes, short)
            self._try_remove(idle.pop(0))

    def _shortage(self, num_bytes: int, memory_bytes: int, limits: Limits, entries: list[Entry]) -> str:
        """What is too small for so many more; empty when nothing is."""
        total = sum(entry.num_bytes for entry in entries)
        if limits.total_bytes is not None and total + num_bytes > limits.total_bytes:
            return f"{self.path} may hold {limits.total_bytes} bytes (restart_store_bytes) and has others in use"
        system = os.fstatvfs(self._descriptor)
        # What other writers have announced and not written yet is not free.
        announced = sum(self._unwritten(entry) for entry in entries if not entry.is_whole)
        free = system.f_bavail * system.f_frsize - announced
        if num_bytes > free:
            return f"{self.path} has {max(0, free)} bytes free"
        memory = limits.free_memory() - announced
        if memory_bytes > memory:
            return f"writing them takes {memory_bytes} bytes of memory, and {max(0, memory)} are free"
        return ""

    def _unwritten(self, entry: Entry) -> int:
        try:
            status = os.stat(entry.name + _TEMPORARY_SUFFIX, dir_fd=self._descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return 0
        return max(0, status.st_size - 512 * status.st_blocks)

    def _sweep(self) -> None:
        for file_name in os.listdir(self._descriptor):
            if file_name.endswith(_TEMPORARY_SUFFIX):
                with suppress(EntryInUse, FileNotFoundError):
                    self._remove(file_name)

    def _try_remove(self, entry: Entry) -> None:
        with suppress(EntryInUse, OSError):
            self._remove(entry.name + ENTRY_SUFFIX)

    def _remove(self, file_name: str) -> int:
        descriptor = os.open(file_name, os.O_RDONLY | os.O_NONBLOCK | _FLAGS, dir_fd=self._descriptor)
        try:
            status = os.fstat(descriptor)
            if not try_lock(descriptor, shared=False):
                raise EntryInUse(file_name.partition(".")[0], holders(status))
            os.unlink(file_name, dir_fd=self._descriptor)
            return status.st_size
        finally:
            os.close(descriptor)

    def _exists(self, file_name: str) -> bool:
        try:
            os.stat(file_name, dir_fd=self._descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def _entry(self, file_name: str) -> Entry | None:
        is_whole = file_name.endswith(ENTRY_SUFFIX)
        if not is_whole and not file_name.endswith(_TEMPORARY_SUFFIX):
            return None
        try:
            descriptor = os.open(file_name, os.O_RDONLY | os.O_NONBLOCK | _FLAGS, dir_fd=self._descriptor)
        except OSError:
            return None
        try:
            status = os.fstat(descriptor)
            header = None
            if is_whole and stat.S_ISREG(status.st_mode):
                with suppress(ValueError, OSError):
                    header = read_header(descriptor)
        finally:
            os.close(descriptor)
        name = file_name.removesuffix(ENTRY_SUFFIX).removesuffix(_TEMPORARY_SUFFIX)
        return Entry(name, status.st_size, status.st_mtime, is_whole, header, holders(status))


def evict_idle(path: Path) -> None:
    """Removes what no process has in use from a store; nothing where there is none, or none that can be used."""
    if not path.exists():
        return
    with suppress(StoreRefused, StoreBusy), StoreFolder(path, create=False) as folder:
        folder.sweep()
        for entry in folder.entries():
            if entry.is_whole:
                with suppress(EntryInUse, OSError):
                    folder.evict(entry.name)


def read_header(descriptor: int) -> Header:
    """The header of an open entry. Raises ValueError for one that is damaged or of another format, OSError."""
    prefix = os.pread(descriptor, PREFIX_BYTES, 0)
    text = os.pread(descriptor, header_length(prefix), PREFIX_BYTES)
    return decode_header(prefix, text, os.fstat(descriptor).st_size)


def _full(num_bytes: int, short: str) -> StoreFull:
    return StoreFull(num_bytes, f"{num_bytes} bytes of weights are not kept for a restart: {short}")


def _check_owner(path: Path, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise StoreRefused(
            path,
            f"the restart store {path} belongs to user {status.st_uid}, who could change the weights",
            "remove it, or set restart_store to a folder of your own",
        )
    if status.st_mode & 0o077:
        raise StoreRefused(
            path,
            f"the restart store {path} has mode {stat.S_IMODE(status.st_mode):04o}, and others could use it",
            f"call chmod 700 {path}, or set restart_store to a folder with that mode",
        )


def _refusal(path: Path, error: OSError) -> StoreRefused:
    if error.errno in (errno.ELOOP, errno.ENOTDIR):
        message = f"the restart store {path} is not a folder, or is a symbolic link"
    else:
        message = f"the restart store {path} cannot be opened: {error.strerror}"
    return StoreRefused(path, message, 'set restart_store to a folder with mode 0700 on a tmpfs, or to "off"')
