"""Quantised weights of one input as one weight, so that they are computed as one product."""

from collections.abc import Sequence

import torch
from torch import Tensor

from loader.quantised.packed import GroupedInts, Packed, ScaledGrid
from worker_service.kernels.torch_products.product import row_scales


def join(weights: Sequence[Packed]) -> Packed | None:
    """One weight with the rows of all, one after the other; None where their forms differ in what they share."""
    ints = [weight for weight in weights if isinstance(weight, GroupedInts)]
    grids = [weight for weight in weights if isinstance(weight, ScaledGrid)]
    if ints and grids:
        return None
    return _joined_ints(ints) if ints else _joined_grids(grids)


def join_biases(biases: Sequence[Tensor | None], num_outputs: Sequence[int]) -> Tensor | None:
    """The biases of joined weights; what has none has zeros. None where none has any."""
    some = next((bias for bias in biases if bias is not None), None)
    if some is None:
        return None
    sizes = zip(biases, num_outputs, strict=True)
    return torch.cat([some.new_zeros(size) if bias is None else bias for bias, size in sizes])


def _joined_ints(weights: Sequence[GroupedInts]) -> GroupedInts | None:
    first = weights[0]
    if len({_form(weight) for weight in weights}) > 1 or not _are_equal([weight.group_of for weight in weights]):
        return None
    has_zeros = any(weight.zeros is not None for weight in weights)
    return GroupedInts(
        words=torch.cat([weight.words for weight in weights]),
        scales=_joined([weight.scales for weight in weights]),
        zeros=torch.cat([_zeros_of(weight) for weight in weights]) if has_zeros else None,
        group_of=first.group_of,
        bits=first.bits,
        num_inputs=first.num_inputs,
        group_size=first.group_size,
        first=first.first,
        minima=_joined_present([weight.minima for weight in weights]),
        factors=_joined_present([weight.factors for weight in weights]),
        minimum_factors=_joined_present([weight.minimum_factors for weight in weights]),
    )


def _form(weight: GroupedInts) -> tuple[object, ...]:
    has = (weight.minima is None, weight.factors is None, weight.minimum_factors is None)
    groups = (weight.group_size, weight.first, weight.num_groups, weight.scales.shape[1])
    return (weight.bits, weight.num_inputs, *groups, *has)


def _joined_grids(weights: Sequence[ScaledGrid]) -> ScaledGrid | None:
    first, num_inputs = weights[0], weights[0].shape[1]
    forms = {(weight.values.dtype, weight.shape[1], weight.activation, weight.scales.shape[1]) for weight in weights}
    has_groups = first.activation is not None and first.activation.group_size is not None
    if len(forms) > 1 or first.scales.shape[1] > 1 or has_groups:
        return None
    if not _are_equal([weight.input_scale for weight in weights]):
        return None
    return ScaledGrid(
        # As bytes: not everything is computed with float8.
        values=torch.cat([weight.values.view(torch.uint8) for weight in weights]).view(first.values.dtype),
        scales=torch.cat([row_scales(weight) for weight in weights]).unsqueeze(1),
        input_scale=first.input_scale,
        block_rows=1,
        block_columns=num_inputs,
        activation=first.activation,
    )


def _are_equal(tensors: Sequence[Tensor | None]) -> bool:
    first = tensors[0]
    if first is None:
        return all(tensor is None for tensor in tensors)
    return all(tensor is not None and torch.equal(tensor, first) for tensor in tensors)


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    dtypes = {tensor.dtype for tensor in tensors}
    return torch.cat(list(tensors) if len(dtypes) == 1 else [tensor.float() for tensor in tensors])


def _joined_present(tensors: Sequence[Tensor | None]) -> Tensor | None:
    present = [tensor for tensor in tensors if tensor is not None]
    return _joined(present) if present else None


def _zeros_of(weight: GroupedInts) -> Tensor:
    if weight.zeros is not None:
        return weight.zeros
    shape, middle = (weight.shape[0], weight.num_groups), 1 << (weight.bits - 1)
    return torch.full(shape, middle, dtype=torch.uint8, device=weight.words.device)
