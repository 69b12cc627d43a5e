"""Torch's products with eight bits against the reference, and the choice of a product."""

import inspect
from collections.abc import Iterator, MutableMapping
from dataclasses import replace
from typing import Any

import pytest
import structlog
import torch
from torch import Tensor

from loader.quantised.activations import Activation
from loader.quantised.packed import GroupedInts, Packed, ScaledGrid
from loader.quantised.rounding import rounded_weight
from tests.support import int4_operator
from worker_service.kernels.quantised import make_joined_linear, make_quantised_linear
from worker_service.kernels.torch_products.choose import KINDS, TOLERANCES, ProductChooser, is_right, largest_error
from worker_service.kernels.torch_products.fp8 import FP8, Fp8Product
from worker_service.kernels.torch_products.int4 import Int4Product
from worker_service.kernels.torch_products.int8 import INT8, WIDENED, Int8Product, WidenedProduct
from worker_service.kernels.torch_products.join import join
from worker_service.kernels.torch_products.product import ProductKind, Target, packed_bytes

BF16, F32 = torch.bfloat16, torch.float32


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def target(dtype: torch.dtype = BF16, capability: tuple[int, int] = (9, 0)) -> Target:
    return Target("cpu", capability, dtype)


def grid(
    kind: str,
    num_outputs: int = 48,
    num_inputs: int = 64,
    *,
    is_static: bool = False,
    is_rounded: bool = True,
    input_scale: float = 0.03,
    seed: int = 1,
) -> ScaledGrid:
    """A weight with a scale a row."""
    weight = rounded_weight(draw(num_outputs, num_inputs, seed=seed), "int8" if kind == "int8" else "fp8")
    assert isinstance(weight, ScaledGrid)
    activation = Activation("int8" if kind == "int8" else "fp8", is_static=is_static) if is_rounded else None
    return replace(weight, activation=activation, input_scale=torch.tensor(input_scale) if is_static else None)


def with_one_scale(weight: ScaledGrid, *, first_row: int = 0) -> ScaledGrid:
    return replace(weight, scales=weight.scales[:1], block_rows=1000, first_row=first_row)


def in_blocks(weight: ScaledGrid) -> ScaledGrid:
    """A rank's share from within a block of rows."""
    num_blocks = -(-(weight.shape[0] + 6) // 12)
    return replace(
        weight, scales=weight.scales[:1] * torch.arange(1, num_blocks + 1)[:, None], block_rows=12, first_row=6
    )


@pytest.fixture
def lines() -> Iterator[list[MutableMapping[str, Any]]]:
    with structlog.testing.capture_logs() as captured:
        yield captured


@pytest.mark.parametrize("kind", [INT8, FP8], ids=["int8", "fp8"])
@pytest.mark.parametrize(
    "sizes", [{}, {"num_outputs": 21, "num_inputs": 50}, {"num_outputs": 1}, {"num_outputs": 300, "num_inputs": 3000}]
)
@pytest.mark.parametrize("is_static", [False, True])
def test_rounded_inputs_and_weights(kind: ProductKind, sizes: dict[str, int], is_static: bool) -> None:
    weight = grid(kind.name[:4].strip(), is_static=is_static, **sizes)
    for each in (weight, with_one_scale(weight), with_one_scale(weight, first_row=16), in_blocks(weight)):
        assert kind.is_for(each) and kind.refusal(each, target()) is None
        # Rounded alike, they differ by how sums and results are rounded.
        assert largest_error(kind.make(each, None), each, BF16) < 5e-3


def test_integers_are_summed_exactly_whatever_the_type() -> None:
    weight = grid("int8", num_inputs=3000)
    for dtype in (F32, torch.float16):
        assert INT8.refusal(weight, target(dtype)) is None
    assert largest_error(Int8Product(weight, None), weight, F32) < 1e-6
    product, x = Int8Product(weight, None), draw(40, 3000).bfloat16()
    for count in (1, 16, 17):
        assert torch.equal(product(x[:count]), product(x)[:count])


def test_weights_alone_are_widened() -> None:
    weight = grid("int8", is_rounded=False, num_outputs=70)
    assert WIDENED.is_for(weight) and WIDENED.refusal(weight, target()) is None
    assert largest_error(WidenedProduct(weight, None), weight, BF16) < TOLERANCES[BF16]
    product, bias, x = WidenedProduct(weight, draw(70).bfloat16()), draw(70).bfloat16(), draw(5, 64).bfloat16()
    product._tile_rows = 33
    torch.testing.assert_close(product(x), make_quantised_linear(weight, bias)(x), rtol=2e-2, atol=2e-1)


@pytest.mark.parametrize("kind", [INT8, FP8], ids=["int8", "fp8"])
def test_the_bias_is_added(kind: ProductKind) -> None:
    weight, bias, x = grid(kind.name[:4].strip(), 21), draw(21).bfloat16(), draw(5, 64).bfloat16()
    got, expected = kind.make(weight, bias)(x), make_quantised_linear(weight, bias)(x)
    torch.testing.assert_close(got, expected, rtol=1e-2, atol=5e-2)


def test_what_is_computed_otherwise() -> None:
    in_groups = Activation("fp8", group_size=32)
    blocks = replace(grid("fp8"), scales=torch.ones(2, 2), block_rows=32, block_columns=32)
    others = [
        replace(grid("fp8"), activation=in_groups),
        grid("fp8", is_rounded=False),
        replace(grid("int8"), activation=Activation("int8", group_size=32)),
        blocks,
        GroupedInts(torch.zeros(8, 64).byte(), torch.ones(8, 2), None, None, 8, 64, 32),
    ]
    assert not any(kind.is_for(weight) for kind in KINDS for weight in others)
    for weight in others:
        # Without a word: there is nothing that might have been.
        assert not isinstance(ProductChooser(target())([weight], [None]), Fp8Product | Int8Product)
    assert "float32" in str(FP8.refusal(grid("fp8"), target(F32)))
    assert "8.9" in str(FP8.refusal(grid("fp8"), target(capability=(8, 6))))
    assert "7.5" in str(INT8.refusal(grid("int8"), target(capability=(7, 0))))


def test_an_operator_that_torch_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "_scaled_mm")
    assert "no _scaled_mm" in str(FP8.refusal(grid("fp8"), target()))


