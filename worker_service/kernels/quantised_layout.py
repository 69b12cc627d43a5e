"""How the compiled kernels want quantised weights to lie, in plain torch: integers of 4 or 8 bits in groups of inputs.

What several products of one input have in common is brought to one layout, so that they are computed as one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import gcd

import torch
from torch import Tensor
from torch.nn import functional

from loader.quantised.activations import Activation
from loader.quantised.packed import Packed
from worker_service.kernels.layout import DTYPES, LANES, PANEL
from worker_service.kernels.quantised_parts import Part, join, part_of

# Inputs that share a scale as integers. Fewer are closer to what they stand for, and cost more: in float32 what they
# stand for is exact, in bfloat16 it is rounded already.
_SPANS = {**dict.fromkeys((torch.float32, torch.float16), (LANES,)), torch.bfloat16: (64, 32, LANES)}
# Sums of 8-bit times 8-bit values, of so many, fit 32 bits.
_MAX_ROUNDED_SPAN = 4096


@dataclass(frozen=True, slots=True)
class QuantisedProduct:
    """A weight [num_outputs, depth] for the kernels, see SwQuantised: scale * (word - zero) + minimum.

    `words` uint8 [panels, steps, 32, 4]; `scales` [panels, groups, 32], and maybe `minima` alike; `zeros` uint8
    [panels, groups, 32], or None where all are `zero`. With `factors`, int8 [panels, groups, 32], scales and minima are
    those of blocks of several groups, and are multiplied by a group's factor, and of `minimum_factors`. `order` int32
    [inputs] tells which input stands at each place, -1 for none, None where all stand in theirs. With `activation` the
    input is rounded to int8.
    """

    words: Tensor
    scales: Tensor
    minima: Tensor | None
    factors: Tensor | None
    minimum_factors: Tensor | None
    zeros: Tensor | None
    order: Tensor | None
    num_outputs: int
    depth: int
    bits: int
    span: int
    zero: int
    activation: Activation | None = None

    @property
    def num_inputs(self) -> int:
        """Places of inputs, those that are filled up among them."""
        return self.words.shape[1] * (32 // self.bits)

    @property
    def num_groups(self) -> int:
        """Groups of inputs, all of one size."""
        return (self.scales if self.factors is None else self.factors).shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """Its tensors by their names."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}


_FORM = "form"


def flatten_product(name: str, product: QuantisedProduct) -> dict[str, Tensor]:
    """Its tensors by `name` and their own, with one of numbers, "form", that tells what they are."""
    tensors = {f"{name}.{part}": tensor for part, tensor in product.tensors().items()}
    activation = product.activation
    rounding = 0 if activation is None else activation.group_size or -1
    sizes = (product.num_outputs, product.depth, product.bits, product.span, product.zero, rounding)
    tensors[f"{name}.{_FORM}"] = torch.tensor(sizes, dtype=torch.int64)
    return tensors


def product_of(tensors: dict[str, Tensor]) -> QuantisedProduct:
    """What `flatten_product` made, its tensors by their own names."""
    num_outputs, depth, bits, span, zero, rounding = tensors[_FORM].tolist()
    activation = None if rounding == 0 else Activation("int8", group_size=None if rounding < 0 else rounding)
    return QuantisedProduct(
        words=tensors["words"],
        scales=tensors["scales"],
        minima=tensors.get("minima"),
        factors=tensors.get("factors"),
        minimum_factors=tensors.get("minimum_factors"),
        zeros=tensors.get("zeros"),
        order=tensors.get("order"),
        num_outputs=num_outputs,
        depth=depth,
        bits=bits,
        span=span,
        zero=zero,
        activation=activation,
    )


