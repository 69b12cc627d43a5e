"""Our own format: weights sliced and converted ahead for the ranks of one split, which any other can load too.

A folder with the model's small files, one safetensors file a rank, and stepwire.json, which says what each holds:

    {"format": "stepwire-presliced", "version": 1, "tensor_parallel_size": 2, "pipeline_parallel_size": 1,
     "dtype": "bfloat16",
     "files": {"rank-0-of-2-stage-0-of-1.safetensors": {"bytes": 1234, "sha256": "…"}, …},
     "tensors": {"model.norm.weight": {"shape": [64], "pieces": [["rank-0-of-2-…", 0, 0, 64]]},
                 "lm_head.weight": {"shape": [320, 64], "pieces": [[file, dimension, start, stop], …]}, …}}

What several ranks hold alike is stored once, by the first of them. A tensor has the same name in a rank's file as in
the whole model.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loader import fields
from loader.checkpoint import Checkpoint, fingerprint
from loader.completeness import check_tensors
from loader.errors import CheckpointError
from loader.fields import Fields
from loader.files import read_json_object
from loader.formats.pieces import join_pieces
from loader.formats.safetensors import file_facts, read_configs
from loader.hf_config import DTYPES, SUPPORTED_ARCHITECTURES, read_hf_config, unsupported_architecture
from loader.known_hashes import MANIFEST_NAME
from loader.safetensors_format import SafetensorsFile, read_safetensors_file
from loader.sources.remote import is_safe_name
from loader.tensors import Piece, TensorInfo

FORMAT_NAME, VERSION = "stepwire-presliced", 1
_CONFIG_NAMES = ("config.json", "generation_config.json", MANIFEST_NAME)
_SLICE_AGAIN = "make it again with `stepwire slice`"
_SIZE_BOUNDS = (1, 4096)


def rank_file_name(tensor_rank: int, num_tensor_ranks: int, stage: int, num_stages: int) -> str:
    """The name of a rank's file."""
    return f"rank-{tensor_rank}-of-{num_tensor_ranks}-stage-{stage}-of-{num_stages}.safetensors"


class PreslicedFormat:
    """A folder that `stepwire slice` wrote."""

    name = "presliced"

    def recognises(self, path: Path) -> bool:
        """Whether the folder holds stepwire.json."""
        return path.is_dir() and (path / MANIFEST_NAME).exists()

    def open(self, path: Path) -> Checkpoint:
        """Reads manifest, config and headers, and holds them against each other. Raises CheckpointError."""
        manifest = _read_manifest(path / MANIFEST_NAME)
        files = {name: _read_file(path / name, num_bytes) for name, num_bytes in manifest.file_bytes.items()}
        stored = {(name, tensor.name): tensor for name, file in files.items() for tensor in file.tensors}
        tensors = {
            name: _whole_tensor(path, name, shape, pieces, stored) for name, (shape, pieces) in manifest.tensors.items()
        }
        _check_all_named(stored, manifest)
        config = replace(read_hf_config(path, manifest.dtype), dtype=manifest.dtype)
        if config.other is not None:
            raise unsupported_architecture(path / "config.json", config.architecture, SUPPORTED_ARCHITECTURES)
        check_tensors(path, config, tensors)
        return Checkpoint(
            path=path,
            format=self.name,
            config=config,
            tensors=tensors,
            total_bytes=sum(tensor.num_bytes for tensor in tensors.values()),
            fingerprint=fingerprint(map(file_facts, files.values()), read_configs(path, _CONFIG_NAMES)),
            gguf_metadata={},
        )


_PieceKey = tuple[str, int, int, int]


@dataclass(frozen=True, slots=True)
class _Manifest:
    dtype: str
    file_bytes: Mapping[str, int]
    tensors: Mapping[str, tuple[tuple[int, ...], list[_PieceKey]]]


def _read_manifest(path: Path) -> _Manifest:
    content = read_json_object(path)
    values = Fields(path, content, _SLICE_AGAIN)
    if content.get("format") != FORMAT_NAME:
        raise _invalid(path, f"does not say that it is a {FORMAT_NAME}", str(content.get("format"))[:100])
    version = values.integer("version", (1, 1 << 30))
    if version > VERSION:
        raise CheckpointError(
            "unsupported",
            f"{path} has version {version} of this format, and we read up to {VERSION}",
            "update Stepwire, or make it again with this version",
            file=path,
            expected=str(VERSION),
            found=str(version),
        )
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        values.integer(name, _SIZE_BOUNDS)
    dtype = values.text("dtype")
    if dtype not in DTYPES:
        raise values.error("dtype", f"is {dtype!r}", " or ".join(DTYPES), repr(dtype))
    return _Manifest(dtype, dict(_file_bytes(path, content.get("files"))), dict(_tensors(path, content.get("tensors"))))


