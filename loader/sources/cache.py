"""A local cache of models from slow storage: bounded, least recently used goes first, safe for several processes.

    entries/KEY/entry.json        which model it is, sizes and SHA-256 of its files; its time is that of the last use
    entries/KEY/NAME/…            the files
    partial/KEY/NAME/…            a download that has not ended
    locks/KEY                     who downloads or evicts it, see `loader.sources.lock`
    leases/KEY/…                  who uses it; an entry in use is not evicted
    names/HASH                    the KEY of what was last asked for by that name, for when the source is out of reach

KEY is a hash of the URL and of everything that the source says of its files, so another version is another entry.
"""

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from loader.errors import CheckpointError, LoadCancelled
from loader.files import read_json_object, read_small
from loader.known_hashes import RECORD_NAME
from loader.sources.directory import DIRECTORY_VARIABLE, LIMIT_VARIABLE
from loader.sources.download import Watch, download, present_bytes, stats_below
from loader.sources.lock import Mark, Waiting, acquire, is_stale
from loader.sources.remote import RemoteModel
from loader.sources.verified import VerifiedFiles

_DEFAULT_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class Entry:
    """A whole model in the cache. `last_used` is in seconds since 1970."""

    key: str
    url: str
    path: Path
    num_bytes: int
    last_used: float
    in_use: bool


@dataclass(frozen=True, slots=True)
class Asking:
    """What a caller of the cache wants to be told, and whether it still wants an answer."""

    report: Callable[[str], None] = field(default=lambda _text: None)
    progress: Callable[[int, int], None] = field(default=lambda _done, _total: None)
    cancelled: Callable[[], bool] = field(default=lambda: False)
    patience_s: float = 600.0
    poll_s: float = 0.2
    pause_s: float = 1.0