def pack_quantised(
    weights: Sequence[Packed], dtype: torch.dtype, *, interleave: bool = False
) -> QuantisedProduct | None:
    """Weights [out, in] of the same input, which comes in `dtype`, as one product, their rows one after the other.

    With `interleave` there are two of a multiple of 16 rows, and 16 rows of each come in turn, as in
    `layout.pack_gate_up`. None where they have no layout in common, or none that is not much larger than they are;
    raises ValueError for a form that the kernels do not compute.
    """
    parts = [part_of(weight) for weight in weights]
    if None in parts:
        return None
    joined = join([part for part in parts if part is not None])
    return None if joined is None else _packed(joined, dtype, interleave=interleave)


def _packed(part: Part, dtype: torch.dtype, *, interleave: bool) -> QuantisedProduct:
    bits = 4 if part.bits == 4 or (part.zero <= 8 and int(part.values.max()) < 16) else 8
    dtype_of_scales = part.scales.dtype if part.scales.dtype in DTYPES else torch.float32

    def in_panels(tensor: Tensor) -> Tensor:
        """[out, n] -> [panels, 32, n]."""
        if interleave:
            halves = tensor.reshape(2, -1, LANES, tensor.shape[1])
            tensor = halves.transpose(0, 1).reshape(tensor.shape)
        missing = -tensor.shape[0] % PANEL
        if missing:
            tensor = functional.pad(tensor, (0, 0, 0, missing))
        return tensor.reshape(-1, PANEL, tensor.shape[1])

    def by_group(tensor: Tensor | None, to: torch.dtype) -> Tensor | None:
        return None if tensor is None else in_panels(tensor.to(to)).transpose(1, 2).contiguous()

    scales = by_group(part.scales, dtype_of_scales)
    assert scales is not None
    return QuantisedProduct(
        words=_words_of_4_bits(in_panels(part.values)) if part.bits == 4 else _words_of(in_panels(part.values), bits),
        scales=scales,
        minima=by_group(part.minima, dtype_of_scales),
        factors=by_group(part.factors, torch.int8),
        minimum_factors=by_group(part.minimum_factors, torch.int8),
        zeros=by_group(part.zeros, torch.uint8),
        order=part.order,
        num_outputs=part.values.shape[0],
        depth=part.depth,
        bits=bits,
        span=_span_of(part, dtype),
        zero=part.zero,
        activation=part.activation,
    )


def _words_of(values: Tensor, bits: int) -> Tensor:
    """uint8 [panels, 32, inputs] -> [panels, steps, 32, 4]; of 4 bits, inputs 4 to 7 of eight in the high halves."""
    panels, columns, inputs = values.shape
    if bits == 8:
        fours = values.contiguous().view(torch.int32).transpose(1, 2).contiguous()
        return fours.view(torch.uint8).view(panels, inputs // 4, columns, 4)
    halves = values.view(panels, columns, inputs // 8, 2, 4)
    return (halves[:, :, :, 0] | (halves[:, :, :, 1] << 4)).transpose(1, 2).contiguous()


def _words_of_4_bits(packed: Tensor) -> Tensor:
    """As `_words_of`, of pairs in bytes: uint8 [panels, 32, inputs / 2]."""
    panels, columns, size = packed.shape
    eights = packed.contiguous().view(torch.int32).transpose(1, 2).contiguous()
    differ = torch.empty_like(eights)  # new memory for each step would take most of the time
    # Inputs 0 to 3 of eight come in turn with 4 to 7: the middle two of four bytes change places, then halves of bytes.
    for shift, those in ((8, 0x0000FF00), (4, 0x00F000F0)):
        torch.bitwise_right_shift(eights, shift, out=differ)
        differ ^= eights
        differ &= those
        eights ^= differ
        differ <<= shift
        eights ^= differ
    return eights.view(torch.uint8).view(panels, size // 4, columns, 4)


def _span_of(part: Part, dtype: torch.dtype) -> int:
    if part.activation is None:
        return next(span for span in _SPANS[dtype] if part.size % span == 0)
    size = gcd(part.size, part.activation.group_size or part.size)
    parts = next(n for n in range(1, size // LANES + 1) if size % (n * LANES) == 0 and size // n <= _MAX_ROUNDED_SPAN)
    return size // parts
