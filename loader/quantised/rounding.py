"""Quantising unquantised weights while they are read: rounding to nearest, without any data to calibrate by.

Inputs are not rounded: without calibration that costs quality and, where products are not computed in 8 bits, gains
nothing.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from loader.layout import Linear
from loader.quantised.bits import pack_rows
from loader.quantised.packed import GroupedInts, Packed, ScaledGrid
from loader.shares import Share

Rounding = Literal["int8", "int4", "fp8"]
ROUNDINGS: tuple[Rounding, ...] = get_args(Rounding)
INT4_GROUP = 32
FP8_MAX = 448.0
_INT8_MAX = 127.0


def is_rounded(part: Linear) -> bool:
    """Whether a product is among those that are rounded: the projections of attention and MLPs.

    The output layer and the routers of experts are not: they are small, and errors there decide what is chosen.
    """
    return part.name.endswith("_proj")


def rounded_weight(weight: Tensor, rounding: Rounding) -> Packed:
    """A weight [out, in] rounded to nearest.

    "int8" and "fp8" have a float32 scale a row, "int4" a bfloat16 scale and a zero point for each 32 inputs of a row.
    """
    values = weight.float()
    if rounding == "int4":
        return _rounded_int4(values)
    largest = values.abs().amax(dim=1, keepdim=True)
    scales = torch.where(largest > 0, largest, 1.0) / (_INT8_MAX if rounding == "int8" else FP8_MAX)
    scaled = values / scales
    if rounding == "int8":
        rounded = scaled.round().clamp(-_INT8_MAX, _INT8_MAX).to(torch.int8)
    else:
        rounded = scaled.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return ScaledGrid(rounded, scales, None, block_rows=1, block_columns=weight.shape[1])


def _rounded_int4(values: Tensor) -> GroupedInts:
    rows, columns = values.shape
    num_groups = -(-columns // INT4_GROUP)
    # Zeros, which every group can hold, at the end of a row that does not fill its groups.
    padded = torch.nn.functional.pad(values, (0, num_groups * INT4_GROUP - columns))
    groups = padded.view(rows, num_groups, INT4_GROUP)
    low, high = groups.amin(dim=2).clamp(max=0), groups.amax(dim=2).clamp(min=0)
    scales = ((high - low) / 15).to(torch.bfloat16)
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    wide = scales.float().unsqueeze(2)
    zeros = (-low / wide[..., 0]).round().clamp(0, 15)
    rounded = ((groups / wide).round() + zeros.unsqueeze(2)).clamp(0, 15).to(torch.uint8)
    words = pack_rows(rounded.view(rows, -1)[:, :columns].contiguous(), 4)
    return GroupedInts(words, scales, zeros.to(torch.uint8), None, 4, columns, INT4_GROUP)


def rounded_bytes(outputs: Share, inputs: Share, rounding: Rounding) -> int:
    """Bytes that a rank's share of a rounded weight takes."""
    rows, columns = len(outputs), len(inputs)
    if rounding == "int4":
        return rows * (-(-columns // 2) + 3 * -(-columns // INT4_GROUP))
    return rows * (columns + 4)