def wrong(weight: Packed, bias: Tensor | None) -> Int8Product:
    assert isinstance(weight, ScaledGrid)
    return Int8Product(replace(weight, scales=weight.scales.flip(0)), bias)


def failing(weight: Packed, bias: Tensor | None) -> Int8Product:
    raise RuntimeError("no such kernel image")


@pytest.mark.parametrize(
    ("make", "event", "told"),
    [(wrong, "quantised_product_wrong", 0.1), (failing, "quantised_product_unusable", "kernel")],
)
def test_a_product_that_fails_or_errs_is_not_used_and_that_is_told_once(
    make: Any, event: str, told: object, lines: list[MutableMapping[str, Any]]
) -> None:
    kind = replace(INT8, make=make)
    chooser, x = ProductChooser(target(), [kind]), draw(4, 64).bfloat16()
    for seed in (1, 2):
        weight = grid("int8", seed=seed)
        product = chooser([weight], [None])
        assert not isinstance(product, Int8Product)
        assert torch.equal(product(x), make_quantised_linear(weight)(x))
    assert [line["event"] for line in lines] == [event]
    assert lines[0]["largest_error"] > told if isinstance(told, float) else str(told) in lines[0]["reason"]
    assert chooser.added_bytes == 0


def test_what_is_chosen_is_told_and_tried_once_a_class(lines: list[MutableMapping[str, Any]]) -> None:
    num_made = 0

    def counted(weight: Packed, bias: Tensor | None) -> Int8Product:
        nonlocal num_made
        num_made += 1
        return Int8Product(weight, bias)

    chooser = ProductChooser(target(), [replace(INT8, make=counted)])
    for seed in (1, 2, 3):
        assert isinstance(chooser([grid("int8", seed=seed)], [None]), Int8Product)
    assert [line["event"] for line in lines] == ["quantised_product_chosen"]
    assert num_made == 4
    assert isinstance(chooser([grid("int8", num_outputs=56)], [None]), Int8Product)
    assert len(lines) == 2


