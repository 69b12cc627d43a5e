"""What products with quantised weights by torch's own operators have in common."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from loader.quantised.packed import Packed, ScaledGrid


@dataclass(frozen=True, slots=True)
class Target:
    """Where products are computed: the kind of device, its compute capability, and the type of inputs and results."""

    device_type: str
    capability: tuple[int, int]
    dtype: torch.dtype


class TorchProduct(Protocol):
    """x [rows, in] -> x @ weight.T + bias [rows, out], in the type of x; asks the device for no values."""

    @property
    def num_bytes(self) -> int:
        """What it holds of the weight."""
        ...

    def __call__(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class ProductKind:
    """A way to compute products with weights of one form.

    `is_for` tells whether a weight has the form, and `refusal` why one that has is not computed at a target, None where
    it is. `make` makes the product of a weight and a bias; where it `copies`, it lays the values out anew, so that a
    weight that something else needs as it is would be held twice.
    """

    name: str
    is_for: Callable[[Packed], bool]
    refusal: Callable[[Packed, Target], str | None]
    make: Callable[[Packed, Tensor | None], TorchProduct]
    copies: bool = False


def lacks(target: Target, operator: str, least: tuple[int, int]) -> str | None:
    """Why torch, or a device of another compute capability, has no such operator; None where both may have it."""
    if not hasattr(torch, operator):
        return f"this torch has no {operator}"
    if target.capability < least:
        needed, found = (".".join(map(str, version)) for version in (least, target.capability))
        return f"{operator} needs compute capability {needed}, and the device has {found}"
    return None


def row_scales(weight: ScaledGrid) -> Tensor:
    """The scale of each row, float32 [out], of a weight whose rows have one scale each."""
    scales = weight.scales[:, 0].float()
    num_rows = weight.shape[0]
    if len(scales) == num_rows and weight.block_rows == 1:
        return scales
    rows = (weight.first_row + torch.arange(num_rows, device=scales.device)) // weight.block_rows
    return scales.index_select(0, rows) if len(scales) > 1 else scales.repeat(num_rows)


def filled(values: Tensor, num_rows: int, num_columns: int) -> Tensor:
    """A matrix with zeros up to so many rows and columns; itself where it has them."""
    if values.shape == (num_rows, num_columns):
        return values
    return functional.pad(values, (0, num_columns - values.shape[1], 0, num_rows - values.shape[0]))


def packed_bytes(weight: Packed) -> int:
    """What a weight's tensors take."""
    values = (getattr(weight, field.name) for field in fields(weight))
    return sum(value.nbytes for value in values if isinstance(value, Tensor))
