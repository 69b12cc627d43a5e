"""How the compiled kernels want quantised weights to lie, in plain torch: integers of 4 or 8 bits in groups of inputs.

What several products of one input have in common is brought to one layout, so that they are computed as one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from math import gcd

import torch
from torch import Tensor
from torch.nn import functional

from loader.quantised.activations import Activation
from loader.quantised.bits import unpack_rows
from loader.quantised.packed import Packed, ScaledGrid
from worker_service.kernels.layout import DTYPES, LANES, PANEL

SCALE_DTYPES = DTYPES

# Inputs that share a scale as integers. Fewer are closer to what they stand for, and cost more: in float32 what they
# stand for is exact, in bfloat16 it is rounded already.
_SPANS = {**dict.fromkeys((torch.float32, torch.float16), (LANES,)), torch.bfloat16: (64, 32, LANES)}
# Sums of 8-bit times 8-bit values, of so many, fit 32 bits.
_MAX_ROUNDED_SPAN = 4096
# Groups that are no multiples of a vector, or of any number of inputs, are filled up; not beyond this.
_MOST_FILLING = 2


@dataclass(frozen=True, slots=True)
class QuantisedProduct:
    """A weight [num_outputs, depth] for the kernels, see SwQuantised: scale * (word - zero).

    `words` uint8 [panels, steps, 32, 4]; `scales` [panels, groups, 32]; `zeros` uint8 alike, or None where all are
    `zero`; `order` int32 [inputs] tells which input stands at each place, -1 for none, None where all stand in
    theirs. With `activation` the input is rounded to int8.
    """

    words: Tensor
    scales: Tensor
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
        return self.scales.shape[1]

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
    words, scales, zeros, order = (tensors.get(name) for name in ("words", "scales", "zeros", "order"))
    assert words is not None and scales is not None
    return QuantisedProduct(words, scales, zeros, order, num_outputs, depth, bits, span, zero, activation)


@dataclass(frozen=True, slots=True)
class _Part:
    """One weight in groups of `size` places: `values` uint8 [out, places], scales and zeros [out, groups]."""

    values: Tensor
    scales: Tensor
    zeros: Tensor | None
    zero: int
    order: Tensor | None
    size: int
    depth: int
    activation: Activation | None


def can_compute(activation: Activation | None) -> bool:
    """Whether the kernels round inputs so."""
    if activation is None:
        return True
    size = activation.group_size
    return activation.kind == "int8" and not activation.is_static and (size is None or size % LANES == 0)


def pack_quantised(
    weights: Sequence[Packed], dtype: torch.dtype, *, interleave: bool = False
) -> QuantisedProduct | None:
    """Weights [out, in] of the same input, which comes in `dtype`, as one product, their rows one after the other.

    With `interleave` there are two of a multiple of 16 rows, and 16 rows of each come in turn, as in
    `layout.pack_gate_up`. None where they have no layout in common, or none that is not much larger than they are;
    raises ValueError for a form that the kernels do not compute.
    """
    parts = [_part_of(weight) for weight in weights]
    if None in parts:
        return None
    joined = _joined([part for part in parts if part is not None])
    return None if joined is None else _packed(joined, dtype, interleave=interleave)


def _part_of(weight: Packed) -> _Part | None:
    if isinstance(weight, ScaledGrid):
        return _part_of_grid(weight)
    depth = weight.num_inputs
    values = unpack_rows(weight.words, weight.bits, depth)
    zero = 1 << (weight.bits - 1)
    # Of what is 2 or 3 bits wide nothing but the range differs from 4 bits.
    part = _Part(values, weight.scales, weight.zeros, zero, None, weight.group_size, depth, None)
    if weight.scales.shape[1] == 1 and weight.group_of is None:
        return _filled(replace(part, size=_rounded_up(depth, LANES)))
    if weight.group_of is None and weight.first == 0 and weight.group_size % LANES == 0:
        return _filled(part)
    group_of = weight.group_of
    if group_of is None:
        group_of = (torch.arange(depth) + weight.first) // weight.group_size
    return _ordered(part, group_of)


def _part_of_grid(weight: ScaledGrid) -> _Part | None:
    if weight.values.dtype != torch.int8 or not can_compute(weight.activation):
        raise ValueError(f"the kernels do not compute {weight.values.dtype} with inputs {weight.activation}")
    num_outputs, depth = weight.shape
    rows = (weight.first_row + torch.arange(num_outputs)) // weight.block_rows
    scales = (
        weight.scales.index_select(0, rows) if weight.scales.shape[0] > 1 else weight.scales.expand(num_outputs, -1)
    )
    values = (weight.values.view(torch.uint8) ^ 0x80).contiguous()
    part = _Part(values, scales, None, 128, None, weight.block_columns, depth, weight.activation)
    if scales.shape[1] == 1:
        return _filled(replace(part, size=_rounded_up(depth, LANES)))
    if weight.first_column == 0 and weight.block_columns % LANES == 0:
        return _filled(part)
    return _ordered(part, (torch.arange(depth) + weight.first_column) // weight.block_columns)


def _filled(part: _Part) -> _Part:
    """The same with values up to the end of the last group; what they are does not matter, for their inputs are 0."""
    missing = part.scales.shape[1] * part.size - part.values.shape[1]
    if missing < 0:
        groups = -(-part.values.shape[1] // part.size)
        raise ValueError(f"{part.scales.shape[1]} groups of {part.size} are fewer than {groups}")
    return replace(part, values=functional.pad(part.values, (0, missing))) if missing else part


def _ordered(part: _Part, group_of: Tensor) -> _Part | None:
    """The same with the inputs of each group side by side, and groups filled up to one size."""
    num_groups = part.scales.shape[1]
    counts = torch.bincount(group_of, minlength=num_groups)
    size = _rounded_up(int(counts.max()), LANES)
    if num_groups * size > _MOST_FILLING * part.depth + PANEL:
        return None
    by_group = torch.argsort(group_of, stable=True)
    starts = counts.cumsum(0) - counts
    places = group_of[by_group] * size + torch.arange(part.depth) - starts[group_of[by_group]]
    order = torch.full((num_groups * size,), -1, dtype=torch.int32)
    order[places] = by_group.int()
    values = part.values.new_zeros((part.values.shape[0], num_groups * size))
    values[:, places] = part.values[:, by_group]
    return replace(part, values=values, order=order, size=size)


def _joined(parts: Sequence[_Part]) -> _Part | None:
    """All parts as one, or None."""
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    if any(part.activation != first.activation for part in parts):
        return None
    if all(part.order is None for part in parts):
        size = gcd(*(part.size for part in parts))
        parts = [_in_groups_of(part, size, -(-part.depth // size)) for part in parts]
    elif not all(
        part.order is not None and part.size == first.size and torch.equal(part.order, _needed(first.order))
        for part in parts
    ):
        return None
    has_zeros = len({part.zero for part in parts}) > 1 or any(part.zeros is not None for part in parts)
    dtypes = {part.scales.dtype for part in parts}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    return replace(
        parts[0],
        values=torch.cat([part.values for part in parts]),
        scales=torch.cat([part.scales.to(dtype) for part in parts]),
        zeros=torch.cat([_zeros_of(part) for part in parts]) if has_zeros else None,
    )


def _needed(order: Tensor | None) -> Tensor:
    return torch.empty(0, dtype=torch.int32) if order is None else order


def _in_groups_of(part: _Part, size: int, num_groups: int) -> _Part:
    times = part.size // size

    def spread(by_group: Tensor) -> Tensor:
        return by_group.repeat_interleave(times, dim=1)[:, :num_groups]

    zeros = None if part.zeros is None else spread(part.zeros)
    values = part.values[:, : num_groups * size]
    return replace(part, values=values, scales=spread(part.scales), zeros=zeros, size=size)


def _zeros_of(part: _Part) -> Tensor:
    return torch.full(part.scales.shape, part.zero, dtype=torch.uint8) if part.zeros is None else part.zeros


def _packed(part: _Part, dtype: torch.dtype, *, interleave: bool) -> QuantisedProduct:
    bits = 4 if part.zero <= 8 and int(part.values.max()) < 16 else 8
    scales = part.scales if part.scales.dtype in SCALE_DTYPES else part.scales.float()

    def in_panels(tensor: Tensor) -> Tensor:
        """[out, n] -> [panels, 32, n]."""
        if interleave:
            halves = tensor.reshape(2, -1, LANES, tensor.shape[1])
            tensor = halves.transpose(0, 1).reshape(tensor.shape)
        missing = -tensor.shape[0] % PANEL
        if missing:
            tensor = functional.pad(tensor, (0, 0, 0, missing))
        return tensor.reshape(-1, PANEL, tensor.shape[1])

    return QuantisedProduct(
        words=_words_of(in_panels(part.values), bits),
        scales=in_panels(scales).transpose(1, 2).contiguous(),
        zeros=None if part.zeros is None else in_panels(part.zeros).transpose(1, 2).contiguous(),
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
        return values.view(panels, columns, inputs // 4, 4).transpose(1, 2).contiguous()
    halves = values.view(panels, columns, inputs // 8, 2, 4)
    return (halves[:, :, :, 0] | (halves[:, :, :, 1] << 4)).transpose(1, 2).contiguous()


def _span_of(part: _Part, dtype: torch.dtype) -> int:
    if part.activation is None:
        return next(span for span in _SPANS[dtype] if part.size % span == 0)
    size = gcd(part.size, part.activation.group_size or part.size)
    parts = next(n for n in range(1, size // LANES + 1) if size % (n * LANES) == 0 and size // n <= _MAX_ROUNDED_SPAN)
    return size // parts


def _rounded_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
