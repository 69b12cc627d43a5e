"""Matrix products with a weight that is kept quantised: it is made whole a few rows at a time, never all of it."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from loader.quantised.activations import Activation
from loader.quantised.packed import Packed, ScaledGrid
from worker_service.kernels.linear import LinearKernel, make_linear

# As many values as a core's cache holds in float32; a GPU needs more to be busy.
_TILE_VALUES = 1 << 19
_GPU_TILE_VALUES = 1 << 26
_INT8_MAX = 127.0
_FP8_MAX = torch.finfo(torch.float8_e4m3fn).max

MakePacked = Callable[[Packed, Tensor | None], LinearKernel]
"""Makes the product with one quantised weight, and a bias."""


class MakeLinear(Protocol):
    """Makes products of one input, one result after the other: x -> [rows, out of all weights]."""

    def __call__(
        self, weights: Sequence[Tensor | Packed], biases: Sequence[Tensor | None], *, is_shared: bool = False
    ) -> LinearKernel:
        """A weight that is shared is needed elsewhere as it is, so that a copy would hold it twice.

        Weights that are not quantised are computed as one where there are no others, and then either all have a bias
        or none has.
        """
        ...


def make_quantised_linear(weight: Packed, bias: Tensor | None = None) -> LinearKernel:
    """A function x -> x @ weight.T + bias, for a quantised weight [out, in].

    Weights alone: they are multiplied in the type of x. Where the format also rounds x, the product is computed in
    float32, as the sum of the products of rounded values times both scales.
    """
    num_outputs = weight.shape[0]
    rows = tile_rows(weight)
    round_input = _rounding(weight)

    def linear(x: Tensor) -> Tensor:
        values = x if round_input is None else round_input(x.float())
        result = torch.empty((x.shape[0], num_outputs), dtype=x.dtype, device=x.device)
        for start in range(0, num_outputs, rows):
            stop = min(start + rows, num_outputs)
            tile = weight.dequantise(start, stop).to(values.dtype)
            part = functional.linear(values, tile)
            result[:, start:stop] = part if bias is None else part + bias[start:stop]
        return result

    return linear


def tile_rows(weight: Packed) -> int:
    """Rows of a weight that are made whole at once where it lies."""
    tile_values = _TILE_VALUES if weight.scales.device.type == "cpu" else _GPU_TILE_VALUES
    return max(1, tile_values // weight.shape[1])


def make_joined_linear(
    weights: Sequence[Tensor | Packed],
    biases: Sequence[Tensor | None],
    *,
    is_shared: bool = False,  # noqa: ARG001 - nothing is copied
    make_packed: MakePacked = make_quantised_linear,
) -> LinearKernel:
    """See MakeLinear; `make_packed` makes the products with quantised weights."""
    plain = [weight for weight in weights if isinstance(weight, Tensor)]
    if len(plain) == len(weights):
        present = [bias for bias in biases if bias is not None]
        return make_linear(_joined(plain), _joined(present) if present else None)
    kernels = [
        make_linear(weight, bias) if isinstance(weight, Tensor) else make_packed(weight, bias)
        for weight, bias in zip(weights, biases, strict=True)
    ]
    if len(kernels) == 1:
        return kernels[0]

    def linear(x: Tensor) -> Tensor:
        return torch.cat([kernel(x) for kernel in kernels], dim=1)

    return linear


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def rounded_input(x: Tensor, activation: Activation, input_scale: Tensor | None, first: int = 0) -> Tensor:
    """float32 [rows, in] -> the same, rounded as the format says, in float32."""
    codes, scales = input_codes(x, activation, input_scale, first)
    return codes * scales


def input_codes(x: Tensor, activation: Activation, input_scale: Tensor | None, first: int = 0) -> tuple[Tensor, Tensor]:
    """float32 [rows, in] -> the rounded values, in float32, and what they are multiplied by: [] where it is static,
    else [rows, 1], or [rows, in] of groups.

    Scales are those of tokens, or of groups of inputs that begin at multiples of their size, `first` being this
    rank's first input; a static one is given. A token never depends on another.
    """
    largest = _INT8_MAX if activation.kind == "int8" else _FP8_MAX
    if activation.is_static:
        if input_scale is None:
            raise ValueError("a static activation needs its scale")
        return _rounded(x / input_scale, activation), input_scale
    size = activation.group_size
    if size is None:
        scales = x.abs().amax(dim=1, keepdim=True) / largest
    else:
        before = first % size
        after = -(before + x.shape[1]) % size
        groups = functional.pad(x.abs(), (before, after)).view(x.shape[0], -1, size).amax(dim=2) / largest
        scales = groups.repeat_interleave(size, dim=1)[:, before : before + x.shape[1]]
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    return _rounded(x / scales, activation), scales


def _rounded(x: Tensor, activation: Activation) -> Tensor:
    if activation.kind == "int8":
        return x.round().clamp(-_INT8_MAX - 1, _INT8_MAX)
    return x.clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn).float()


def _rounding(weight: Packed) -> Callable[[Tensor], Tensor] | None:
    if not isinstance(weight, ScaledGrid) or weight.activation is None:
        return None
    activation, scale, first = weight.activation, weight.input_scale, weight.first_column
    return lambda x: rounded_input(x, activation, scale, first)
