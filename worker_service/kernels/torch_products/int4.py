"""Weights alone, integers of 4 bits in groups, times bfloat16."""

import torch
from torch import Tensor
from torch.nn import functional

from loader.quantised.packed import GroupedInts, Packed
from worker_service.kernels.layout import rounded_up
from worker_service.kernels.quantised import tile_rows
from worker_service.kernels.torch_products.int4_layout import (
    MULTIPLE,
    Places,
    operator_words,
    places_of,
    scales_and_zeros,
    tile_order,
    values_of_words,
)
from worker_service.kernels.torch_products.product import ProductKind, Target, lacks

# For every 16 rows of x the operator takes the weight apart anew; beyond, it is better made whole once.
MOST_ROWS = 256


class Int4Product:
    """The operator for few rows; for many the weight is made whole out of the operator's layout, a tile at a time."""

    def __init__(self, weight: Packed, bias: Tensor | None) -> None:
        """Raises ValueError for groups that the operator does not have."""
        assert isinstance(weight, GroupedInts)
        places = places_of(weight)
        self._num_outputs = weight.shape[0]
        self._places: Places = places
        self._words = operator_words(weight, places)
        self._scales_and_zeros = scales_and_zeros(weight, places)
        self._tile_order = tile_order(places.inner_tiles, weight.words.device)
        self._tile_rows = rounded_up(tile_rows(weight), MULTIPLE)
        self._bias = bias

    @property
    def num_bytes(self) -> int:
        """See TorchProduct."""
        order = 0 if self._places.order is None else self._places.order.nbytes
        return self._words.nbytes + self._scales_and_zeros.nbytes + order

    def __call__(self, x: Tensor) -> Tensor:
        """See TorchProduct."""
        inputs = self._places.inputs(x)
        if x.shape[0] <= MOST_ROWS:
            sums = torch._weight_int4pack_mm(inputs, self._words, self._places.group_size, self._scales_and_zeros)
            result = sums[:, : self._num_outputs]
            return (result if self._bias is None else result + self._bias).contiguous()
        result = torch.empty((x.shape[0], self._num_outputs), dtype=x.dtype, device=x.device)
        for start in range(0, self._num_outputs, self._tile_rows):
            stop = min(start + self._tile_rows, self._num_outputs)
            whole = self._dequantised(start, rounded_up(stop, MULTIPLE))[: stop - start]
            bias = None if self._bias is None else self._bias[start:stop]
            result[:, start:stop] = functional.linear(inputs, whole, bias)
        return result

    def _dequantised(self, start: int, stop: int) -> Tensor:
        """The rows [start, stop), multiples of the operator's, as bfloat16 [rows, places]."""
        values = values_of_words(self._words[start // MULTIPLE : stop // MULTIPLE], self._tile_order)
        groups = self._scales_and_zeros[:, start:stop].float()
        scales, zeros = (part.t().unsqueeze(2) for part in groups.unbind(2))
        by_group = values.view(values.shape[0], -1, self._places.group_size).float()
        return by_group.sub_(8).mul_(scales).add_(zeros).view(values.shape).bfloat16()


def _is_for(weight: Packed) -> bool:
    return isinstance(weight, GroupedInts) and weight.bits == 4


def _refusal(weight: Packed, target: Target) -> str | None:
    if target.dtype != torch.bfloat16:
        return f"_weight_int4pack_mm computes bfloat16, and no {target.dtype}"
    assert isinstance(weight, GroupedInts)
    try:
        places_of(weight)
    except ValueError as error:
        return str(error)
    return lacks(target, "_convert_weight_to_int4pack", (8, 0)) or lacks(target, "_weight_int4pack_mm", (8, 0))


INT4 = ProductKind("int4 by _weight_int4pack_mm", _is_for, _refusal, Int4Product, copies=True)