def _file_bytes(path: Path, files: object) -> Iterable[tuple[str, int]]:
    for name, facts in _object(path, "files", files).items():
        if not is_safe_name(name) or not name.endswith(".safetensors"):
            raise _invalid(path, "names a file that is no safetensors file beside it", repr(name)[:200])
        yield name, Fields(path, _object(path, name, facts), _SLICE_AGAIN).integer("bytes", (8, 1 << 60))


def _tensors(path: Path, tensors: object) -> Iterable[tuple[str, tuple[tuple[int, ...], list[_PieceKey]]]]:
    for name, facts in _object(path, "tensors", tensors).items():
        values = _object(path, name, facts)
        shape, pieces = values.get("shape"), values.get("pieces")
        if not isinstance(shape, list) or not 1 <= len(shape) <= 4 or not all(map(_is_count, shape)):
            raise _invalid(path, f"gives tensor {name!r} no shape", repr(shape)[:200], name)
        if not isinstance(pieces, list) or not pieces:
            raise _invalid(path, f"names no part of tensor {name!r}", repr(pieces)[:200], name)
        yield name, (tuple(shape), [_piece_key(path, name, shape, piece) for piece in pieces])


def _piece_key(path: Path, name: str, shape: list[int], piece: object) -> _PieceKey:
    if isinstance(piece, list) and len(piece) == 4 and isinstance(piece[0], str) and all(map(_is_count, piece[1:])):
        file, dim, start, stop = piece
        if dim < len(shape) and start <= stop <= shape[dim]:
            return file, dim, start, stop
    raise _invalid(path, f"describes a part of tensor {name!r} wrongly", repr(piece)[:200], name)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < fields.VOCAB_BOUNDS[1] << 8


def _object(path: Path, name: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict) or not value:
        raise _invalid(path, f"has no {name!r}", repr(value)[:200])
    return value


def _read_file(path: Path, num_bytes: int) -> SafetensorsFile:
    file = read_safetensors_file(path)
    if file.num_bytes != num_bytes:
        raise CheckpointError(
            "invalid",
            f"{path} has {file.num_bytes} bytes, and {MANIFEST_NAME} says {num_bytes}",
            "copy the folder again, or " + _SLICE_AGAIN,
            file=path,
            expected=f"{num_bytes} bytes",
            found=f"{file.num_bytes} bytes",
        )
    return file


def _whole_tensor(
    folder: Path,
    name: str,
    shape: tuple[int, ...],
    keys: list[_PieceKey],
    stored: Mapping[tuple[str, str], TensorInfo],
) -> TensorInfo:
    pieces = []
    for file, dim, start, stop in keys:
        info = stored.get((file, name))
        if info is None:
            found = f"{folder / file} lacks the part of tensor {name!r} that {MANIFEST_NAME} names"
            raise CheckpointError("invalid", found, _SLICE_AGAIN, file=folder / file, tensor=name)
        if info.shape != (*shape[:dim], stop - start, *shape[dim + 1 :]):
            part = [*shape[:dim], stop - start, *shape[dim + 1 :]]
            raise CheckpointError(
                "invalid",
                f"{info.file}: the part of tensor {name!r} has the shape {list(info.shape)}, expected {part}",
                _SLICE_AGAIN,
                file=info.file,
                tensor=name,
                expected=str(part),
                found=str(list(info.shape)),
            )
        pieces.append(Piece(dim, start, stop, info))
    return join_pieces(name, pieces, shape[pieces[0].dim])


def _check_all_named(stored: Mapping[tuple[str, str], TensorInfo], manifest: _Manifest) -> None:
    named = {(key[0], name) for name, (_, keys) in manifest.tensors.items() for key in keys}
    for key, info in stored.items():
        if key not in named:
            raise CheckpointError(
                "invalid",
                f"{info.file} holds tensor {info.name!r}, which {MANIFEST_NAME} does not name",
                _SLICE_AGAIN,
                file=info.file,
                tensor=info.name,
            )


def _invalid(path: Path, what: str, found: str, tensor: str | None = None) -> CheckpointError:
    return CheckpointError("invalid", f"{path} {what}: {found}", _SLICE_AGAIN, file=path, tensor=tensor, found=found)