def test_running_out_of_memory_is_no_reason_against_a_product() -> None:
    def starved(weight: Packed, bias: Tensor | None) -> Int8Product:
        raise torch.OutOfMemoryError("out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        ProductChooser(target(), [replace(INT8, make=starved)])([grid("int8")], [None])


def test_a_weight_of_zeros_proves_nothing(lines: list[MutableMapping[str, Any]]) -> None:
    weight = grid("int8")
    assert not is_right(INT8, replace(weight, values=torch.zeros_like(weight.values)), target())
    assert "zero" in lines[0]["reason"]


def of_4_bits(num_outputs: int, seed: int, *, symmetric: bool = False) -> GroupedInts:
    weight = rounded_weight(draw(num_outputs, 64, seed=seed), "int4")
    assert isinstance(weight, GroupedInts)
    return replace(weight, zeros=None, scales=weight.scales.half()) if symmetric else weight


JOINED: dict[str, tuple[list[Packed], type]] = {
    "int8": ([grid("int8", 48), with_one_scale(grid("int8", 16, seed=2)), grid("int8", 24, seed=3)], Int8Product),
    "static": ([grid("fp8", 48, is_static=True), grid("fp8", 16, is_static=True, seed=2)], Fp8Product),
    "weights": ([grid("int8", 48, is_rounded=False), grid("int8", 16, is_rounded=False, seed=2)], WidenedProduct),
    "int4": ([of_4_bits(48, 1), of_4_bits(16, 2, symmetric=True)], Int4Product),
}


@pytest.mark.parametrize("name", JOINED)
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_of_one_input_are_one_product(name: str, has_bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    int4_operator.install(monkeypatch)
    weights, kind = JOINED[name]
    biases: list[Tensor | None] = [None] * len(weights)
    if has_bias:
        biases[0] = draw(weights[0].shape[0]).bfloat16()
    x, chooser = draw(5, 64).bfloat16(), ProductChooser(target())
    product = chooser(weights, biases)
    assert isinstance(product, kind)
    torch.testing.assert_close(product(x), make_joined_linear(weights, biases)(x), rtol=2e-2, atol=2e-1)
    assert chooser.added_bytes == product.num_bytes - sum(map(packed_bytes, weights))  # type: ignore[attr-defined]


NOT_JOINED: dict[str, list[Packed]] = {
    "other scales of inputs": [grid("fp8", is_static=True), grid("fp8", is_static=True, input_scale=0.05, seed=2)],
    "rounded and not": [grid("int8"), grid("int8", is_rounded=False, seed=2)],
    "int8 and int4": [grid("int8"), of_4_bits(16, 1)],
    "other groups": [of_4_bits(16, 1), replace(of_4_bits(16, 2), group_size=64, scales=torch.ones(16, 1), zeros=None)],
    "other orders": [replace(of_4_bits(16, 1), group_of=torch.arange(64).int() % 2), of_4_bits(16, 2)],
}


@pytest.mark.parametrize("name", NOT_JOINED)
def test_what_differs_keeps_a_product_each(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    int4_operator.install(monkeypatch)
    weights = NOT_JOINED[name]
    assert join(weights) is None
    x, product = draw(5, 64).bfloat16(), ProductChooser(target())(weights, [None] * len(weights))
    torch.testing.assert_close(product(x), make_joined_linear(weights, [None, None])(x), rtol=2e-2, atol=2e-1)
    kernels = inspect.getclosurevars(product).nonlocals["kernels"]
    assert all(isinstance(kernel, Int8Product | WidenedProduct | Fp8Product | Int4Product) for kernel in kernels)


def test_a_weight_that_is_needed_elsewhere_is_not_laid_out_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    int4_operator.install(monkeypatch)
    chooser, weight = ProductChooser(target()), of_4_bits(16, 1)
    assert isinstance(chooser([weight], [None]), Int4Product)
    assert not isinstance(chooser([weight], [None], is_shared=True), Int4Product)
    integers = grid("int8", is_rounded=False)
    product = chooser([integers], [None], is_shared=True)
    assert isinstance(product, WidenedProduct)
    assert product._values.data_ptr() == integers.values.data_ptr()


def test_weights_that_are_not_quantised_stay_as_they_are() -> None:
    chooser, x, plain = ProductChooser(target()), draw(5, 64), draw(9, 64, seed=4)
    torch.testing.assert_close(chooser([plain], [None])(x), torch.nn.functional.linear(x, plain))
    mixed = chooser([plain.bfloat16(), grid("int8")], [None, None])(x.bfloat16())
    assert mixed.shape == (5, 57)
