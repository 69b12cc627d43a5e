"""Writing the pre-sliced format: what each rank of a split needs, in the type it is held in, whole or not at all."""

import errno
import hashlib
import json
import os
import secrets
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch

from loader.checkpoint import Checkpoint
from loader.errors import CheckpointError
from loader.files import MAX_JSON_BYTES
from loader.formats.presliced import FORMAT_NAME, VERSION, rank_file_name
from loader.formats.safetensors import refuse_foreign_types
from loader.known_hashes import MANIFEST_NAME
from loader.layout import (
    max_pipeline_parallel_size,
    pipeline_parallel_problem,
    tensor_parallel_problem,
    tensor_parallel_sizes,
    weight_slices,
)
from loader.shares import RankPlace
from loader.sources.remote import INDEX_SUFFIX, SMALL_NAMES
from loader.tensors import WeightSlice
from loader.weights import load_weights

_DTYPES = {
    "float32": (torch.float32, "F32", 4),
    "float16": (torch.float16, "F16", 2),
    "bfloat16": (torch.bfloat16, "BF16", 2),
}
_BATCH_BYTES = 256 << 20
# What speaks of the files that are left behind.
_NOT_COPIED = (f"*{INDEX_SUFFIX}", "SHA256SUMS", "*.sha256", MANIFEST_NAME)


