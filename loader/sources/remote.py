"""What a remote model looks like to the cache, and which of its files are wanted. Imports nothing that is slow."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Protocol

from loader.errors import CheckpointError
from loader.files import parse_json
from loader.known_hashes import MANIFEST_NAME

MAX_FILES = 10_000
MAX_INDEX_BYTES = 64 << 20
INDEX_SUFFIX = ".safetensors.index.json"
# Small files by their names; weights are chosen apart. Code and pickles are never among them.
SMALL_NAMES = ("*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt", "SHA256SUMS", "*.sha256")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SPLIT_GGUF = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<total>\d{5})\.gguf")
_MAX_NAME_BYTES = 255
_MAX_DEPTH = 4


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file of a remote model. `version` changes with its content, where the source has such a thing; `sha256` is
    of the content, where the source knows it."""

    name: str
    num_bytes: int
    version: str = ""
    sha256: str | None = None


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """All files of a remote model that are wanted. `url` names it without credentials, `label` is its short name."""

    url: str
    label: str
    files: Sequence[RemoteFile]
    reader: "Reader" = field(repr=False, compare=False)

    @property
    def num_bytes(self) -> int:
        """Bytes of all files together."""
        return sum(file.num_bytes for file in self.files)


class Reader(Protocol):
    """Reads the files of one remote model."""

    def chunks(self, file: RemoteFile, start: int) -> Iterator[bytes]:
        """The content from byte `start` on, in parts of a few MiB. May be called by several threads.

        Raises CheckpointError for what will not get better by trying again, OSError for what may.
        """


def read_small_remote(reader: Reader, file: RemoteFile) -> bytes:
    """The whole of a small file. Raises CheckpointError, also for one above 64 MiB; OSError."""
    parts, size = [], 0
    for part in reader.chunks(file, 0):
        size += len(part)
        if size > MAX_INDEX_BYTES:
            raise CheckpointError("invalid", f"{file.name} is larger than {MAX_INDEX_BYTES} bytes", "check the source")
        parts.append(part)
    return b"".join(parts)


def is_safe_name(name: str) -> bool:
    """Whether a file of that name, as a source gives it, can only be written below the folder it is meant for."""
    parts = name.split("/")
    return (
        len(parts) <= _MAX_DEPTH
        and all(
            part and not part.startswith(".") and len(part.encode("utf-8", "replace")) <= _MAX_NAME_BYTES
            for part in parts
        )
        and name.isprintable()
        and not set(name) & set('\\:*?"<>|')
    )


def sha256_or_none(value: object) -> str | None:
    """`value` if it is a SHA-256 in hexadecimal."""
    return value if isinstance(value, str) and _SHA256.fullmatch(value) else None


def choose_files(
    url: str, files: Mapping[str, RemoteFile], read: Callable[[RemoteFile], bytes], *, find: Callable[[str], RemoteFile]
) -> list[RemoteFile]:
    """Which of a source's files are the model: its small files, and one set of weights.

    An index decides alone; consolidated files, which hold the weights a second time, are left out; of several GGUF
    files none is chosen. `find` is asked for files that an index names below a folder. Raises CheckpointError.
    """
    if len(files) > MAX_FILES:
        raise CheckpointError(
            "unsupported", f"{url} holds {len(files)} files", f"name a folder of at most {MAX_FILES} files"
        )
    safe = {name: file for name, file in files.items() if is_safe_name(name)}
    chosen = {
        name: file
        for name, file in safe.items()
        if "/" not in name
        and file.num_bytes <= MAX_INDEX_BYTES
        and any(fnmatchcase(name, pattern) for pattern in SMALL_NAMES)
    }
    for name in _weight_names(url, safe, read):
        chosen[name] = safe[name] if name in safe else find(name)
    return [chosen[name] for name in sorted(chosen)]


def _weight_names(url: str, files: Mapping[str, RemoteFile], read: Callable[[RemoteFile], bytes]) -> list[str]:
    if MANIFEST_NAME in files:
        return manifest_names(f"{url}/{MANIFEST_NAME}", read(files[MANIFEST_NAME]))
    indexes = [name for name in files if name.endswith(INDEX_SUFFIX) and not name.startswith("consolidated")]
    index = "model" + INDEX_SUFFIX
    if index in indexes or len(indexes) == 1:
        name = index if index in indexes else indexes[0]
        return indexed_names(f"{url}/{name}", read(files[name]))
    tensors = [n for n in files if n.endswith(".safetensors") and "/" not in n and not n.startswith("consolidated")]
    if "model.safetensors" in tensors:
        return ["model.safetensors"]
    if tensors:
        return tensors
    ggufs = [name for name in files if name.endswith(".gguf")]
    sets = {_gguf_set(name) for name in ggufs}
    if len(sets) > 1:
        some = ", ".join(sorted(ggufs)[:5])
        raise CheckpointError(
            "invalid", f"{url} holds {len(sets)} GGUF models: {some}", f"name one of them, as in {url}/{min(ggufs)}"
        )
    if ggufs:
        return ggufs
    raise CheckpointError(
        "not_found",
        f"{url} holds neither safetensors nor GGUF files",
        "use a model published as safetensors or GGUF; pickled weights are never downloaded",
    )


def indexed_names(where: str, data: bytes) -> list[str]:
    """The files that a safetensors index names. Raises CheckpointError for one that is damaged or leads outside."""
    weight_map = _json_object(where, data).get("weight_map")
    return _checked_names(where, weight_map.values() if isinstance(weight_map, dict) else ())


def manifest_names(where: str, data: bytes) -> list[str]:
    """The weights that the manifest of a sliced checkpoint names. Raises CheckpointError like `indexed_names`."""
    files = _json_object(where, data).get("files")
    return _checked_names(where, files if isinstance(files, dict) else ())


def _json_object(where: str, data: bytes) -> Mapping[str, object]:
    try:
        content = parse_json(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError("invalid", f"{where} is not valid JSON: {error}", "check the source") from error
    if not isinstance(content, dict):
        raise CheckpointError("invalid", f"{where} is not a JSON object", "check the source")
    return content


def _checked_names(where: str, values: Iterable[object]) -> list[str]:
    names = set()
    for name in values:
        if not isinstance(name, str) or not is_safe_name(name) or not name.endswith(".safetensors"):
            text = f"{where} names {str(name)[:200]!r}, which is no safetensors file below its folder"
            raise CheckpointError("invalid", text, "do not use it")
        names.add(name)
    if not names or len(names) > MAX_FILES:
        raise CheckpointError("invalid", f"{where} names {len(names)} files", f"it must name 1 to {MAX_FILES}")
    return sorted(names)


def gguf_names(name: str) -> list[str]:
    """The GGUF file of that name, or all parts of what it is a part of, the first one first."""
    match = _SPLIT_GGUF.fullmatch(name)
    total = int(match["total"]) if match else 1
    if match is None or not 1 < total <= MAX_FILES:
        return [name]
    return [f"{match['stem']}-{number:05}-of-{total:05}.gguf" for number in range(1, total + 1)]


def _gguf_set(name: str) -> str:
    match = _SPLIT_GGUF.fullmatch(name)
    return match["stem"] if match else name


def last_part(url: str) -> str:
    """The last part of a URL, as a name for a folder."""
    name = PurePosixPath(url.split("?")[0].rstrip("/")).name
    return re.sub(r"[^\w.-]", "_", name)[:100].lstrip(".") or "model"
