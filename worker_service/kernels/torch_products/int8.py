"""Integers of 8 bits: times inputs that are rounded to such too, or widened, where inputs are not rounded."""

import torch
from torch import Tensor
from torch.nn import functional

from loader.quantised.activations import Activation
from loader.quantised.packed import Packed, ScaledGrid
from worker_service.kernels.layout import rounded_up
from worker_service.kernels.quantised import input_codes, tile_rows
from worker_service.kernels.torch_products.product import ProductKind, Target, filled, lacks, row_scales

# What cuBLAS asks of sizes, and how many rows it wants at least.
_MULTIPLE = 8
_FEWEST_ROWS = 17
_ROWS_INSTEAD = 32


class Int8Product:
    """Sums of products of integers, exact in 32 bits, times the scales of token and row."""

    def __init__(self, weight: Packed, bias: Tensor | None) -> None:
        assert isinstance(weight, ScaledGrid) and weight.activation is not None
        num_outputs, num_inputs = weight.shape
        self._activation: Activation = weight.activation
        self._input_scale = weight.input_scale
        self._values = filled(weight.values, rounded_up(num_outputs, _MULTIPLE), rounded_up(num_inputs, _MULTIPLE))
        self._scales = row_scales(weight)
        self._bias = bias

    @property
    def num_bytes(self) -> int:
        """See TorchProduct."""
        return self._values.nbytes + self._scales.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """See TorchProduct."""
        num_rows = x.shape[0]
        codes, scales = input_codes(x.float(), self._activation, self._input_scale)
        padded = num_rows if num_rows >= _FEWEST_ROWS else _ROWS_INSTEAD
        whole = filled(codes.to(torch.int8), padded, self._values.shape[1])
        sums = torch._int_mm(whole, self._values.t())[:num_rows, : len(self._scales)]
        result = sums.float().mul_(scales).mul_(self._scales)
        if self._bias is not None:
            result.add_(self._bias)
        return result.to(x.dtype)


class WidenedProduct:
    """Weights alone: integers are multiplied in the type of x, which holds them exactly, a few rows of the weight at a
    time, and sums are scaled."""

    def __init__(self, weight: Packed, bias: Tensor | None) -> None:
        assert isinstance(weight, ScaledGrid)
        self._values = weight.values
        self._scales = row_scales(weight)
        self._bias = bias
        self._tile_rows = tile_rows(weight)

    @property
    def num_bytes(self) -> int:
        """See TorchProduct."""
        return self._values.nbytes + self._scales.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """See TorchProduct."""
        num_outputs = len(self._scales)
        result = torch.empty((x.shape[0], num_outputs), dtype=x.dtype, device=x.device)
        for start in range(0, num_outputs, self._tile_rows):
            tile = slice(start, start + self._tile_rows)
            part = functional.linear(x, self._values[tile].to(x.dtype)) * self._scales[tile]
            result[:, tile] = part if self._bias is None else part + self._bias[tile]
        return result


def _has_row_scales(weight: Packed) -> bool:
    return isinstance(weight, ScaledGrid) and weight.values.dtype == torch.int8 and weight.scales.shape[1] == 1


def _is_rounded(weight: Packed) -> bool:
    activation = weight.activation if isinstance(weight, ScaledGrid) else None
    return activation is not None and activation.kind == "int8" and activation.group_size is None


def _is_weight_alone(weight: Packed) -> bool:
    return isinstance(weight, ScaledGrid) and weight.activation is None


def _refusal(_weight: Packed, target: Target) -> str | None:
    return lacks(target, "_int_mm", (7, 5))


def _widened_refusal(_weight: Packed, target: Target) -> str | None:
    if target.dtype != torch.bfloat16:
        return f"sums of integers may be too large, or too coarse, for {target.dtype}"
    return None


INT8 = ProductKind(
    "int8 by _int_mm", lambda weight: _has_row_scales(weight) and _is_rounded(weight), _refusal, Int8Product
)
WIDENED = ProductKind(
    "int8, widened",
    lambda weight: _has_row_scales(weight) and _is_weight_alone(weight),
    _widened_refusal,
    WidenedProduct,
)
