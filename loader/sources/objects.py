"""Models behind any fsspec URL: object stores, other machines, memory. Imports fsspec when it is used."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from loader.errors import CheckpointError
from loader.sources.remote import (
    MAX_FILES,
    RemoteFile,
    RemoteModel,
    choose_files,
    gguf_names,
    last_part,
    read_small_remote,
)

CHUNK_BYTES = 8 << 20
# These read through other URLs, which a name must not lead to.
_WRAPPERS = frozenset(
    ("blockcache", "cached", "data", "dir", "filecache", "generic", "reference", "simplecache", "tar", "zip")
)
# Where the file systems keep what changes with a file's content, best first.
_VERSION_KEYS = ("ETag", "etag", "checksum", "md5Hash", "content_md5", "md5", "version_id", "LastModified")
_TIME_KEYS = ("last_modified", "mtime", "updated", "created")


@dataclass(frozen=True, slots=True)
class ObjectReader:
    """Reads files below `root` of an fsspec file system."""

    system: Any = field(repr=False)
    root: str

    def chunks(self, file: RemoteFile, start: int) -> Iterator[bytes]:
        """See `Reader`."""
        with _as_os_error(), self.system.open(f"{self.root}/{file.name}", "rb", cache_type="none") as stream:
            stream.seek(start)
            while start < file.num_bytes:
                part = stream.read(min(CHUNK_BYTES, file.num_bytes - start))
                if not part:
                    return
                start += len(part)
                yield part


class _as_os_error:
    """Lets OSError and CheckpointError pass, and turns whatever else a file system raises into an OSError."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, OSError | CheckpointError | MemoryError):
            raise ConnectionError(f"{type(error).__name__}: {error}") from error


def object_model(url: str) -> RemoteModel:
    """The model at an fsspec URL: a folder of safetensors, or one GGUF file.

    Raises CheckpointError: "unsupported" for a protocol that is unknown or whose package is missing, "unavailable" when
    it cannot be reached.
    """
    system, path = _open_system(url)
    try:
        with _as_os_error():
            if path.endswith(".gguf"):
                root, _, name = path.rpartition("/")
                parts = [_remote_file(part, system.info(f"{root}/{part}")) for part in gguf_names(name)]
                return RemoteModel(url, last_part(url), parts, ObjectReader(system, root))
            entries = system.ls(path, detail=True)
    except FileNotFoundError as error:
        raise CheckpointError("not_found", f"{url} does not exist", "check the address") from error
    except OSError as error:
        raise _unreachable(url, error) from error
    if len(entries) > MAX_FILES:
        text = f"{url} holds {len(entries)} files"
        raise CheckpointError("unsupported", text, f"name a folder of at most {MAX_FILES} files")
    reader = ObjectReader(system, path)
    names = ((str(entry["name"]).rstrip("/").rpartition("/")[2], entry) for entry in entries)
    found = {name: _remote_file(name, entry) for name, entry in names if entry.get("type") == "file"}

    def find(name: str) -> RemoteFile:
        with _as_os_error():
            return _remote_file(name, system.info(f"{path}/{name}"))

    try:
        files = choose_files(url, found, lambda file: read_small_remote(reader, file), find=find)
    except FileNotFoundError as error:
        raise CheckpointError("not_found", f"{url} lacks a file that its index names: {error}", "check it") from error
    except OSError as error:
        raise _unreachable(url, error) from error
    return RemoteModel(url, last_part(url), files, reader)


def _open_system(url: str) -> tuple[Any, str]:
    import fsspec

    scheme = url.partition("://")[0].lower()
    if "::" in url or scheme in _WRAPPERS:
        raise CheckpointError("unsupported", f"{url} reads through another URL", "name the model's own URL")
    try:
        system, path = fsspec.url_to_fs(url)
    except ImportError as error:
        raise CheckpointError("unsupported", f"{scheme}:// needs another package: {error}", "install it") from error
    except ValueError as error:
        raise CheckpointError("unsupported", f"{url}: {error}", "use a protocol that fsspec knows") from error
    except Exception as error:
        raise _unreachable(url, error) from error
    return system, str(path).rstrip("/")


def _remote_file(name: str, info: Mapping[str, Any]) -> RemoteFile:
    size = info.get("size")
    if isinstance(size, bool) or not isinstance(size, int) or size < 0:
        raise CheckpointError("unsupported", f"the source does not tell the size of {name}", "download the model first")
    keys = (key for key in (*_VERSION_KEYS, *_TIME_KEYS) if info.get(key))
    key = next(keys, None)
    return RemoteFile(name, size, "" if key is None else str(info[key]))


def _unreachable(url: str, error: Exception) -> CheckpointError:
    reason = str(error) or type(error).__name__
    return CheckpointError("unavailable", f"{url} cannot be reached: {reason}", "check the address and the network")
