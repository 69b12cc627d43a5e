"""Which bytes of which files a slice of a tensor occupies. Pure functions; imports no torch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from loader.completeness import missing_tensor, wrong_shape
from loader.gguf_format import GGML_TYPES
from loader.tensors import TensorInfo, WeightSlice

_BLOCKS = {name: (block_values, block_bytes) for name, block_values, block_bytes in GGML_TYPES.values()}


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


def byte_runs(info: TensorInfo, want: WeightSlice) -> ByteRuns:
    """Where in its file a slice lies: the fewest bytes from which it can be decoded.

    Blocks of quantised values are taken whole, and so are the heads whose rows are stored pairwise. Raises
    CheckpointError where the stored tensor has another shape than the slice supposes.
    """
    if info.shape != want.shape:
        raise wrong_shape(info, want.shape)
    block_values, block_bytes = _BLOCKS[info.dtype]
    if want.dim is None:
        return ByteRuns(info.file, info.offset, info.num_bytes, info.num_bytes, 1)
    inner, period = prod(want.shape[want.dim + 1 :]), prod(want.shape[want.dim :])
    unit = block_values
    if want.dim == 0 and info.rotary_heads is not None:
        unit = max(unit, inner * (want.shape[0] // info.rotary_heads))
    first, last = want.start * inner, want.stop * inner
    if first < last:
        first, last = first - first % unit, last + -last % unit

    def in_bytes(num_values: int) -> int:
        return num_values // block_values * block_bytes

    count, run, stride = prod(want.shape[: want.dim]), in_bytes(last - first), in_bytes(period)
    start = info.offset + in_bytes(first)
    if run == stride:
        return ByteRuns(info.file, start, run * count, run * count, 1)
    return ByteRuns(info.file, start, run, stride, count)


def rank_byte_runs(path: Path, tensors: Mapping[str, TensorInfo], wanted: list[WeightSlice]) -> list[ByteRuns]:
    """Where all `wanted` slices of the checkpoint at `path` lie, ordered by file and offset.

    Raises CheckpointError for a tensor that is missing or has another shape.
    """
    runs = []
    for want in wanted:
        info = tensors.get(want.name)
        if info is None:
            raise missing_tensor(path, want.name, want.shape, len(tensors))
        runs.append(byte_runs(info, want))
    return sorted(runs, key=lambda run: (str(run.file), run.offset))
