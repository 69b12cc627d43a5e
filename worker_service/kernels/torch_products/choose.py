"""Which of torch's products a device can compute: each is tried on a weight of its class, against the reference."""

from collections.abc import Sequence
from dataclasses import fields
from functools import partial

import structlog
import torch
from torch import Tensor

from loader.quantised.packed import Packed
from worker_service.kernels.linear import LinearKernel
from worker_service.kernels.quantised import make_joined_linear, make_quantised_linear
from worker_service.kernels.torch_products.fp8 import FP8
from worker_service.kernels.torch_products.int4 import INT4, MOST_ROWS
from worker_service.kernels.torch_products.int8 import INT8, WIDENED
from worker_service.kernels.torch_products.join import join, join_biases
from worker_service.kernels.torch_products.product import ProductKind, Target, TorchProduct, packed_bytes

KINDS = (INT8, WIDENED, FP8, INT4)
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 2e-2, torch.float16: 5e-3}
"""Largest errors, as shares of the largest result, by type: of a right product it is rounding alone."""
# A decode's, one more than cuBLAS pads, a chunk's, and more than is computed from what is packed.
_ROW_COUNTS = (1, 17, 40, MOST_ROWS + 1)

_log = structlog.stdlib.get_logger(__name__)


class ProductChooser:
    """Makes products for one model: torch's where they compute what the reference does, and the reference elsewhere.

    Weights of equal form and shape are one class, of which the first is tried. Each decision is logged.
    """

    def __init__(self, target: Target, kinds: Sequence[ProductKind] = KINDS) -> None:
        self._target = target
        self._kinds = tuple(kinds)
        self._verdicts: dict[tuple[object, ...], bool] = {}
        # Bytes that its products take more than the weights that they were made of.
        self.added_bytes = 0

    def __call__(
        self, weights: Sequence[Tensor | Packed], biases: Sequence[Tensor | None], *, is_shared: bool = False
    ) -> LinearKernel:
        """See MakeLinear."""
        packed = [weight for weight in weights if not isinstance(weight, Tensor)]
        if len(packed) == len(weights) > 1:
            product = self._of_joined(packed, biases, is_shared)
            if product is not None:
                return product
        return make_joined_linear(weights, biases, make_packed=partial(self._of_one, is_shared=is_shared))

    def _of_joined(
        self, weights: Sequence[Packed], biases: Sequence[Tensor | None], is_shared: bool
    ) -> TorchProduct | None:
        kinds = {self._kind_of(weight) for weight in weights}
        kind = kinds.pop() if len(kinds) == 1 else None
        if kind is None or kind.refusal(weights[0], self._target) is not None:
            return None
        whole = join(weights)
        if whole is None:
            return None
        bias = join_biases(biases, [weight.shape[0] for weight in weights])
        return self._product(whole, bias, sum(map(packed_bytes, weights)), is_shared)

    def _of_one(self, weight: Packed, bias: Tensor | None, *, is_shared: bool) -> LinearKernel:
        product = self._product(weight, bias, packed_bytes(weight), is_shared)
        return make_quantised_linear(weight, bias) if product is None else product

    def _product(self, weight: Packed, bias: Tensor | None, num_bytes: int, is_shared: bool) -> TorchProduct | None:
        kind = self._kind_of(weight)
        if kind is None or (is_shared and kind.copies):
            return None
        key = (kind.name, *_class_of(weight))
        if key not in self._verdicts:
            self._verdicts[key] = is_right(kind, weight, self._target)
        # An order of inputs may suit one weight of a class and not the next.
        if not self._verdicts[key] or kind.refusal(weight, self._target) is not None:
            return None
        product = kind.make(weight, bias)
        self.added_bytes += product.num_bytes - num_bytes
        return product

    def _kind_of(self, weight: Packed) -> ProductKind | None:
        return next((kind for kind in self._kinds if kind.is_for(weight)), None)


def is_right(kind: ProductKind, weight: Packed, target: Target) -> bool:
    """Whether a kind computes what the reference does with this weight. Says why where it does not.

    Raises torch.OutOfMemoryError.
    """
    named = {"product": kind.name, "outputs": weight.shape[0], "inputs": weight.shape[1]}
    slower = "the weight is made whole at each step, which is slower"
    reason = kind.refusal(weight, target)
    if reason is not None:
        _log.info("quantised_product_unusable", **named, reason=reason, consequence=slower)
        return False
    try:
        error = largest_error(kind.make(weight, None), weight, target.dtype)
    except torch.OutOfMemoryError:
        raise
    except Exception as failure:
        # Whatever an operator or its driver raises is a reason to do without it.
        reason = f"{type(failure).__name__}: {failure}"[:500]
        _log.info("quantised_product_unusable", **named, reason=reason, consequence=slower)
        return False
    tolerance = TOLERANCES[target.dtype]
    if error <= tolerance:
        _log.info("quantised_product_chosen", **named, largest_error=error)
        return True
    _log.warning("quantised_product_wrong", **named, largest_error=error, tolerance=tolerance, consequence=slower)
    return False


@torch.inference_mode()
def largest_error(product: LinearKernel, weight: Packed, dtype: torch.dtype) -> float:
    """Largest difference from the reference, as a share of its largest result, for few rows and for many.

    Raises ValueError for a weight whose products are all zero, which any layout computes.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_ROW_COUNTS[-1], weight.shape[1], generator=generator)
    x[3] = 0.0
    x = x.to(weight.scales.device, dtype)
    expected = make_quantised_linear(weight)(x)
    largest = float(expected.float().abs().max())
    if largest == 0.0:
        raise ValueError("the weight is zero, which proves nothing")
    errors = []
    for count in _ROW_COUNTS:
        got = product(x[:count])
        if got.shape != (count, weight.shape[0]) or got.dtype != dtype or not got.is_contiguous():
            raise ValueError(f"it answers {got.dtype} {tuple(got.shape)} for {count} rows")
        error = float((got.float() - expected[:count].float()).abs().max())
        errors.append(error / largest if error == error else torch.inf)
    return max(errors)


def _class_of(weight: Packed) -> tuple[object, ...]:
    """What weights that are computed alike have in common: the form, the shapes and types of its tensors."""
    values = (getattr(weight, field.name) for field in fields(weight))
    return tuple((*value.shape, value.dtype) if isinstance(value, Tensor) else value for value in values)
