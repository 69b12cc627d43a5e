"""Opening a checkpoint: everything that can be known, and checked, from headers. Imports no torch."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from loader.config import ModelConfig
from loader.errors import CheckpointError, unreadable
from loader.gguf_format import MetadataValue
from loader.known_hashes import KnownHashes
from loader.tensors import TensorInfo
from loader.unrecognised import WHAT_TO_PASS, not_there, unrecognised


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checked checkpoint; no tensor data has been read.

    `format` is the name of its format ("safetensors", "gguf", "tensorrt-llm", "presliced", or one of another package).
    `tensors` are under Hugging Face names, `total_bytes` is their size as stored. `fingerprint` (hex SHA-256) names
    the content, see `fingerprint`. `gguf_metadata` is empty for all formats but GGUF.
    """

    path: Path
    format: str
    config: ModelConfig
    tensors: Mapping[str, TensorInfo] = field(repr=False)
    total_bytes: int
    fingerprint: str
    gguf_metadata: Mapping[str, MetadataValue] = field(repr=False)


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What is known of a file of weights without reading it whole."""

    path: Path
    num_bytes: int
    mtime_ns: int
    header_sha256: bytes


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a checkpoint in any format that is known, see `loader.formats.registry`.

    Reads headers only, and holds the tensors against the config: what it returns can be loaded. Raises
    CheckpointError: "not_found" for files that are missing, "invalid" for files that are damaged or do not fit
    together, "unsupported" for what is sound but not for us.
    """
    from loader.formats.registry import find_format  # formats are made of what this module defines

    try:
        path = path.expanduser()
        if path.is_dir() or path.is_file():
            found, broken = find_format(path)
            if found is None:
                raise unrecognised(path, broken)
            return found.open(path)
        if path.exists():
            raise CheckpointError("invalid", f"{path} is neither a file nor a directory", WHAT_TO_PASS, file=path)
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, RuntimeError) as error:  # a NUL in the path; "~" without a home
        raise CheckpointError("not_found", f"{str(path)!r} is no usable path: {error}", WHAT_TO_PASS) from error
    raise not_there(path)


def fingerprint(files: Iterable[FileFacts], configs: Iterable[tuple[str, bytes]]) -> str:
    """Names the content of a checkpoint: its files of weights, and the small ones given with their content.

    A file whose SHA-256 is known is named by that alone, so that copies on other machines have the same fingerprint,
    whatever they are called. Of any other only size and header are known, which another model of the same shapes has
    too: there the time of the last change stands for the content, although a copy may have another.
    """
    digest, known = hashlib.sha256(), KnownHashes()
    for file in files:
        sha256 = known.of(file.path)
        if sha256 is not None:
            digest.update(f"sha256:{sha256}\0".encode())
            continue
        digest.update(f"{file.path.name}\0{file.num_bytes}\0{file.mtime_ns}\0".encode())
        digest.update(file.header_sha256)
    for name, content in configs:
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()