class Held:
    """A model that is kept from being evicted until `release`, or the end of a `with` block."""

    def __init__(self, path: Path, lease: Mark | None) -> None:
        self.path = path
        self._lease = lease

    def release(self) -> None:
        """Lets it be evicted again."""
        if self._lease is not None:
            self._lease.release()
            self._lease = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class ModelCache:
    """The cache in one folder. `limit_bytes` bounds what it holds; by default four fifths of the disk."""

    def __init__(self, directory: Path, limit_bytes: int | None = None) -> None:
        self._directory = directory
        self._root = directory / "sources"
        self._limit_bytes = limit_bytes

    @property
    def folder(self) -> Path:
        """Where it is."""
        return self._root

    def hold(self, model: RemoteModel, name: str, asking: Asking) -> Held:
        """The files of a remote model, brought here first if need be; `find` knows them by `name` from then on.

        Of several processes that want the same model one downloads it and the others wait, as `acquire` does. Raises
        CheckpointError: "unavailable" when there is no room, or as `download` does; LoadCancelled.
        """
        key = entry_key(model)
        if self._is_read_only() and self._is_whole(key):
            return Held(self._path_of(key), None)
        self._make_folders()
        waiting = Waiting(
            asking.report,
            asking.cancelled,
            lambda: present_bytes(self._root / "partial" / key),
            asking.patience_s,
            asking.poll_s,
        )
        with acquire(self._root / "locks" / key, waiting):
            if not self._is_whole(key):
                self._fill(model, key, asking)
            _write(self._name_path(name), key.encode())
            return self._lease(key)

    def find(self, name: str) -> Held | None:
        """What was last asked for by that name, whatever its source holds now; None when there is none."""
        try:
            key = read_small(self._name_path(name), 64).decode("ascii", "replace")
        except CheckpointError:
            return None
        if not key.isalnum() or not self._is_whole(key):
            return None
        return Held(self._path_of(key), None) if self._is_read_only() else self._lease_whole(key)

    def hold_path(self, path: Path) -> Held | None:
        """Keeps what lies at an absolute path in this cache; None for one elsewhere. Raises CheckpointError."""
        entries = self._root.absolute() / "entries"
        if not path.is_relative_to(entries) or path == entries:
            return None
        key = path.relative_to(entries).parts[0]
        return None if self._is_read_only() or not self._is_whole(key) else self._lease_whole(key)

    def _lease_whole(self, key: str) -> Held | None:
        """A lease, unless the model was evicted before its lock was to be had."""
        with acquire(self._root / "locks" / key, Waiting()):
            return self._lease(key) if self._is_whole(key) else None

    def entries(self) -> list[Entry]:
        """All models in the cache, the last used first. One that cannot be read is left out."""
        found = []
        for record in (self._root / "entries").glob(f"*/{RECORD_NAME}"):
            try:
                content, used = read_json_object(record), record.stat().st_mtime
                path, num_bytes = record.parent / str(content["path"]), int(content["bytes"])
            except (CheckpointError, OSError, KeyError, ValueError, TypeError):
                continue
            key = record.parent.name
            found.append(Entry(key, str(content.get("url", "")), path, num_bytes, used, self._in_use(key)))
        return sorted(found, key=lambda entry: entry.last_used, reverse=True)

    def evict(self, key: str) -> bool:
        """Removes an entry and what was downloaded of it; answers False when it is in use or being downloaded."""
        try:
            lock = acquire(self._root / "locks" / key, Waiting(patience_s=0.0))
        except CheckpointError:
            return False
        with lock:
            if self._in_use(key):
                return False
            for kind in ("entries", "partial"):
                folder = self._root / kind / key
                if folder.exists():
                    aside = self._root / "partial" / f"{key}.{secrets.token_hex(4)}.old"
                    folder.rename(aside)
                    shutil.rmtree(aside, ignore_errors=True)
            return True

    def make_room(self, num_bytes: int, keep: str, report: Callable[[str], None]) -> None:
        """Evicts what was not used for longest, until `num_bytes` more fit both the limit and the disk; never `keep`.

        Raises CheckpointError "unavailable" when that is not enough.
        """
        for folder in (self._root / "partial").glob("*.old"):
            shutil.rmtree(folder, ignore_errors=True)
        limit = self._limit_bytes
        if limit is None:
            limit = int(shutil.disk_usage(self._root).total * _DEFAULT_SHARE)
        for key, label in self._by_last_use(keep):
            if self._fits(num_bytes, limit):
                return
            if self.evict(key):
                report(f"removed {label} from the cache")
        if not self._fits(num_bytes, limit):
            free = shutil.disk_usage(self._root).free
            raise CheckpointError(
                "unavailable",
                f"{num_bytes} bytes do not fit into the cache {self._root}: it holds {self._held_bytes()} bytes that "
                f"are in use, its limit is {limit}, and {free} bytes of its disk are free",
                f"make room, raise {LIMIT_VARIABLE}, or choose another folder with {DIRECTORY_VARIABLE}",
                file=self._root,
            )

    def _by_last_use(self, keep: str) -> list[tuple[str, str]]:
        """Keys and names of what could go, that of the longest unused first; a download given up counts as one."""
        whole = [(entry.last_used, entry.key, entry.url) for entry in self.entries()]
        for folder in (self._root / "partial").iterdir():
            newest = max((stat.st_mtime for stat in stats_below(folder)), default=0.0)
            whole.append((newest, folder.name, f"a part of {folder.name}"))
        return [(key, label) for _, key, label in sorted(whole) if key != keep]

    def _fits(self, num_bytes: int, limit: int) -> bool:
        free = shutil.disk_usage(self._root).free
        return num_bytes <= free and self._held_bytes() + num_bytes <= limit

    def _held_bytes(self) -> int:
        return sum(present_bytes(self._root / kind) for kind in ("entries", "partial"))

    def _make_folders(self) -> None:
        try:
            for name in ("entries", "partial", "locks", "leases", "names"):
                (self._root / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            text = f"the cache {self._root} cannot be written: {error.strerror or error}"
            remedy = f"choose another folder with {DIRECTORY_VARIABLE}"
            raise CheckpointError("unavailable", text, remedy, file=self._root) from error

    def _fill(self, model: RemoteModel, key: str, asking: Asking) -> None:
        partial = self._root / "partial" / key
        folder = partial / model.label
        folder.mkdir(parents=True, exist_ok=True)
        missing = model.num_bytes - present_bytes(folder)
        if missing > 0:
            self.make_room(missing, key, asking.report)
            asking.report(f"bringing {model.url} into the cache: {missing} bytes")
        sums = download(model, folder, Watch(asking.progress, asking.cancelled, asking.pause_s))
        if asking.cancelled():
            raise LoadCancelled
        only_gguf = all(file.name.endswith(".gguf") for file in model.files)
        record = {
            "url": model.url,
            "path": f"{model.label}/{model.files[0].name}" if only_gguf else model.label,
            "bytes": model.num_bytes,
            "files": {file.name: {"bytes": file.num_bytes, "sha256": sums[file.name]} for file in model.files},
        }
        _write(partial / RECORD_NAME, json.dumps(record, indent=1).encode())
        entry = self._root / "entries" / key
        shutil.rmtree(entry, ignore_errors=True)  # one that is not whole is none
        partial.rename(entry)
        # They were hashed as they came, or as they were found here, and need not be read for that once more.
        verified = VerifiedFiles(self._directory, self._path_of(key))
        for name, sha256 in sums.items():
            path = entry / model.label / name
            verified.add(path, path.stat(), sha256)

    def _is_whole(self, key: str) -> bool:
        """Whether all files of an entry are there, in their sizes."""
        entry = self._root / "entries" / key
        try:
            record = read_json_object(entry / RECORD_NAME)
            folder = entry / str(record["path"]).partition("/")[0]
            return all((folder / name).stat().st_size == facts["bytes"] for name, facts in record["files"].items())
        except (CheckpointError, OSError, KeyError, TypeError, AttributeError):
            return False

    def _name_path(self, name: str) -> Path:
        return self._root / "names" / hashlib.sha256(name.encode("utf-8", "backslashreplace")).hexdigest()[:32]

    def _lease(self, key: str) -> Held:
        """Marks an entry as used; the caller has its lock."""
        leases = self._root / "leases" / key
        leases.mkdir(parents=True, exist_ok=True)
        lease = Mark.try_make(leases / secrets.token_hex(8))
        os.utime(self._root / "entries" / key / RECORD_NAME)
        return Held(self._path_of(key), lease)

    def _path_of(self, key: str) -> Path:
        entry = self._root / "entries" / key
        return entry / str(read_json_object(entry / RECORD_NAME)["path"])

    def _is_read_only(self) -> bool:
        """Whether nothing can be written, and so nothing be evicted from here: a cache that others fill."""
        return self._root.exists() and not os.access(self._root / "locks", os.W_OK)

    def _in_use(self, key: str) -> bool:
        used = False
        for lease in (self._root / "leases" / key).glob("*"):
            if lease.name.startswith("."):
                continue
            if is_stale(lease):
                lease.unlink(missing_ok=True)
            else:
                used = True
        return used


def _write(path: Path, data: bytes) -> None:
    new = path.with_name(f"{path.name}.{secrets.token_hex(4)}.new")
    new.write_bytes(data)
    os.replace(new, path)


def entry_key(model: RemoteModel) -> str:
    """Names one version of a remote model."""
    files = [[file.name, file.num_bytes, file.version, file.sha256] for file in model.files]
    return hashlib.sha256(json.dumps([model.url, sorted(files)]).encode()).hexdigest()[:32]
