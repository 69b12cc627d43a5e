"""Quantising unquantised weights while they are read: rounding to nearest, without any data to calibrate by.

Inputs are not rounded: without calibration that costs quality and, where products are not computed in 8 bits, gains
nothing.
"""

import torch
from torch import Tensor

from loader.quantised.bits import pack_rows, row_bytes
from loader.quantised.packed import GroupedInts, Packed, ScaledGrid
from loader.quantised.roundings import INT4_GROUP, Rounding

FP8_MAX = 448.0
_INT8_MAX = 127.0
# Rows are rounded so many values at a time: each step of it makes a copy in float32.
_TILE_VALUES = 1 << 20


def rounded_weight(weight: Tensor, rounding: Rounding) -> Packed:
    """A weight [out, in] rounded to nearest.

    "int8" and "fp8" have a float32 scale a row, "int4" a bfloat16 scale and a zero point for each 32 inputs of a row.
    """
    rows, columns = weight.shape
    tile = max(1, _TILE_VALUES // columns)
    if rounding == "int4":
        num_groups = -(-columns // INT4_GROUP)
        words = torch.empty((rows, row_bytes(columns, 4)), dtype=torch.uint8)
        group_scales = torch.empty((rows, num_groups), dtype=torch.bfloat16)
        zeros = torch.empty((rows, num_groups), dtype=torch.uint8)
        for start in range(0, rows, tile):
            part = slice(start, start + tile)
            words[part], group_scales[part], zeros[part] = _rounded_int4(weight[part].float())
        return GroupedInts(words, group_scales, zeros, None, 4, columns, INT4_GROUP)
    values = torch.empty((rows, columns), dtype=torch.int8 if rounding == "int8" else torch.float8_e4m3fn)
    scales = torch.empty((rows, 1), dtype=torch.float32)
    for start in range(0, rows, tile):
        part = slice(start, start + tile)
        values[part], scales[part] = _rounded_8_bit(weight[part].float(), rounding)
    return ScaledGrid(values, scales, None, block_rows=1, block_columns=columns)


def _rounded_8_bit(values: Tensor, rounding: Rounding) -> tuple[Tensor, Tensor]:
    """The rows' values, and their scales [rows, 1]."""
    largest = values.abs().amax(dim=1, keepdim=True)
    scales = torch.where(largest > 0, largest, 1.0) / (_INT8_MAX if rounding == "int8" else FP8_MAX)
    scaled = values / scales
    if rounding == "int8":
        return scaled.round_().clamp_(-_INT8_MAX, _INT8_MAX).to(torch.int8), scales
    return scaled.clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scales


def _rounded_int4(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The rows' values, packed, and the scales and zero points of their groups [rows, groups]."""
    rows, columns = values.shape
    num_groups = -(-columns // INT4_GROUP)
    # Zeros, which every group can hold, at the end of a row that does not fill its groups.
    padded = torch.nn.functional.pad(values, (0, num_groups * INT4_GROUP - columns))
    groups = padded.view(rows, num_groups, INT4_GROUP)
    low, high = groups.amin(dim=2).clamp(max=0), groups.amax(dim=2).clamp(min=0)
    scales = ((high - low) / 15).to(torch.bfloat16)
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    wide = scales.float().unsqueeze(2)
    zeros = (-low / wide[..., 0]).round_().clamp_(0, 15)
    rounded = (groups / wide).round_().add_(zeros.unsqueeze(2)).clamp_(0, 15).to(torch.uint8)
    words = pack_rows(rounded.view(rows, -1)[:, :columns].contiguous(), 4)
    return words, scales, zeros.to(torch.uint8)
