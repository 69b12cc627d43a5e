"""Weights of 4 bits by torch's operator, of which a CPU has a plain model, against what they stand for."""

from dataclasses import replace

import pytest
import torch

from loader.quantised.bits import pack_rows
from loader.quantised.packed import GroupedInts
from tests.support import int4_operator
from worker_service.kernels.torch_products.choose import TOLERANCES, largest_error
from worker_service.kernels.torch_products.int4 import INT4, MOST_ROWS, Int4Product
from worker_service.kernels.torch_products.int4_layout import places_of
from worker_service.kernels.torch_products.product import Target

TARGET = Target("cpu", (8, 0), torch.bfloat16)


@pytest.fixture(autouse=True)
def operator(monkeypatch: pytest.MonkeyPatch) -> None:
    int4_operator.install(monkeypatch)


def drawn(
    num_outputs: int, num_inputs: int, group_size: int, *, first: int = 0, symmetric: bool = False
) -> GroupedInts:
    generator = torch.Generator().manual_seed(1)
    num_groups = -(-(first + num_inputs) // group_size)
    shape = (num_outputs, num_groups)
    values = torch.randint(0, 16, (num_outputs, num_inputs), generator=generator).to(torch.uint8)
    zeros = torch.randint(0, 16, shape, generator=generator).to(torch.uint8)
    scales = torch.rand(shape, generator=generator).add_(0.2).half()
    return GroupedInts(
        pack_rows(values, 4), scales, None if symmetric else zeros, None, 4, num_inputs, group_size, first
    )


def in_any_order(weight: GroupedInts, num_groups: int) -> GroupedInts:
    group_of = torch.arange(weight.num_inputs) // weight.group_size % num_groups
    order = torch.randperm(len(group_of), generator=torch.Generator().manual_seed(3))
    return replace(weight, group_of=group_of[order].int())


def with_factors(weight: GroupedInts) -> GroupedInts:
    """As the types K of a GGUF have them: minima, and a scale a block of two groups."""
    num_outputs, num_groups = weight.scales.shape
    generator = torch.Generator().manual_seed(2)
    factors, others = (
        torch.randint(1, 64, (num_outputs, num_groups), generator=generator).to(torch.int8) for _ in "ab"
    )
    scales = (torch.rand(num_outputs, num_groups // 2, generator=generator) / 40).half()
    return replace(weight, scales=scales, zeros=None, minima=-scales * 8, factors=factors, minimum_factors=others)


WEIGHTS = {
    "groups of 32": drawn(24, 192, 32),
    "groups of 64": drawn(24, 192, 64),
    "groups of 128": drawn(24, 256, 128),
    "groups of 256": drawn(16, 512, 256),
    "groups of 512": drawn(16, 1024, 512),
    "symmetric": drawn(24, 128, 32, symmetric=True),
    "a scale a row": drawn(24, 4160, 4160),
    "a scale a row that fills no group": drawn(24, 70, 70),
    "odd sizes": drawn(21, 75, 32),
    "a share from within a group": drawn(24, 192, 128, first=64),
    "a share from within a small group": drawn(24, 176, 32, first=16),
    "minima": replace(drawn(24, 128, 32, symmetric=True), minima=-drawn(24, 128, 32).scales * 5),
    "factors": with_factors(drawn(24, 128, 32)),
    "any order": in_any_order(drawn(24, 256, 64), 4),
    "any order, places left over": in_any_order(drawn(24, 250, 64), 4),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_equals_products_with_what_the_weight_stands_for(name: str) -> None:
    weight = WEIGHTS[name]
    assert INT4.is_for(weight) and INT4.refusal(weight, TARGET) is None
    assert largest_error(Int4Product(weight, None), weight, torch.bfloat16) < TOLERANCES[torch.bfloat16]


@pytest.mark.parametrize("count", [3, MOST_ROWS + 3])
def test_the_bias_is_added(count: int) -> None:
    weight, generator = WEIGHTS["odd sizes"], torch.Generator().manual_seed(4)
    bias, x = torch.randn(21, generator=generator).bfloat16(), torch.randn(count, 75, generator=generator).bfloat16()
    without, with_bias = (Int4Product(weight, added)(x).float() for added in (None, bias))
    torch.testing.assert_close(with_bias, without + bias.float(), rtol=1e-2, atol=0.2)


def test_whole_tiles_are_what_the_operator_computes() -> None:
    """More rows than the operator is used for differ in the order of sums alone."""
    weight = WEIGHTS["groups of 64"]
    product = Int4Product(weight, None)
    x = torch.randn(MOST_ROWS + 1, 192, generator=torch.Generator().manual_seed(5)).bfloat16()
    torch.testing.assert_close(product(x)[:7], product(x[:7]), rtol=1e-2, atol=1e-1)


def test_it_holds_little_more_than_the_weight() -> None:
    weight = drawn(64, 1024, 128)
    product = Int4Product(weight, None)
    assert product.num_bytes == 64 * 512 + 64 * 8 * 4


@pytest.mark.parametrize(
    ("weight", "reason"),
    [
        (drawn(8, 96, 48), "groups of 48"),
        (in_any_order(drawn(8, 1200, 300), 4), "groups of 300"),
        (in_any_order(replace(drawn(8, 600, 128), scales=torch.ones(8, 20), zeros=None), 20), "places"),
    ],
)
def test_groups_that_the_operator_has_not_are_refused(weight: GroupedInts, reason: str) -> None:
    assert reason in str(INT4.refusal(weight, TARGET))
    with pytest.raises(ValueError, match=reason):
        places_of(weight)


def test_other_widths_and_types_are_not_computed() -> None:
    assert not INT4.is_for(GroupedInts(torch.zeros(8, 64).byte(), torch.ones(8, 2), None, None, 8, 64, 32))
    assert "float16" in str(INT4.refusal(WEIGHTS["symmetric"], replace(TARGET, dtype=torch.float16)))
    assert "8.0" in str(INT4.refusal(WEIGHTS["symmetric"], replace(TARGET, capability=(7, 5))))
