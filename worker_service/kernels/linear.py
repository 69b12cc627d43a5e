"""Matrix products with a constant weight: prepacked for oneDNN on a CPU, plain torch everywhere else."""

from collections.abc import Callable

import torch
from torch.nn import functional

LinearKernel = Callable[[torch.Tensor], torch.Tensor]
"""[rows, in] -> [rows, out]."""

_PACKED_DTYPES = (torch.float32, torch.bfloat16)


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> LinearKernel:
    """A function x -> x @ weight.T + bias, for a weight [out, in] that will not change.

    The result may hold a repacked copy instead of `weight`, so the caller should let go of it.
    """
    if can_pack(weight):
        return _packed(weight, bias)
    return plain_linear(weight, bias)


def plain_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> LinearKernel:
    """The reference: torch's own linear."""

    def linear(x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, weight, bias)

    return linear


def can_pack(weight: torch.Tensor) -> bool:
    """Whether oneDNN's prepacked product serves this weight: on a CPU, in a type that it does well."""
    return (
        weight.device.type == "cpu"
        and weight.dtype in _PACKED_DTYPES
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def _packed(weight: torch.Tensor, bias: torch.Tensor | None) -> LinearKernel:
    # The operators that torch's own inductor compiles to. Packing once saves torch from reordering
    # the weight at every call, which is half the time of a product with few rows.
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
    pointwise = torch.ops.mkldnn._linear_pointwise.default

    def linear(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = pointwise(x, packed, bias, "none", [], "")
        return result

    return linear
