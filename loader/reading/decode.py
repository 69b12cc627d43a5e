"""From bytes in a read buffer to values in their place."""

import torch
from torch import Tensor

from loader.byte_runs import BLOCKS
from loader.dequantise import dequantise
from loader.errors import CheckpointError
from loader.reading.extents import Fragment
from loader.reading.results import STORED_DTYPES, Source
from loader.reading.tuning import DECODE_VALUES as _STEP_VALUES
from loader.tensors import TensorInfo


def place(fragment: Fragment, raw: Tensor, target: Tensor) -> None:
    """Decodes a fragment. `raw` is uint8, the bytes of its file from its start to its stop; `target` is all of its
    part, [rows, values], on any device.

    Raises CheckpointError for a value that float16 cannot hold.
    """
    if fragment.is_rows:
        _place_rows(fragment, raw, target)
    else:
        _place_values(fragment, raw, target)


def _place_values(fragment: Fragment, raw: Tensor, target: Tensor) -> None:
    """Values of one row, which begin and end with whole blocks."""
    source = fragment.source
    block_values, block_bytes = BLOCKS[source.info.dtype]
    row, rows = target[fragment.row], source.rows
    if source.is_same:
        row[fragment.low - rows.skip : fragment.high - rows.skip].copy_(_typed(raw, source.info), non_blocking=True)
        return
    step = _STEP_VALUES // block_values * block_values
    for low in range(fragment.low, fragment.high, step):
        high = min(low + step, fragment.high)
        first = (low - fragment.low) // block_values * block_bytes
        piece = raw[first : first + (high - low) // block_values * block_bytes]
        begin, end = max(low, rows.skip), min(high, rows.skip + rows.keep)
        if (begin, end) == (low, high) and row.device.type == "cpu":
            values = row[begin - rows.skip : end - rows.skip]
            dequantise(_aligned(piece, source.info), source.info.dtype, values)
        elif begin < end:
            values = torch.empty(high - low, dtype=target.dtype)
            dequantise(_aligned(piece, source.info), source.info.dtype, values)
            values = values[begin - low : end - low]
            row[begin - rows.skip : end - rows.skip].copy_(values, non_blocking=True)
        else:
            continue
        _check_range(values, source.info)


def _place_rows(fragment: Fragment, raw: Tensor, target: Tensor) -> None:
    """Whole rows as stored, with what lies between them."""
    source = fragment.source
    rows, runs = source.rows, source.rows.runs
    bytes_2d = raw.as_strided((fragment.num_rows, runs.run_bytes), (runs.stride_bytes, 1))
    step = max(1, _STEP_VALUES // max(1, rows.run_values))
    for first in range(0, fragment.num_rows, step):
        last = min(first + step, fragment.num_rows)
        values = _decoded(bytes_2d[first:last], source, target.dtype)[:, rows.skip : rows.skip + rows.keep]
        _put_rows(source, values, fragment.row + first, target)
        _check_range(values, source.info)


def _decoded(rows: Tensor, source: Source, dtype: torch.dtype) -> Tensor:
    """uint8 [rows, bytes], in any strides, -> values [rows, values] of `dtype`; the same memory if it can be."""
    info = source.info
    if source.is_same:
        size = dtype.itemsize
        if rows.storage_offset() % size == 0 and rows.stride(0) % size == 0 and rows.shape[1] % size == 0:
            return rows.view(dtype)
        return rows.clone(memory_format=torch.contiguous_format).view(dtype)
    values = torch.empty((rows.shape[0], source.rows.run_values), dtype=dtype)
    dequantise(_aligned(rows.contiguous().view(-1), info), info.dtype, values)
    return values


def _put_rows(source: Source, values: Tensor, first: int, target: Tensor) -> None:
    """Puts rows that are stored from row `first` of the part on where they belong in it."""
    heads = source.info.rotary_heads
    if heads is None:
        target[first : first + values.shape[0]].copy_(values, non_blocking=True)
        return
    # llama GGUFs store the two halves of each head's rows alternately; Hugging Face one after the other.
    size = source.info.shape[0] // heads
    begin = source.part.source.start if source.part.source.dim == 0 else 0
    row = torch.arange(values.shape[0]) + source.rows.first + first
    position = row % size
    at = row - position + position % 2 * (size // 2) + position // 2 - begin
    is_wanted = (at >= 0) & (at < target.shape[0])
    target.index_copy_(0, at[is_wanted].to(target.device), values[is_wanted].to(target.device))


def _typed(raw: Tensor, info: TensorInfo) -> Tensor:
    return _aligned(raw, info).view(STORED_DTYPES[info.dtype])


def _aligned(raw: Tensor, info: TensorInfo) -> Tensor:
    """`raw` where torch can see it as values of its type; files may lay out tensors at odd places."""
    dtype = STORED_DTYPES.get(info.dtype, torch.uint8)
    return raw if raw.storage_offset() % dtype.itemsize == 0 else raw.clone()


def _check_range(values: Tensor, info: TensorInfo) -> None:
    """float16 ends at 65504: a larger value would become infinite, and the model nonsense."""
    if values.dtype != torch.float16 or info.dtype == "F16" or bool(torch.isfinite(values).all()):
        return
    raise CheckpointError(
        "unsupported",
        f"{info.file}: tensor {info.name!r} has values that float16 cannot hold",
        "load the model as bfloat16 or float32",
        file=info.file,
        tensor=info.name,
        expected="at most 65504",
    )
