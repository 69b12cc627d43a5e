"""Headers of safetensors files. Reads no tensor data and imports no torch."""

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from loader.errors import CheckpointError
from loader.files import foreign_file_error, open_regular, parse_json, read_exactly
from loader.tensors import TensorInfo

MAX_HEADER_BYTES = 100_000_000
_LENGTH_BYTES = 8
_MAX_DIMENSION = 1 << 62
_MAX_DIMENSIONS = 16
_DOWNLOAD_AGAIN = "download the file again"

DTYPE_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """One file: its tensors in the order of their offsets, and what identifies its content."""

    path: Path
    tensors: tuple[TensorInfo, ...]
    num_bytes: int
    mtime_ns: int
    header_sha256: bytes


def read_safetensors_file(path: Path) -> SafetensorsFile:
    """Reads and checks the header of one safetensors file.

    Raises CheckpointError "not_found" or "invalid", naming the file, the tensor, and how many bytes are missing.
    """
    with open_regular(path) as (descriptor, status):
        header = _read_header(path, descriptor, status.st_size)
    data_start = _LENGTH_BYTES + len(header)
    tensors = _parse_header(path, header, data_start)
    _check_coverage(path, tensors, data_start, status.st_size)
    return SafetensorsFile(path, tuple(tensors), status.st_size, status.st_mtime_ns, hashlib.sha256(header).digest())


def _read_header(path: Path, descriptor: int, file_size: int) -> bytes:
    head = read_exactly(descriptor, 256, 0)
    # The length of a header may begin like a pickle, so a header that is there counts for more.
    if not head[_LENGTH_BYTES:].lstrip().startswith(b"{"):
        foreign = foreign_file_error(path, head, "safetensors")
        if foreign is not None:
            raise foreign
    if len(head) < _LENGTH_BYTES:
        raise _invalid(
            path,
            f"has {file_size} bytes, and a safetensors header needs {_LENGTH_BYTES} before its text",
            expected=f"at least {_LENGTH_BYTES} bytes",
            found=f"{file_size} bytes",
        )
    (length,) = struct.unpack_from("<Q", head)
    if length > MAX_HEADER_BYTES:
        raise _invalid(
            path,
            f"is not a safetensors file: it announces a header of {length} bytes, the limit is {MAX_HEADER_BYTES}",
            expected=f"at most {MAX_HEADER_BYTES}",
            found=str(length),
        )
    missing = _LENGTH_BYTES + length - file_size
    if missing > 0:
        raise _invalid(
            path,
            f"is truncated inside its header: at least {missing} bytes are missing",
            expected=f"at least {_LENGTH_BYTES + length} bytes",
            found=f"{file_size} bytes",
        )
    header = read_exactly(descriptor, length, _LENGTH_BYTES)
    if len(header) != length:
        raise _invalid(path, "changed while it was read", "wait until the download has ended")
    return header


def _parse_header(path: Path, header: bytes, data_start: int) -> list[TensorInfo]:
    try:
        entries = parse_json(header.decode("utf-8"), _unique_keys, is_strict=True)
    except UnicodeDecodeError as cause:
        raise _invalid(path, f"has a header that is not UTF-8 (byte {cause.start})", expected="UTF-8") from cause
    except (ValueError, RecursionError) as cause:
        raise _invalid(path, f"has a header that is not valid JSON: {cause}", expected="JSON") from cause
    if not isinstance(entries, dict):
        raise _invalid(path, "has a header that is not a JSON object", expected="a JSON object")
    _check_metadata(path, entries.pop("__metadata__", None))
    tensors = [_parse_entry(path, name, entry, data_start) for name, entry in entries.items()]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.num_bytes))
    return tensors


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {key!r} occurs twice")
            seen.add(key)
    return result


def _check_metadata(path: Path, metadata: object) -> None:
    if metadata is None:
        return
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _invalid(path, "has a __metadata__ that does not map texts to texts", expected="texts")


def _parse_entry(path: Path, name: str, entry: object, data_start: int) -> TensorInfo:
    if not isinstance(entry, dict):
        raise _invalid(path, f"describes tensor {name!r} by something else than an object", tensor=name)
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise _invalid(
            path, f"gives tensor {name!r} the unknown type {_short(dtype)}", tensor=name, expected=", ".join(DTYPE_BITS)
        )
    if not isinstance(shape, list) or len(shape) > _MAX_DIMENSIONS or not all(_is_count(size) for size in shape):
        raise _invalid(
            path,
            f"gives tensor {name!r} the shape {_short(shape)}",
            tensor=name,
            expected=f"at most {_MAX_DIMENSIONS} counts",
            found=_short(shape),
        )
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_count(offset) for offset in offsets):
        raise _invalid(
            path,
            f"gives tensor {name!r} the data_offsets {_short(offsets)}",
            tensor=name,
            expected="two counts",
            found=_short(offsets),
        )
    begin, end = offsets
    num_bits = prod(shape) * DTYPE_BITS[dtype]
    if end < begin or num_bits != 8 * (end - begin):
        # A float could not hold the product of hostile sizes.
        fraction = f"{num_bits % 8 / 8:g}".removeprefix("0")
        needed = f"{num_bits // 8}{fraction} bytes"
        raise _invalid(
            path,
            f"gives tensor {name!r} {end - begin} bytes, where {dtype} {shape} takes {needed}",
            tensor=name,
            expected=needed,
            found=f"{end - begin} bytes",
        )
    return TensorInfo(name, dtype, tuple(shape), path, data_start + begin, end - begin, name)


def _short(value: object) -> str:
    return repr(value)[:200]


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MAX_DIMENSION


def _check_coverage(path: Path, tensors: Iterable[TensorInfo], data_start: int, file_size: int) -> None:
    """The tensors must cover the data without hole or overlap, and end where the file ends."""
    position = data_start
    for tensor in tensors:
        if tensor.offset != position:
            what = "overlaps the tensor before it" if tensor.offset < position else "leaves a hole before it"
            raise _invalid(
                path,
                f"is laid out wrongly: tensor {tensor.name!r} {what}",
                tensor=tensor.name,
                expected=f"offset {position - data_start}",
                found=f"offset {tensor.offset - data_start}",
            )
        position += tensor.num_bytes
    if position == file_size:
        return
    what = f"is truncated: {position - file_size} bytes are missing"
    if position < file_size:
        what = f"has {file_size - position} bytes too many at its end"
    raise _invalid(path, what, expected=f"{position} bytes", found=f"{file_size} bytes")


def _invalid(
    path: Path,
    what: str,
    remedy: str = _DOWNLOAD_AGAIN,
    *,
    tensor: str | None = None,
    expected: str | None = None,
    found: str | None = None,
) -> CheckpointError:
    return CheckpointError("invalid", f"{path} {what}", remedy, path, tensor, expected, found)
