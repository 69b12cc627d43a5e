"""An entry's file: a prefix, a small JSON header, then raw tensors at multiples of 64 bytes. Imports no torch.

    8 bytes   "SWSTORE" and the format's version
    8 bytes   length of the header, little-endian
    16 bytes  xxh3_128 of the header
    header    JSON: key, model, created_s, file_bytes, tensors
    zeros     up to a multiple of 4096
    tensors   little-endian, C order

Each tensor has the xxh3_128 of every 64 MiB of it. That finds damage; it is no protection against whoever can write
the file, which is what the folder's mode is for. Header and prefix are written last, so a file that was not finished
begins with zeros.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import xxhash

from loader.store.key import EntryKey

MAGIC = b"SWSTORE\x01"
PREFIX_BYTES = 32
MAX_HEADER_BYTES = 64 << 20
PIECE_BYTES = 64 << 20
ALIGNMENT = 64
_PAGE = 4096
_MAX_DIMS = 16
_MAX_TEXT = 4096
# Widths in bytes of the types a tensor may have, by torch's names.
ITEM_BYTES: Mapping[str, int] = {
    **dict.fromkeys(("bool", "uint8", "int8", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("float8_e4m3fnuz", "float8_e5m2fnuz", "float4_e2m1fn_x2"), 1),
    **dict.fromkeys(("uint16", "int16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("uint32", "int32", "float32"), 4),
    **dict.fromkeys(("uint64", "int64", "float64"), 8),
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies in the file. `hashes` has one digest for each 64 MiB, in hexadecimal."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    hashes: tuple[str, ...]

    def pieces(self) -> list[tuple[int, int]]:
        """The ranges of the file that `hashes` are of."""
        end = self.offset + self.num_bytes
        return [(start, min(start + PIECE_BYTES, end)) for start in range(self.offset, end, PIECE_BYTES)]


@dataclass(frozen=True, slots=True)
class Header:
    """What an entry holds. `model` is for people: the checkpoint's path when it was loaded."""

    key: EntryKey
    model: str
    created_s: int
    file_bytes: int
    tensors: Mapping[str, StoredTensor]


def digest(data: Any) -> str:
    """xxh3_128 in hexadecimal; releases the GIL."""
    return xxhash.xxh3_128_hexdigest(data)


def plan_file(sizes: Sequence[tuple[str, tuple[int, ...]]], header_bytes: int) -> tuple[list[int], int]:
    """Offsets of tensors of these types and shapes behind a header of `header_bytes`, and the bytes of the file."""
    at = -(-(PREFIX_BYTES + header_bytes) // _PAGE) * _PAGE
    offsets = []
    for dtype, shape in sizes:
        offsets.append(at)
        at = -(-(at + prod(shape) * ITEM_BYTES[dtype]) // ALIGNMENT) * ALIGNMENT
    return offsets, at


def encode_header(header: Header) -> bytes:
    """Prefix and header. Raises ValueError for one that is too large."""
    text = json.dumps(
        {
            "key": header.key.as_json(),
            "model": header.model[-_MAX_TEXT:],
            "created_s": header.created_s,
            "file_bytes": header.file_bytes,
            "tensors": {
                name: [tensor.dtype, tensor.shape, tensor.offset, tensor.num_bytes, tensor.hashes]
                for name, tensor in header.tensors.items()
            },
        },
        separators=(",", ":"),
    ).encode()
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(f"a header of {len(text)} bytes is above {MAX_HEADER_BYTES}")
    return MAGIC + struct.pack("<Q", len(text)) + bytes.fromhex(digest(text)) + text


def header_length(prefix: bytes) -> int:
    """Bytes of the header, from the first 32 of a file. Raises ValueError unless they are this format's."""
    if len(prefix) < PREFIX_BYTES:
        raise ValueError("the file is too short")
    if prefix[:8] != MAGIC:
        is_ours = prefix.startswith(MAGIC[:7])
        raise ValueError(f"the format is version {prefix[7]}" if is_ours else "it was not written to its end")
    length = int(struct.unpack_from("<Q", prefix, 8)[0])
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"the header claims {length} bytes")
    return length


def decode_header(prefix: bytes, text: bytes, file_bytes: int) -> Header:
    """The header of a file of `file_bytes`. Raises ValueError for one that is damaged or claims what cannot be."""
    if len(text) != header_length(prefix) or digest(text) != prefix[16:PREFIX_BYTES].hex():
        raise ValueError("the header is damaged")
    try:
        value = json.loads(text)
        header = Header(
            key=EntryKey.from_json(value["key"]),
            model=str(value["model"]),
            created_s=int(value["created_s"]),
            file_bytes=int(value["file_bytes"]),
            tensors={name: _stored(fields) for name, fields in value["tensors"].items()},
        )
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"the header has another form: {error!r}") from error
    if header.file_bytes != file_bytes:
        raise ValueError(f"the file has {file_bytes} bytes and was written with {header.file_bytes}")
    for name, tensor in header.tensors.items():
        _check(name, tensor, len(text) + PREFIX_BYTES, file_bytes)
    return header


def _stored(fields: Any) -> StoredTensor:
    dtype, shape, offset, num_bytes, hashes = fields
    numbers = (*shape, offset, num_bytes)
    if not all(type(number) is int and number >= 0 for number in numbers) or len(shape) > _MAX_DIMS:
        raise ValueError("a tensor's numbers are not sizes")
    return StoredTensor(str(dtype), tuple(shape), offset, num_bytes, tuple(map(str, hashes)))


def _check(name: str, tensor: StoredTensor, data_start: int, file_bytes: int) -> None:
    width = ITEM_BYTES.get(tensor.dtype)
    if width is None or prod(tensor.shape) * width != tensor.num_bytes:
        raise ValueError(f"tensor {name!r} of {tensor.dtype} {list(tensor.shape)} cannot have {tensor.num_bytes} bytes")
    if tensor.offset % ALIGNMENT or tensor.offset < data_start or tensor.offset + tensor.num_bytes > file_bytes:
        raise ValueError(f"tensor {name!r} lies outside the file")
    if len(tensor.hashes) != len(tensor.pieces()):
        raise ValueError(f"tensor {name!r} has {len(tensor.hashes)} digests")
