"""float8 e4m3 weights times inputs that are rounded to it too."""

import torch
from torch import Tensor

from loader.quantised.activations import Activation
from loader.quantised.packed import Packed, ScaledGrid
from worker_service.kernels.layout import rounded_up
from worker_service.kernels.quantised import input_codes
from worker_service.kernels.torch_products.product import ProductKind, Target, filled, lacks, row_scales

_MULTIPLE = 16


class Fp8Product:
    """Products of float8 values with a scale for each token and each row, which the operator applies itself."""

    def __init__(self, weight: Packed, bias: Tensor | None) -> None:
        assert isinstance(weight, ScaledGrid) and weight.activation is not None
        num_outputs, num_inputs = weight.shape
        rows, columns = rounded_up(num_outputs, _MULTIPLE), rounded_up(num_inputs, _MULTIPLE)
        self._num_outputs = num_outputs
        self._activation: Activation = weight.activation
        self._input_scale = weight.input_scale
        # As bytes: not everything is computed with float8, and zero is zero in both.
        self._values = filled(weight.values.view(torch.uint8), rows, columns).view(torch.float8_e4m3fn)
        self._scales = filled(row_scales(weight).view(1, -1), 1, rows)
        self._bias = bias

    @property
    def num_bytes(self) -> int:
        """See TorchProduct."""
        return self._values.nbytes + self._scales.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """See TorchProduct."""
        num_rows = x.shape[0]
        codes, scales = input_codes(x.float(), self._activation, self._input_scale)
        result = torch._scaled_mm(
            filled(codes, num_rows, self._values.shape[1]).to(torch.float8_e4m3fn),
            self._values.t(),
            # Also of one row it asks for the strides of a matrix, which an expanded scale has not.
            scale_a=scales.expand(num_rows, 1).clone(memory_format=torch.contiguous_format),
            scale_b=self._scales,
            out_dtype=torch.bfloat16,
        )[:, : self._num_outputs]
        return (result if self._bias is None else result + self._bias).contiguous()


def _is_for(weight: Packed) -> bool:
    if not isinstance(weight, ScaledGrid) or weight.activation is None:
        return False
    activation = weight.activation
    is_fp8 = weight.values.dtype == torch.float8_e4m3fn and activation.kind == "fp8"
    return is_fp8 and activation.group_size is None and weight.scales.shape[1] == 1


def _refusal(_weight: Packed, target: Target) -> str | None:
    if target.dtype != torch.bfloat16:
        return f"_scaled_mm answers bfloat16, which is coarser than {target.dtype}"
    return lacks(target, "_scaled_mm", (8, 9))


FP8 = ProductKind("fp8 by _scaled_mm", _is_for, _refusal, Fp8Product)
