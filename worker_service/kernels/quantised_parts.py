"""Quantised weights of one input brought to one form: bytes in groups of inputs, each with a scale, and more.

What several of them have in common is brought to one, so that they are computed as one product.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd

import torch
from torch import Tensor
from torch.nn import functional

from loader.quantised.activations import Activation
from loader.quantised.bits import unpack_rows
from loader.quantised.packed import Packed, ScaledGrid
from worker_service.kernels.layout import LANES, PANEL, rounded_up

# Groups that are no multiples of a vector, or of any number of inputs, are filled up; not beyond this.
_MOST_FILLING = 2


@dataclass(frozen=True, slots=True)
class Part:
    """One weight, or several, in groups of `size` places: scale * (value - zero) + minimum.

    `values` uint8 [out, places], or of 4 `bits` [out, places / 2] (see `loader.quantised.bits`); `scales`, and maybe
    `minima`, [out, groups]; `zeros` uint8 [out, groups], or None for `zero`. With `factors`, int8 [out, groups], scales
    and minima are those of blocks of several groups, and `depth` is whole blocks. Of no weight with an activation there
    are minima.
    """

    values: Tensor
    scales: Tensor
    zeros: Tensor | None
    zero: int
    order: Tensor | None
    size: int
    depth: int
    activation: Activation | None
    bits: int = 8
    minima: Tensor | None = None
    factors: Tensor | None = None
    minimum_factors: Tensor | None = None

    @property
    def num_groups(self) -> int:
        """Of all its inputs."""
        return (self.scales if self.factors is None else self.factors).shape[1]

    @property
    def block_size(self) -> int:
        """Places that share a scale, before factors."""
        return self.size * (self.num_groups // self.scales.shape[1])


def can_compute(activation: Activation | None) -> bool:
    """Whether the kernels round inputs so."""
    if activation is None:
        return True
    size = activation.group_size
    return activation.kind == "int8" and not activation.is_static and (size is None or size % LANES == 0)


def part_of(weight: Packed) -> Part | None:
    """A weight in that form; None where it would become much larger.

    Raises ValueError for one that the kernels do not compute.
    """
    if isinstance(weight, ScaledGrid):
        return _part_of_grid(weight)
    depth, size, first = weight.num_inputs, weight.group_size, weight.first
    # Of what is 2 or 3 bits wide nothing but the range differs from 4 bits.
    bits = 4 if weight.bits == 4 and depth % 2 == 0 else 8
    part = Part(
        values=weight.words if bits == 4 else unpack_rows(weight.words, weight.bits, depth),
        scales=weight.scales,
        zeros=weight.zeros,
        zero=0 if weight.minima is not None else 1 << (weight.bits - 1),
        order=None,
        size=size,
        depth=depth,
        activation=None,
        bits=bits,
        minima=weight.minima,
        factors=weight.factors,
        minimum_factors=weight.minimum_factors,
    )
    if part.factors is not None and (first or depth != part.num_groups * size):
        begin, end = first // size, -(-(first + depth) // size)
        part, first = _with_scales_of_groups(part, begin, end), first % size
    if part.num_groups == 1 and weight.group_of is None:
        return _filled(replace(part, size=rounded_up(depth, LANES)))
    if weight.group_of is None and first == 0 and size % LANES == 0:
        return _filled(part)
    group_of = weight.group_of
    if group_of is None:
        group_of = (torch.arange(depth) + first) // size
    return _ordered(part, group_of)


def _part_of_grid(weight: ScaledGrid) -> Part | None:
    if weight.values.dtype != torch.int8 or not can_compute(weight.activation):
        raise ValueError(f"the kernels do not compute {weight.values.dtype} with inputs {weight.activation}")
    num_outputs, depth = weight.shape
    rows = (weight.first_row + torch.arange(num_outputs)) // weight.block_rows
    scales = (
        weight.scales.index_select(0, rows) if weight.scales.shape[0] > 1 else weight.scales.expand(num_outputs, -1)
    )
    values = (weight.values.view(torch.uint8) ^ 0x80).contiguous()
    part = Part(values, scales, None, 128, None, weight.block_columns, depth, weight.activation)
    if scales.shape[1] == 1:
        return _filled(replace(part, size=rounded_up(depth, LANES)))
    if weight.first_column == 0 and weight.block_columns % LANES == 0:
        return _filled(part)
    return _ordered(part, (torch.arange(depth) + weight.first_column) // weight.block_columns)


def _with_scales_of_groups(part: Part, begin: int = 0, end: int | None = None) -> Part:
    """The same with the groups [begin, end) alone, and a scale of its own for each."""
    if part.factors is None:
        return part

    def multiplied(scales: Tensor | None, factors: Tensor | None) -> Tensor | None:
        if scales is None or factors is None:
            return None
        times = factors.shape[1] // scales.shape[1]
        return scales.float().repeat_interleave(times, dim=1).mul_(factors)[:, begin:end]

    scales = multiplied(part.scales, part.factors)
    assert scales is not None
    minima = multiplied(part.minima, part.minimum_factors)
    zeros = None if part.zeros is None else part.zeros[:, begin:end]
    return replace(part, scales=scales, minima=minima, zeros=zeros, factors=None, minimum_factors=None)


def _filled(part: Part) -> Part:
    """The same with values up to the end of the last group; what they are does not matter, for their inputs are 0."""
    missing = part.num_groups * part.size - part.depth
    if missing < 0:
        groups = -(-part.depth // part.size)
        raise ValueError(f"{part.num_groups} groups of {part.size} are fewer than {groups}")
    return replace(part, values=functional.pad(part.values, (0, missing * part.bits // 8))) if missing else part


def _in_bytes(part: Part) -> Part:
    """The same with a byte for each value."""
    if part.bits == 8:
        return part
    return replace(part, values=unpack_rows(part.values, part.bits, 2 * part.values.shape[1]), bits=8)


def _ordered(part: Part, group_of: Tensor) -> Part | None:
    """The same with the inputs of each group side by side, and groups filled up to one size."""
    part, num_groups = _in_bytes(part), part.num_groups
    counts = torch.bincount(group_of, minlength=num_groups)
    size = rounded_up(int(counts.max()), LANES)
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


def join(parts: Sequence[Part]) -> Part | None:
    """All parts as one, or None."""
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    if any(part.activation != first.activation for part in parts):
        return None
    if any(part.factors is not None for part in parts) and len({_blocks_of(part) for part in parts}) > 1:
        parts = [_with_scales_of_groups(part) for part in parts]
    orders = [part.order for part in parts if part.order is not None]
    sizes = {part.size for part in parts}
    has_one_order = len(orders) == len(parts) and len(sizes) == 1 and all(torch.equal(o, orders[0]) for o in orders)
    if not orders:
        size = gcd(*sizes)
        parts = [_in_groups_of(part, size, -(-part.depth // size)) for part in parts]
    elif not has_one_order:
        return None
    if len({part.bits for part in parts}) > 1:
        parts = [_in_bytes(part) for part in parts]
    has_zeros = len({part.zero for part in parts}) > 1 or any(part.zeros is not None for part in parts)
    dtypes = {part.scales.dtype for part in parts}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    has_minima = any(part.minima is not None for part in parts)
    factors = [part.factors for part in parts if part.factors is not None]
    minimum_factors = [_or_zeros(part.minimum_factors, part.factors) for part in parts if part.factors is not None]
    return replace(
        parts[0],
        values=torch.cat([part.values for part in parts]),
        scales=torch.cat([part.scales.to(dtype) for part in parts]),
        zeros=torch.cat([_zeros_of(part) for part in parts]) if has_zeros else None,
        minima=torch.cat([_or_zeros(part.minima, part.scales).to(dtype) for part in parts]) if has_minima else None,
        factors=torch.cat(factors) if factors else None,
        minimum_factors=torch.cat(minimum_factors) if factors and has_minima else None,
    )


def _blocks_of(part: Part) -> int | None:
    return None if part.factors is None else part.block_size


def _or_zeros(tensor: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if tensor is None else tensor


def _in_groups_of(part: Part, size: int, num_groups: int) -> Part:
    times = part.size // size

    def spread(by_group: Tensor) -> Tensor:
        return by_group.repeat_interleave(times, dim=1)[:, :num_groups]

    def spread_if_any(by_group: Tensor | None) -> Tensor | None:
        return None if by_group is None else spread(by_group)

    spreads = replace(
        part,
        values=part.values[:, : num_groups * size * part.bits // 8],
        zeros=spread_if_any(part.zeros),
        size=size,
        factors=spread_if_any(part.factors),
    )
    if part.factors is not None:
        return replace(spreads, minimum_factors=spread_if_any(part.minimum_factors))
    return replace(spreads, scales=spread(part.scales), minima=spread_if_any(part.minima))


def _zeros_of(part: Part) -> Tensor:
    if part.zeros is not None:
        return part.zeros
    return torch.full((part.values.shape[0], part.num_groups), part.zero, dtype=torch.uint8)
