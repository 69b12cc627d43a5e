"""Headers of GGUF files: metadata and where tensors lie. Reads no tensor data, imports no torch."""

import hashlib
import os
import struct
import sys
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TypeAlias

from loader.errors import CheckpointError
from loader.files import foreign_file_error, open_regular

MAX_HEADER_BYTES = 256 << 20
_MAX_DIMENSION = 1 << 48
_FIRST_READ_BYTES = 4 << 20
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 10: "<Q", 11: "<q", 12: "<d"}
_BOOL, _STRING, _ARRAY = 7, 8, 9

# Type number -> name, values in a block, bytes of a block.
GGML_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}
_UNSUPPORTED_TYPES = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
}

# In quotes: array.array takes no parameters when Python 3.11 runs it.
MetadataValue: TypeAlias = "int | float | bool | str | array[int] | array[float] | list[object]"


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor under its GGUF name; `shape` rows first; `offset` from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A parsed header. Arrays of numbers are `array.array`, arrays of texts and others are lists."""

    path: Path
    version: int
    metadata: Mapping[str, MetadataValue]
    tensors: tuple[GgufTensor, ...]
    num_bytes: int
    mtime_ns: int
    header_sha256: bytes


def read_gguf_file(path: Path) -> GgufFile:
    """Reads and checks the header of a GGUF file of version 2 or 3, little-endian.

    No length in the file is trusted before it is held against the file's size. Raises CheckpointError "not_found",
    "invalid" (with the count of missing bytes where known) or "unsupported".
    """
    with open_regular(path) as (descriptor, status):
        reader = _Reader(path, descriptor, status.st_size)
        version, metadata, tensors = _parse(reader)
        digest = hashlib.sha256(reader.consumed()).digest()
    return GgufFile(path, version, metadata, tensors, status.st_size, status.st_mtime_ns, digest)


class _Reader:
    """A cursor over the start of a file, which reads on as the cursor needs it."""

    def __init__(self, path: Path, descriptor: int, file_size: int) -> None:
        self.path = path
        self.file_size = file_size
        self.position = 0
        self._descriptor = descriptor
        self._data = b""

    def consumed(self) -> memoryview:
        """What lies behind the cursor."""
        return memoryview(self._data)[: self.position]

    def need(self, num_bytes: int, what: str) -> bytes:
        """The buffer, which from the cursor on holds at least `num_bytes`."""
        end = self.position + num_bytes
        if end > len(self._data):
            self._read_up_to(end, what)
        return self._data

    def take(self, num_bytes: int, what: str) -> bytes:
        """The next `num_bytes`."""
        data = self.need(num_bytes, what)
        start = self.position
        self.position = start + num_bytes
        return data[start : self.position]

    def scalar(self, layout: str, what: str) -> int | float:
        """The next number."""
        size = struct.calcsize(layout)
        data = self.need(size, what)
        (value,) = struct.unpack_from(layout, data, self.position)
        self.position += size
        return value  # type: ignore[no-any-return]

    def integer(self, layout: str, what: str) -> int:
        """The next whole number."""
        return int(self.scalar(layout, what))

    def text(self, what: str) -> str:
        """The next string."""
        length = self.integer("<Q", what)
        return self.decode(self.take(length, what), what)

    def decode(self, raw: bytes, what: str) -> str:
        """`raw` as UTF-8."""
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as cause:
            raise self.invalid(f"has a {what} that is not UTF-8") from cause

    def strings(self, count: int, what: str) -> list[object]:
        """The next `count` strings. One loop without calls: vocabularies have 10^5 of them."""
        unpack_length = struct.Struct("<Q").unpack_from
        data, position, available = self._data, self.position, len(self._data)
        result: list[object] = []
        append = result.append
        for _ in range(count):
            if position + 8 > available:
                self.position = position
                data = self.need(8, what)
                available = len(data)
            start = position + 8
            position = start + unpack_length(data, position)[0]
            if position > available:
                self.position = start
                data = self.need(position - start, what)
                available = len(data)
            append(data[start:position])
        self.position = position
        try:
            return [raw.decode("utf-8") for raw in result]  # type: ignore[attr-defined]
        except UnicodeDecodeError as cause:
            raise self.invalid(f"has a text in {what} that is not UTF-8") from cause

    def invalid(self, what: str, *, expected: str | None = None, found: str | None = None) -> CheckpointError:
        """An error about this file."""
        return CheckpointError(
            "invalid", f"{self.path} {what}", "download the file again", self.path, None, expected, found
        )

    def _read_up_to(self, end: int, what: str) -> None:
        if end > self.file_size:
            raise self.invalid(
                f"is truncated inside its header, in {what}: at least {end - self.file_size} bytes are missing",
                expected=f"at least {end} bytes",
                found=f"{self.file_size} bytes",
            )
        if end > MAX_HEADER_BYTES:
            raise self.invalid(
                f"has a header of more than {MAX_HEADER_BYTES} bytes, in {what}", expected=f"{MAX_HEADER_BYTES}"
            )
        wanted = min(max(end, 2 * len(self._data), _FIRST_READ_BYTES), self.file_size, MAX_HEADER_BYTES)
        while len(self._data) < wanted:
            part = os.pread(self._descriptor, wanted - len(self._data), len(self._data))
            if not part:
                raise self.invalid("became shorter while it was read")
            self._data += part


def _parse(reader: _Reader) -> tuple[int, Mapping[str, MetadataValue], tuple[GgufTensor, ...]]:
    version = _read_version(reader)
    num_tensors = reader.integer("<Q", "the number of tensors")
    num_entries = reader.integer("<Q", "the number of metadata entries")
    metadata = _read_metadata(reader, num_entries)
    alignment = metadata.get("general.alignment", 32)
    good = isinstance(alignment, int) and not isinstance(alignment, bool) and 8 <= alignment <= 1 << 20
    if not good or alignment & (alignment - 1):  # type: ignore[operator]
        raise reader.invalid(f"has the alignment {alignment!r}", expected="a power of two from 8 to 1048576")
    infos = _read_tensor_infos(reader, num_tensors)
    data_start = _align(reader.position, int(alignment))  # type: ignore[arg-type]
    tensors = tuple(
        GgufTensor(name, dtype, shape, data_start + offset, num_bytes)
        for name, dtype, shape, offset, num_bytes in sorted(infos, key=lambda info: info[3])
    )
    _check_layout(reader, tensors, data_start, int(alignment))  # type: ignore[arg-type]
    return version, metadata, tensors


def _read_version(reader: _Reader) -> int:
    head = reader.need(min(reader.file_size, 256), "the magic number")
    if not head.startswith(b"GGUF"):
        foreign = foreign_file_error(reader.path, head[:256], "GGUF")
        raise foreign or reader.invalid("is not a GGUF file", expected="GGUF", found=repr(head[:4]))
    reader.position = 4
    version = reader.integer("<I", "the version")
    if version not in (2, 3):
        kind = "big-endian" if version and version & 0xFFFF == 0 else f"version {version}"
        raise CheckpointError(
            "unsupported",
            f"{reader.path} is a GGUF file of {kind}",
            "convert the model again with a current llama.cpp",
            file=reader.path,
            expected="version 2 or 3, little-endian",
            found=kind,
        )
    return version


def _read_metadata(reader: _Reader, count: int) -> dict[str, MetadataValue]:
    metadata: dict[str, MetadataValue] = {}
    for _ in range(count):
        key = reader.text("a metadata key")
        if key in metadata:
            raise reader.invalid(f"has the metadata key {key[:100]!r} twice")
        kind = reader.integer("<I", f"the type of {key[:100]}")
        metadata[key] = _read_value(reader, kind, key[:100])
    return metadata


def _read_value(reader: _Reader, kind: int, key: str) -> MetadataValue:
    layout = _SCALARS.get(kind)
    if layout is not None:
        return reader.scalar(layout, key)
    if kind == _BOOL:
        return reader.integer("<B", key) != 0
    if kind == _STRING:
        return reader.text(key)
    if kind == _ARRAY:
        return _read_array(reader, key)
    raise reader.invalid(f"gives {key!r} a value of the unknown type {kind}", found=str(kind))


def _read_array(reader: _Reader, key: str) -> MetadataValue:
    kind = reader.integer("<I", key)
    count = reader.integer("<Q", key)
    if kind == _STRING:
        reader.need(8 * count, key)
        return reader.strings(count, key)
    if kind == _BOOL:
        return [byte != 0 for byte in reader.take(count, key)]
    layout = _SCALARS.get(kind)
    if layout is None:
        raise reader.invalid(f"gives {key!r} an array of the unknown type {kind}", found=str(kind))
    values: array[int] | array[float] = array(layout[1:])
    values.frombytes(reader.take(count * struct.calcsize(layout), key))
    if sys.byteorder == "big":
        values.byteswap()
    return values


def _read_tensor_infos(reader: _Reader, count: int) -> list[tuple[str, str, tuple[int, ...], int, int]]:
    infos = []
    seen: set[str] = set()
    for _ in range(count):
        name = reader.text("a tensor name")
        if name in seen:
            raise reader.invalid(f"has the tensor {name[:100]!r} twice")
        seen.add(name)
        num_dims = reader.integer("<I", f"tensor {name[:100]}")
        if not 1 <= num_dims <= 4:
            raise reader.invalid(f"gives tensor {name[:100]!r} {num_dims} dimensions", expected="1 to 4")
        dims = struct.unpack(f"<{num_dims}Q", reader.take(8 * num_dims, f"tensor {name[:100]}"))
        kind = reader.integer("<I", f"tensor {name[:100]}")
        offset = reader.integer("<Q", f"tensor {name[:100]}")
        dtype, num_bytes = _storage(reader, name, dims, kind)
        infos.append((name, dtype, tuple(reversed(dims)), offset, num_bytes))
    return infos


def _storage(reader: _Reader, name: str, dims: tuple[int, ...], kind: int) -> tuple[str, int]:
    if kind not in GGML_TYPES:
        found = _UNSUPPORTED_TYPES.get(kind, f"number {kind}")
        raise CheckpointError(
            "unsupported",
            f"{reader.path}: tensor {name[:100]!r} has the type {found}, which is not supported",
            "use a file with one of " + ", ".join(known[0] for known in GGML_TYPES.values()),
            file=reader.path,
            tensor=name,
            found=found,
        )
    dtype, block_values, block_bytes = GGML_TYPES[kind]
    if any(not 0 < size < _MAX_DIMENSION for size in dims) or dims[0] % block_values:
        raise reader.invalid(
            f"gives tensor {name[:100]!r} the dimensions {list(dims)}",
            expected=f"positive, the first a multiple of {block_values}",
        )
    return dtype, prod(dims) // block_values * block_bytes


def _check_layout(reader: _Reader, tensors: tuple[GgufTensor, ...], data_start: int, alignment: int) -> None:
    """Tensors follow each other, each padded to the alignment; padding after the last may be left out."""
    position = end = data_start
    for tensor in tensors:
        if tensor.offset != position:
            raise CheckpointError(
                "invalid",
                f"{reader.path} is laid out wrongly: tensor {tensor.name[:100]!r} is not behind the one before it",
                "download the file again",
                file=reader.path,
                tensor=tensor.name,
                expected=f"offset {position - data_start}",
                found=f"offset {tensor.offset - data_start}",
            )
        end = tensor.offset + tensor.num_bytes
        position = _align(end, alignment)
    if not tensors:
        raise reader.invalid("holds no tensors", expected="at least one tensor")
    size = reader.file_size
    if size < end:
        raise reader.invalid(
            f"is truncated: {end - size} bytes are missing", expected=f"{end} bytes", found=f"{size} bytes"
        )
    if size not in (end, position):
        raise reader.invalid(
            f"has {size - end} bytes too many at its end", expected=f"{end} bytes", found=f"{size} bytes"
        )


def _align(position: int, alignment: int) -> int:
    return position + (-position) % alignment
