"""Bounded reading of small files, and naming what a file that is not a checkpoint really is."""

import json
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from loader.errors import CheckpointError, unreadable

MAX_JSON_BYTES = 64 << 20
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")

_LFS_POINTER = "a git-LFS pointer, not the file it stands for"
_WEB_PAGE = "a web page"
# Kinds that no file is meant to be, whatever its ending.
NOT_WHAT_IT_IS_NAMED = (_LFS_POINTER, _WEB_PAGE)
_SIGNATURES: tuple[tuple[bytes, str, str], ...] = (
    (
        b"version https://git-lfs",
        _LFS_POINTER,
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
        return _WEB_PAGE, "the download was answered with a page, often a login or error page; download it again"
    return None


def foreign_file_error(path: Path, head: bytes, wanted: str) -> CheckpointError | None:
    """The error for `path`, whose first bytes are `head`, if it is recognisably something else than `wanted`."""
    kind = foreign_kind(head)
    if kind is None:
        return None
    return CheckpointError("invalid", f"{path} is {kind[0]}", kind[1], file=path, expected=wanted, found=kind[0])


@contextmanager
def open_regular(path: Path) -> Iterator[tuple[int, os.stat_result]]:
    """Yields the descriptor and the status of a regular file.

    Raises CheckpointError for what is none, where opening a pipe would wait for its other end, and for whatever
    the operating system refuses, within the block too.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise unreadable(path, error) from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(
                "invalid", f"{path} is not a regular file", "pass a checkpoint made of files", file=path
            )
        yield descriptor, status
    except OSError as error:
        raise unreadable(path, error) from error
    finally:
        os.close(descriptor)


def read_head(path: Path, num_bytes: int = 256) -> bytes:
    """The first bytes of a file."""
    with open_regular(path) as (descriptor, _):
        return read_exactly(descriptor, num_bytes, 0)


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
    with open_regular(path) as (descriptor, status):
        # As large a buffer as is asked for is taken at once, so ask for no more than there is.
        data = read_exactly(descriptor, min(status.st_size, max_bytes) + 1, 0)
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


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def parse_json(
    text: str, pairs_hook: Callable[[list[tuple[str, Any]]], dict[str, Any]] | None = None, *, is_strict: bool = False
) -> Any:
    """The value of a JSON text. Raises ValueError or RecursionError, also for text that is no Unicode.

    NaN and Infinity, which Python writes into configs though JSON has no such thing, are taken unless `is_strict`.
    """
    value = json.loads(text, object_pairs_hook=pairs_hook, parse_constant=_no_constant if is_strict else None)
    if _SURROGATE.search(text):
        # JSON can spell halves of characters, which can neither be shown, nor sent, nor be looked up.
        json.dumps(value, ensure_ascii=False).encode()
    return value


def parse_json_object(path: Path, data: bytes) -> dict[str, Any]:
    """`data`, the content of `path`, as a JSON object."""
    text = decode_text(path, data)
    try:
        value = parse_json(text)
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
