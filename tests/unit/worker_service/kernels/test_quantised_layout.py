"""Quantised weights as the kernels want them, read back value by value."""

from typing import Any

import numpy as np
import pytest
import torch

from loader.quantised.activations import Activation
from loader.quantised.packed import GroupedInts, Packed
from tests.support.integer_weights import IN, OUT, WEIGHTS, blocks, grid, grouped
from worker_service.kernels.quantised_layout import (
    QuantisedProduct,
    flatten_product,
    pack_quantised,
    product_of,
)
from worker_service.kernels.spec import check_quantised


def unpacked(product: QuantisedProduct) -> torch.Tensor:
    """float32 [num_outputs, depth], one value after the other, as SwQuantised says."""
    result = np.zeros((product.num_outputs, product.depth), np.float32)
    arrays = {name: (t.float() if t.is_floating_point() else t).numpy() for name, t in product.tensors().items()}
    order, size = arrays.get("order"), product.num_inputs // product.num_groups
    groups_of_scale = product.num_groups // product.scales.shape[1]
    for row in range(product.num_outputs):
        panel, column = divmod(row, 32)

        def number(name: str, group: int, missing: int, panel: int = panel, column: int = column) -> Any:
            found = arrays.get(name)
            return missing if found is None else found[panel, group, column]

        for place in range(product.num_inputs):
            at = place if order is None else order[place]
            if not 0 <= at < product.depth:
                continue
            if product.bits == 8:
                word = int(arrays["words"][panel, place // 4, column, place % 4])
            else:
                byte = int(arrays["words"][panel, place // 8, column, place % 4])
                word = byte >> 4 if place % 8 >= 4 else byte & 15
            group = place // size
            scale = number("scales", group // groups_of_scale, 0) * np.float32(number("factors", group, 1))
            minimum = number("minima", group // groups_of_scale, 0) * np.float32(number("minimum_factors", group, 1))
            result[row, at] = scale * np.float32(word - int(number("zeros", group, product.zero))) + minimum
    return torch.from_numpy(result)


def packed(*weights: Packed, interleave: bool = False) -> QuantisedProduct:
    product = pack_quantised(weights, torch.bfloat16, interleave=interleave)
    assert product is not None
    check_quantised("it", product, product.num_outputs, product.depth)
    return product


@pytest.mark.parametrize("name", WEIGHTS)
def test_every_weight_is_what_it_stands_for(name: str) -> None:
    weight = WEIGHTS[name]
    product = packed(weight)
    assert torch.equal(unpacked(product), weight.dequantise())
    assert product.bits == (4 if name.startswith(("int2", "int3", "int4", "Q2", "Q3", "Q4")) else 8)
    # It is no larger than what it was made of, but for rows and inputs that are filled up.
    if isinstance(weight, GroupedInts) and weight.bits == product.bits and product.order is None:
        filled = 96 / OUT * product.num_inputs / weight.num_inputs
        assert product.words.nbytes == pytest.approx(weight.words.nbytes * filled)
    # Factors are multiplied in where a share does not begin and end with a block.
    if isinstance(weight, GroupedInts) and (weight.factors is None) == (product.factors is None):
        assert product.scales.element_size() == weight.scales.element_size()


@pytest.mark.parametrize(
    "weights",
    [
        [grouped(seed=1), grouped(seed=2), grouped(seed=3)],
        [grouped(zeros=True, seed=1), grouped(seed=2)],
        [grouped(4, 32, seed=1), grouped(4, 96, seed=2)],
        [grouped(4, 64, seed=1), grouped(4, 96, seed=2, zeros=True)],
        [grouped(4, seed=1), grouped(8, seed=2), grouped(2, seed=3)],
        [grouped(ordered=True, zeros=True, seed=1), grouped(ordered=True, seed=2)],
        [grid(seed=1), grouped(8, 32, seed=2)],
        [grouped(seed=1), grouped(dtype=torch.bfloat16, seed=2)],
        [blocks("Q4_1", seed=1), blocks("Q4_0", seed=2)],
        [blocks("Q4_K", seed=1), blocks("Q4_K", seed=2), blocks("Q6_K", seed=3)],
        [blocks("Q6_K", seed=1), blocks("Q3_K", seed=2)],
        [blocks("Q5_K", seed=1), blocks("Q8_0", seed=2), blocks("Q5_1", seed=3)],
    ],
)
def test_weights_of_one_input_are_one_product(weights: list[Packed]) -> None:
    assert torch.equal(unpacked(packed(*weights)), torch.cat([weight.dequantise() for weight in weights]))


@pytest.mark.parametrize("zeros", [False, True])
def test_gate_and_up_come_in_turn(zeros: bool) -> None:
    gate, up = (grouped(num_outputs=48, zeros=zeros, seed=seed) for seed in (1, 2))
    parts = [weight.dequantise().view(3, 16, IN) for weight in (gate, up)]
    assert torch.equal(unpacked(packed(gate, up, interleave=True)), torch.stack(parts, 1).view(96, IN))


def test_what_has_no_layout_in_common_is_no_product() -> None:
    ordered = grouped(ordered=True)
    assert ordered.group_of is not None
    other = GroupedInts(ordered.words, ordered.scales, None, ordered.group_of.flip(0), 4, IN, 32)
    rounded = grid(activation=Activation("int8"))
    assert pack_quantised([ordered, other], torch.bfloat16) is None
    assert pack_quantised([ordered, grouped()], torch.bfloat16) is None
    assert pack_quantised([grid(), rounded], torch.bfloat16) is None
    # All inputs in one of very many groups would be a weight many times as large.
    lonely = torch.zeros(IN, dtype=torch.int32)
    lonely[0] = 1
    many = GroupedInts(ordered.words, torch.ones(OUT, 40), None, lonely, 4, IN, 3)
    assert pack_quantised([many], torch.bfloat16) is None


@pytest.mark.parametrize(
    "activation", [Activation("fp8"), Activation("int8", is_static=True), Activation("int8", False, 24)]
)
def test_inputs_that_are_rounded_otherwise_are_refused(activation: Activation) -> None:
    with pytest.raises(ValueError, match="compute"):
        pack_quantised([grid(activation=activation)], torch.bfloat16)


@pytest.mark.parametrize(
    "weight", [grouped(ordered=True, zeros=True), grid(activation=Activation("int8", group_size=32))]
)
def test_it_is_tensors_by_name_and_back(weight: Packed) -> None:
    product = packed(weight)
    tensors = flatten_product("it", product)
    again = product_of({name.removeprefix("it."): tensor for name, tensor in tensors.items()})
    assert (again.activation, again.span, again.zero) == (product.activation, product.span, product.zero)
    assert torch.equal(unpacked(again), unpacked(product))
    assert product.nbytes == sum(tensor.nbytes for name, tensor in tensors.items() if name != "it.form")