@dataclass(frozen=True, slots=True)
class Split:
    """Over how many ranks to slice, and the type to store: "auto" for the checkpoint's own."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    dtype: str = "auto"


def slice_checkpoint(
    checkpoint: Checkpoint,
    folder: Path,
    split: Split,
    *,
    progress: Callable[[int, int], None],
    cancelled: Callable[[], bool],
) -> int:
    """Writes the pre-sliced form of a checkpoint to `folder`, which must not exist; returns the bytes of its weights.

    `progress(written, total)` is called as it goes. Nothing is left behind unless it ends well; memory is about
    256 MiB or the largest tensor. Raises CheckpointError: "unsupported" for a split that the model does not allow
    and for quantised weights, "unavailable" when `folder` exists or cannot be written; LoadCancelled.
    """
    _check(checkpoint, folder, split)
    dtype = checkpoint.config.dtype if split.dtype == "auto" else split.dtype
    plan = list(_plan(checkpoint, split))
    total = sum(file.num_bytes(_DTYPES[dtype][2]) for file in plan)
    scratch = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.partial")
    try:
        scratch.mkdir(parents=True)
        free = shutil.disk_usage(scratch).free
        if free < total:
            raise OSError(errno.ENOSPC, f"{total} bytes are needed and {free} are free")
        facts: dict[str, Any] = {}
        written = 0
        for file in plan:
            facts[file.name] = _write_rank(
                checkpoint, scratch / file.name, file, dtype, partial(_report, progress, written, total), cancelled
            )
            written += file.num_bytes(_DTYPES[dtype][2])
        _copy_small_files(checkpoint.path, scratch)
        manifest = _manifest(plan, split, dtype, facts)
        _write_whole(scratch / MANIFEST_NAME, json.dumps(manifest, indent=1).encode())
        _publish(scratch, folder)
    except OSError as error:
        shutil.rmtree(scratch, ignore_errors=True)
        raise CheckpointError(
            "unavailable",
            f"{folder} cannot be written: {error.strerror or error}",
            f"give another folder, with {total} bytes of room",
            file=folder,
        ) from error
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    return total


def _report(progress: Callable[[int, int], None], before: int, total: int, written: int) -> None:
    progress(before + written, total)


@dataclass(frozen=True, slots=True)
class _RankFile:
    """One file, and what is stored in it: what earlier ranks hold is left out."""

    name: str
    wanted: Sequence[WeightSlice]

    def num_bytes(self, value_bytes: int) -> int:
        return sum(prod(want.part_shape) for want in self.wanted) * value_bytes


def _check(checkpoint: Checkpoint, folder: Path, split: Split) -> None:
    config, size, stages = checkpoint.config, split.tensor_parallel_size, split.pipeline_parallel_size
    problem = tensor_parallel_problem(config, size)
    if problem is not None:
        sizes = ", ".join(map(str, tensor_parallel_sizes(config)))
        raise CheckpointError("unsupported", f"tp {size} does not work: {problem}", f"use one of tp {sizes}")
    problem = pipeline_parallel_problem(config, stages)
    if problem is not None:
        most = max_pipeline_parallel_size(config)
        raise CheckpointError("unsupported", f"pp {stages} does not work: {problem}", f"use a pp of 1 to {most}")
    if config.other is not None:
        text = f"{config.architecture} is none of our own models, and cannot be sliced"
        raise CheckpointError("unsupported", text, "load the checkpoint as it is", file=checkpoint.path)
    if config.quantisation is not None:
        text = f"{checkpoint.path} has quantised weights, which cannot be sliced ahead"
        raise CheckpointError("unsupported", text, "load it as it is: a worker slices them", file=checkpoint.path)
    if checkpoint.format == "gguf":
        text = f"{checkpoint.path} is a GGUF, which keeps config and tokenizer in a form of its own"
        raise CheckpointError("unsupported", text, "slice the model's safetensors form", file=checkpoint.path)
    refuse_foreign_types(checkpoint.tensors)
    if folder.exists() or folder.is_symlink():
        text = f"{folder} exists already"
        raise CheckpointError("unavailable", text, "remove it, or give another name", file=folder)


def _plan(checkpoint: Checkpoint, split: Split) -> Iterator[_RankFile]:
    seen: set[tuple[str, int | None, int, int]] = set()
    size, stages = split.tensor_parallel_size, split.pipeline_parallel_size
    for stage in range(stages):
        for rank in range(size):
            wanted = []
            for want in weight_slices(checkpoint.config, RankPlace(rank, size, stage, stages)):
                key = (want.name, want.dim, want.start, want.stop)
                if key not in seen:
                    seen.add(key)
                    wanted.append(want)
            # What other ranks read too comes first: each then reads one range of it, and this rank one range of all.
            wanted.sort(key=lambda want: want.part_shape != want.shape)
            yield _RankFile(rank_file_name(rank, size, stage, stages), wanted)


def _write_rank(
    checkpoint: Checkpoint,
    path: Path,
    file: _RankFile,
    dtype: str,
    progress: Callable[[int], None],
    cancelled: Callable[[], bool],
) -> dict[str, Any]:
    torch_dtype, stored_as, value_bytes = _DTYPES[dtype]
    header = _header(file, stored_as, value_bytes)
    digest, written = hashlib.sha256(header), 0
    with path.open("xb") as stream:
        stream.write(header)
        for batch in _batches(file.wanted, value_bytes):
            loaded = load_weights(checkpoint, batch, dtype=torch_dtype, progress=lambda _: None, cancelled=cancelled)
            for want in batch:
                data = loaded.pop(want.name).contiguous().reshape(-1).view(torch.uint8).numpy().data
                digest.update(data)
                stream.write(data)
                written += len(data)
                progress(written)
        _flush(stream)
    return {"bytes": len(header) + written, "sha256": digest.hexdigest()}


def _header(file: _RankFile, stored_as: str, value_bytes: int) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for want in file.wanted:
        num_bytes = prod(want.part_shape) * value_bytes
        entries[want.name] = {
            "dtype": stored_as,
            "shape": list(want.part_shape),
            "data_offsets": [position, position + num_bytes],
        }
        position += num_bytes
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _batches(wanted: Sequence[WeightSlice], value_bytes: int) -> Iterator[list[WeightSlice]]:
    batch: list[WeightSlice] = []
    num_bytes = 0
    for want in wanted:
        size = prod(want.part_shape) * value_bytes
        if batch and num_bytes + size > _BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
        batch.append(want)
        num_bytes += size
    if batch:
        yield batch


def _manifest(plan: Sequence[_RankFile], split: Split, dtype: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    tensors: dict[str, Any] = {}
    for file in plan:
        for want in file.wanted:
            dim, start, stop = (0, 0, want.shape[0]) if want.dim is None else (want.dim, want.start, want.stop)
            entry = tensors.setdefault(want.name, {"shape": list(want.shape), "pieces": []})
            entry["pieces"].append([file.name, dim, start, stop])
    return {
        "format": FORMAT_NAME,
        "version": VERSION,
        "tensor_parallel_size": split.tensor_parallel_size,
        "pipeline_parallel_size": split.pipeline_parallel_size,
        "dtype": dtype,
        "files": dict(facts),
        "tensors": tensors,
    }


def _copy_small_files(source: Path, target: Path) -> None:
    for path in sorted(source.iterdir()):
        wanted = any(fnmatchcase(path.name, pattern) for pattern in SMALL_NAMES)
        left_out = any(fnmatchcase(path.name, pattern) for pattern in _NOT_COPIED)
        if wanted and not left_out and path.is_file() and path.stat().st_size <= MAX_JSON_BYTES:
            _write_whole(target / path.name, path.read_bytes())


def _write_whole(path: Path, data: bytes) -> None:
    with path.open("xb") as stream:
        stream.write(data)
        _flush(stream)


def _flush(stream: BinaryIO) -> None:
    stream.flush()
    os.fsync(stream.fileno())


def _publish(scratch: Path, folder: Path) -> None:
    """Gives the finished folder its name. Another that appeared meanwhile is not replaced, unless it is empty."""
    scratch.rename(folder)
    descriptor = os.open(folder.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
