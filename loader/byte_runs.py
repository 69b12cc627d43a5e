"""Which bytes of which files a slice of a tensor occupies. Pure functions; imports no torch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import gcd, prod
from pathlib import Path

from loader.completeness import missing_tensor, wrong_shape
from loader.errors import CheckpointError
from loader.gguf_format import GGML_TYPES
from loader.safetensors_format import DTYPE_BITS
from loader.tensors import Piece, TensorInfo, WeightSlice

# Storage type -> the values and the bytes of the smallest group of whole bytes.
BLOCKS: Mapping[str, tuple[int, int]] = {
    **{name: (8 // gcd(bits, 8), bits // gcd(bits, 8)) for name, bits in DTYPE_BITS.items()},
    **{name: (block_values, block_bytes) for name, block_values, block_bytes in GGML_TYPES.values()},
}


@dataclass(frozen=True, slots=True)
class ByteRuns:
    """`count` runs of `run_bytes` each in `file`, whose starts lie `stride_bytes` apart, from `offset` on."""

    file: Path
    offset: int
    run_bytes: int
    stride_bytes: int
    count: int

    @property
    def num_bytes(self) -> int:
        """Bytes of all runs together."""
        return self.run_bytes * self.count

    @property
    def ranges(self) -> Iterator[tuple[int, int]]:
        """Start and stop of each run, in the order of the file."""
        for number in range(self.count):
            start = self.offset + number * self.stride_bytes
            yield start, start + self.run_bytes


@dataclass(frozen=True, slots=True)
class Rows:
    """Runs in which the values of a slice lie, and which of the values are wanted.

    Each run holds `run_values` values, of which those in `[skip, skip + keep)` are wanted. Only where rotary rows
    are stored pairwise is a run a row of the stored tensor, from row `first` on, that belongs elsewhere.
    """

    runs: ByteRuns
    run_values: int
    skip: int
    keep: int
    first: int = 0


@dataclass(frozen=True, slots=True)
class Part:
    """What one stored tensor holds of a wanted slice: `source` of `info`, at `[start, stop)` along `dim` of the result.

    It is the whole result where `dim` is None.
    """

    info: TensorInfo
    source: WeightSlice
    dim: int | None = None
    start: int = 0
    stop: int = 0


def stored_parts(info: TensorInfo, want: WeightSlice) -> list[Part]:
    """The stored tensors that hold `want`: `info` itself or, where it is stored in pieces, what they have of it.

    A piece that lies within others is left aside. Raises CheckpointError where the tensor, or a piece, has another
    shape than the slice supposes, and where the pieces do not join one another from the first index to the last.
    """
    if info.shape != want.shape:
        raise wrong_shape(info, want.shape)
    if not info.pieces:
        return [Part(info, want)]
    dim = info.pieces[0].dim
    begin, end = (want.start, want.stop) if want.dim == dim else (0, want.shape[dim])
    parts, covered = [], 0
    for piece in sorted(info.pieces, key=lambda piece: (piece.start, piece.stop)):
        _check_piece(info, piece, dim)
        if piece.stop <= covered:
            continue
        if piece.start != covered:
            break
        covered = piece.stop
        start, stop = max(begin, piece.start), min(end, piece.stop)
        if start >= stop:
            continue
        low, high = (start - piece.start, stop - piece.start) if want.dim == dim else (want.start, want.stop)
        source = replace(want, shape=piece.info.shape, start=low, stop=high)
        parts.append(Part(piece.info, source, dim, start - begin, stop - begin))
    if covered != want.shape[dim]:
        raise _not_covered(info, dim, covered)
    return parts


def slice_rows(info: TensorInfo, want: WeightSlice) -> Rows:
    """Where in its file a slice of a tensor stored in one place lies: the fewest bytes it can be decoded from.

    Blocks of quantised values are taken whole, and so are the heads whose rows are stored pairwise. Raises
    CheckpointError where the stored tensor has another shape than the slice supposes.
    """
    if info.shape != want.shape:
        raise wrong_shape(info, want.shape)
    block_values, block_bytes = BLOCKS[info.dtype]
    dim = want.dim or 0
    first, last = (want.start, want.stop) if want.dim is not None else (0, prod(want.shape[:1]))
    inner, period = prod(want.shape[dim + 1 :]), prod(want.shape[dim:])
    count = prod(want.shape[:dim])

    def in_bytes(num_values: int) -> int:
        return num_values // block_values * block_bytes

    if dim == 0 and info.rotary_heads is not None:
        if first < last:
            first, last = _whole(first, last, want.shape[0] // info.rotary_heads)
        run = in_bytes(inner)
        return Rows(ByteRuns(info.file, info.offset + first * run, run, run, last - first), inner, 0, inner, first)
    low, high = first * inner, last * inner
    begin, end = _whole(low, high, block_values) if low < high else (low, low)
    runs = ByteRuns(info.file, info.offset + in_bytes(begin), in_bytes(end - begin), in_bytes(period), count)
    if count > 1 and info.rotary_heads is None and (begin, end) == (low, high) == (0, period):
        runs = ByteRuns(info.file, info.offset, info.num_bytes, info.num_bytes, 1)
        return Rows(runs, period * count, 0, period * count)
    return Rows(runs, end - begin, low - begin, high - low)


def byte_runs(info: TensorInfo, want: WeightSlice) -> ByteRuns:
    """Where a slice of a tensor stored in one place lies. Raises like `slice_rows`."""
    runs = slice_rows(info, want).runs
    if runs.count == 1 or runs.run_bytes == runs.stride_bytes:
        return ByteRuns(runs.file, runs.offset, runs.num_bytes, runs.num_bytes, 1)
    return runs


def rank_byte_runs(path: Path, tensors: Mapping[str, TensorInfo], wanted: list[WeightSlice]) -> list[ByteRuns]:
    """Where all `wanted` slices of the checkpoint at `path` lie, ordered by file and offset.

    Raises CheckpointError for a tensor that is missing or has another shape, or whose pieces leave out some of it.
    """
    runs: list[ByteRuns] = []
    for want in wanted:
        info = tensors.get(want.name)
        if info is None:
            raise missing_tensor(path, want.name, want.shape, len(tensors))
        runs.extend(byte_runs(part.info, part.source) for part in stored_parts(info, want))
    return sorted(runs, key=lambda run: (str(run.file), run.offset))


def _whole(first: int, last: int, unit: int) -> tuple[int, int]:
    return first - first % unit, last + -last % unit


def _check_piece(info: TensorInfo, piece: Piece, dim: int) -> None:
    shape = (*info.shape[:dim], piece.stop - piece.start, *info.shape[dim + 1 :])
    if piece.dim != dim or piece.info.pieces:
        raise ValueError(f"the pieces of {info.name} do not lie one after the other")
    if piece.info.shape != shape:
        raise wrong_shape(piece.info, shape)


def _not_covered(info: TensorInfo, dim: int, covered: int) -> CheckpointError:
    return CheckpointError(
        "invalid",
        f"{info.file}: the pieces of tensor {info.name!r} with shape {list(info.shape)} do not join at index {covered} "
        f"of dimension {dim}",
        "check that no file of the checkpoint is missing",
        file=info.file,
        tensor=info.name,
        expected=f"pieces that join up to {info.shape[dim]}",
        found=f"pieces that join up to {covered}",
    )
