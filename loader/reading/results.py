"""The tensors that a load makes: of which type, from which stored parts, and where the parts belong in them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from loader.byte_runs import BLOCKS, Part, Rows, slice_rows, stored_parts
from loader.checkpoint import Checkpoint
from loader.completeness import missing_tensor
from loader.errors import CheckpointError
from loader.tensors import TensorInfo, WeightSlice

Allocate = Callable[[WeightSlice, torch.dtype], Tensor]

STORED_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}
# What a plain wish for a float type may be stored as; each group of blocks decodes to floats.
_PLAIN_FLOATS = ("F32", "F16", "BF16")
_BLOCK_TYPES = tuple(name for name, (values, _) in BLOCKS.items() if values >= 32)
_CONVERTIBLE = (*_PLAIN_FLOATS, *_BLOCK_TYPES)


@dataclass(frozen=True, slots=True)
class Source:
    """One stored part of a result. `is_same`: its values are in the file as they are in the result."""

    part: Part
    rows: Rows
    is_same: bool

    @property
    def info(self) -> TensorInfo:
        return self.part.info

    @property
    def row_shape(self) -> tuple[int, int]:
        """The part as [rows, values of each], where rotary rows are one each, however they are stored."""
        return prod(self.part.source.part_shape) // max(1, self.rows.keep), self.rows.keep


class Result:
    """One tensor in the making. Its memory is taken when its first bytes are about to be read."""

    def __init__(self, want: WeightSlice, dtype: torch.dtype, sources: Sequence[Source]) -> None:
        self.want = want
        self.dtype = dtype
        self.sources = sources
        self.num_bytes = prod(want.part_shape) * dtype.itemsize
        self.file_bytes = sum(source.rows.runs.num_bytes for source in sources)
        self.unread_bytes = self.file_bytes
        self.tensor: Tensor | None = None
        self._targets: dict[int, Tensor] = {}

    @property
    def position(self) -> tuple[str, int]:
        """Where the first of it lies, by which results are read in the order of the files."""
        if not self.sources:
            return "", 0
        return str(self.sources[0].info.file), self.sources[0].rows.runs.offset

    def open(self, allocate: Allocate) -> None:
        """Takes the memory. Raises ValueError for memory that is none for this tensor."""
        tensor = allocate(self.want, self.dtype)
        if tensor.dtype != self.dtype or tensor.shape != self.want.part_shape or not tensor.is_contiguous():
            raise ValueError(f"{self.want.name} needs a contiguous {self.dtype} {list(self.want.part_shape)}")
        self.tensor = tensor
        for source in self.sources:
            self._targets[id(source)] = self._target(tensor, source.part).view(source.row_shape)

    def target(self, source: Source) -> Tensor:
        """The contiguous memory [rows, values] that a part is put into."""
        return self._targets[id(source)]

    def close(self) -> None:
        """Puts what was read elsewhere into place."""
        assert self.tensor is not None
        for source in self.sources:
            part = source.part
            if _is_apart(part):
                assert part.dim is not None
                place = self.tensor.narrow(part.dim, part.start, part.stop - part.start)
                place.copy_(self._targets[id(source)].view(place.shape))
        self._targets.clear()

    @staticmethod
    def _target(tensor: Tensor, part: Part) -> Tensor:
        if part.dim is None:
            return tensor
        if _is_apart(part):
            return torch.empty(part.source.part_shape, dtype=tensor.dtype)
        return tensor.narrow(part.dim, part.start, part.stop - part.start)


def _is_apart(part: Part) -> bool:
    """Whether a part is read into memory of its own, for its place in the result is not contiguous."""
    return part.dim is not None and part.dim > 0


def plan_results(checkpoint: Checkpoint, wanted: Sequence[WeightSlice], dtype: torch.dtype) -> list[Result]:
    """All results, in the order of `wanted`. Reads nothing.

    Raises CheckpointError for a tensor that is missing, has another shape, is not whole, or is stored in a type that
    does not become `dtype`; ValueError for a name wanted twice.
    """
    if len({want.name for want in wanted}) != len(wanted):
        raise ValueError("a tensor is wanted twice")
    return [_plan(checkpoint, want, dtype) for want in wanted]


def _plan(checkpoint: Checkpoint, want: WeightSlice, dtype: torch.dtype) -> Result:
    info = checkpoint.tensors.get(want.name)
    if info is None:
        raise missing_tensor(checkpoint.path, want.name, want.shape, len(checkpoint.tensors))
    parts = stored_parts(info, want)
    stored = {part.info.dtype for part in parts} or {info.dtype}
    for part in parts:
        _check_type(part.info, want, one_of=stored)
    if want.as_stored:
        if info.dtype in _BLOCK_TYPES:
            parts = [_as_bytes(part) for part in parts]
            want = _wide_as_bytes(info, want)
        name = parts[0].info.dtype if parts else info.dtype
        dtype = STORED_DTYPES.get(name, torch.uint8)
    return Result(want, dtype, list(_sources(parts, dtype)))


def _sources(parts: Sequence[Part], dtype: torch.dtype) -> Iterator[Source]:
    for part in parts:
        rows = slice_rows(part.info, part.source)
        if rows.runs.num_bytes:
            yield Source(part, rows, STORED_DTYPES.get(part.info.dtype) == dtype)


def _check_type(info: TensorInfo, want: WeightSlice, one_of: set[str]) -> None:
    allowed: Sequence[str] = _CONVERTIBLE
    if want.as_stored:
        allowed = want.dtypes or (*STORED_DTYPES, *_BLOCK_TYPES)
        if len(one_of) > 1:
            raise _unsupported(info, f"in pieces of several types: {', '.join(sorted(one_of))}", allowed)
    if info.dtype not in allowed:
        raise _unsupported(info, f"as {info.dtype}", allowed)


def _as_bytes(part: Part) -> Part:
    """A part stored in blocks, as the bytes of its blocks."""
    info = part.info
    shape = _in_bytes(info.shape, info.dtype)
    return replace(
        part,
        info=replace(info, dtype="U8", shape=shape),
        source=_wide_as_bytes(info, part.source),
        **_place_in_bytes(part, info),
    )


def _place_in_bytes(part: Part, info: TensorInfo) -> dict[str, int]:
    if part.dim is None or part.dim != len(info.shape) - 1:
        return {}
    (start,), (stop,) = _in_bytes((part.start,), info.dtype), _in_bytes((part.stop,), info.dtype)
    return {"start": start, "stop": stop}


def _wide_as_bytes(info: TensorInfo, want: WeightSlice) -> WeightSlice:
    start, stop = want.start, want.stop
    if want.dim == len(want.shape) - 1:
        block_values, _ = BLOCKS[info.dtype]
        if start % block_values or stop % block_values:
            raise _unsupported(info, f"in blocks of {block_values}, which {start}:{stop} cuts", ())
        (start,), (stop,) = _in_bytes((start,), info.dtype), _in_bytes((stop,), info.dtype)
    return replace(want, shape=_in_bytes(want.shape, info.dtype), start=start, stop=stop)


def _in_bytes(shape: tuple[int, ...], dtype: str) -> tuple[int, ...]:
    block_values, block_bytes = BLOCKS[dtype]
    return (*shape[:-1], shape[-1] // block_values * block_bytes)


def _unsupported(info: TensorInfo, how: str, allowed: Sequence[str]) -> CheckpointError:
    remedy = f"use a model stored as one of {', '.join(allowed)}" if allowed else "divide it over fewer ranks"
    return CheckpointError(
        "unsupported",
        f"{info.file}: tensor {info.name!r} is stored {how}",
        remedy,
        file=info.file,
        tensor=info.name,
        expected=", ".join(allowed) or None,
        found=info.dtype,
    )
