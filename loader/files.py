"""Bounded reading of small files, and naming what a file that is not a checkpoint really is."""

import json
import os
from pathlib import Path
from typing import Any

from loader.errors import CheckpointError, unreadable

MAX_JSON_BYTES = 64 << 20

_SIGNATURES: tuple[tuple[bytes, str, str], ...] = (
    (
        b"version https://git-lfs",
        "a git-LFS pointer, not the file it stands for",
        "fetch the real file with `git lfs pull`, or download it again",
    ),
    (b"GGUF", "a GGUF file", "give it the ending .gguf and pass its own path"),
    (
        b"PK\x03\x04",
        "a zip archive (as torch.save writes)",
        "convert it to safetensors; pickled weights are never loaded",
    ),
    (b"\x80\x02", "a Python pickle", "convert it to safetensors; pickled weights are never loaded"),
    (b"\x80\x03", "a Python pickle", "convert it to safetensors; pickled weights are never loaded"),
    (b"\x80\x04", "a Python pickle", "convert it to safetensors; pickled weights are never loaded"),
    (b"\x1f\x8b", "a gzip archive", "unpack it first"),
    (b"\x89HDF", "an HDF5 file", "convert it to safetensors"),
)


def foreign_kind(head: bytes) -> tuple[str, str] | None:
    """What a file beginning with `head` is, and the remedy, when it is something people mistake for weights."""
    for signature, kind, remedy in _SIGNATURES:
        if head.startswith(signature):
            return kind, remedy
    text = head.lstrip().lower()
    if text.startswith((b"<!doctype", b"<html", b"<?xml")):
        return "a web page", "the download was answered with a page, often a login or error page; download it again"
    return None


def foreign_file_error(path: Path, head: bytes, wanted: str) -> CheckpointError | None:
    """The error for `path`, whose first bytes are `head`, if it is recognisably something else than `wanted`."""
    kind = foreign_kind(head)
    if kind is None:
        return None
    return CheckpointError("invalid", f"{path} is {kind[0]}", kind[1], file=path, expected=wanted, found=kind[0])


def read_head(path: Path, num_bytes: int = 256) -> bytes:
    """The first bytes of a file."""
    try:
        with path.open("rb") as file:
            return file.read(num_bytes)
    except OSError as error:
        raise unreadable(path, error) from error


def read_exactly(descriptor: int, num_bytes: int, offset: int) -> bytes:
    """Up to `num_bytes` at `offset`; fewer only where the file ends."""
    parts = []
    while num_bytes > 0:
        part = os.pread(descriptor, num_bytes, offset)
        if not part:
            break
        parts.append(part)
        num_bytes -= len(part)
        offset += len(part)
    return b"".join(parts)


def read_small(path: Path, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """The whole of a file that must not be larger than `max_bytes`."""
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise unreadable(path, error) from error
    if len(data) > max_bytes:
        raise CheckpointError(
            "invalid", f"{path} is larger than {max_bytes} bytes", "replace it with the model's own file", file=path
        )
    return data


def decode_text(path: Path, data: bytes) -> str:
    """`data`, the content of `path`, as UTF-8 text."""
    error = foreign_file_error(path, data[:256], "text")
    if error is not None:
        raise error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as cause:
        raise CheckpointError(
            "invalid",
            f"{path} is not UTF-8 text (byte {cause.start})",
            "download the file again",
            file=path,
            expected="UTF-8",
        ) from cause


def parse_json_object(path: Path, data: bytes) -> dict[str, Any]:
    """`data`, the content of `path`, as a JSON object."""
    text = decode_text(path, data)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as cause:
        raise CheckpointError(
            "invalid", f"{path} is not valid JSON: {cause}", "download the file again", file=path, expected="JSON"
        ) from cause
    if not isinstance(value, dict):
        raise CheckpointError(
            "invalid",
            f"{path} holds a JSON {type(value).__name__}, not an object",
            "download the file again",
            file=path,
            expected="a JSON object",
            found=type(value).__name__,
        )
    return value


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    return parse_json_object(path, read_small(path))
