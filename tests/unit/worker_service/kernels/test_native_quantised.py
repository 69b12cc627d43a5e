"""The compiled products of integers against the definition, and against themselves cut differently."""

import ctypes
from dataclasses import replace

import pytest
import torch

from loader.quantised.activations import Activation
from loader.quantised.packed import Packed
from tests.support.integer_weights import IN, OUT, WEIGHTS, grid, grouped
from worker_service.kernels.layout import DTYPES
from worker_service.kernels.native import Pool, quantised_linear
from worker_service.kernels.quantised import rounded_input
from worker_service.kernels.quantised_layout import QuantisedProduct, pack_quantised

ROUNDED = {
    "by_token": grid(activation=Activation("int8")),
    "by_group": grid(activation=Activation("int8", group_size=32)),
    "by_wide_group": grid(activation=Activation("int8", group_size=64)),
    "blocks_by_token": grid(16, 32, activation=Activation("int8")),
}
# Of a result that is rounded once.
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def product_with(weight: Packed, dtype: torch.dtype = torch.float32) -> QuantisedProduct:
    product = pack_quantised([weight], dtype)
    assert product is not None
    return product


def draw(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Rows of different sizes, with outliers."""
    draws = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=draws) * torch.rand(rows, 1, generator=draws)
    x[:, columns // 3] *= 30
    return x


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 6, 7, 13, 270])
@pytest.mark.parametrize("name", WEIGHTS)
def test_in_float32_it_is_the_weight_made_whole_times_the_input(pool: Pool, name: str, rows: int) -> None:
    weight = WEIGHTS[name]
    x, bias = draw(rows, weight.shape[1]), torch.randn(OUT, generator=torch.Generator().manual_seed(1))
    exact = x.double() @ weight.dequantise().double().T + bias
    # What torch makes of it in float32 is as far from it.
    whole = torch.nn.functional.linear(x, weight.dequantise(), bias)
    assert error(quantised_linear(pool, x, product_with(weight), bias), exact) < 2 * error(whole, exact) + 1e-7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", WEIGHTS)
def test_in_sixteen_bits_little_but_the_results_rounding_is_lost(pool: Pool, name: str, dtype: torch.dtype) -> None:
    weight = WEIGHTS[name]
    x = draw(9, weight.shape[1]).to(dtype)
    exact = x.double() @ weight.dequantise().double().T
    assert error(quantised_linear(pool, x, product_with(weight, dtype)), exact) < 1.05 * error(exact.to(dtype), exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ROUNDED)
def test_rounded_inputs_are_rounded_as_the_reference_does(pool: Pool, name: str, dtype: torch.dtype) -> None:
    weight = ROUNDED[name]
    assert weight.activation is not None
    x = draw(9, IN).to(dtype)
    x[4] = 0
    exact = rounded_input(x.float(), weight.activation, None).double() @ weight.dequantise().double().T
    got = quantised_linear(pool, x, product_with(weight, dtype))
    torch.testing.assert_close(got.double(), exact, rtol=ROUNDING[dtype], atol=1e-5)


@pytest.mark.parametrize("name", ["int4_ordered", "int8_zeros", "rows", "by_token", "Q4_1", "Q4_K", "Q6_K"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_in_any_company_and_with_any_threads(
    library: ctypes.CDLL, pool: Pool, name: str, dtype: torch.dtype
) -> None:
    product = product_with({**WEIGHTS, **ROUNDED}[name], dtype)
    x = draw(300, product.depth).to(dtype)
    together = quantised_linear(pool, x, product)
    with Pool(library, 1) as alone:
        for row in (0, 11, 299):
            assert torch.equal(quantised_linear(alone, x[row : row + 1], product)[0], together[row])
        assert torch.equal(quantised_linear(alone, x[3:20], product), together[3:20])


@pytest.mark.parametrize("name", ["int4", "rows", "by_token", "int8_ordered"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_an_input_that_is_no_finite_number_shows_in_all_its_row(pool: Pool, name: str, value: float) -> None:
    x = draw(3, IN)
    x[1, 50] = value
    y = quantised_linear(pool, x, product_with({**WEIGHTS, **ROUNDED}[name]))
    assert y.isfinite().all(dim=1).tolist() == [True, False, True]
    assert not y[1].isfinite().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-38, 1e-30, 1e30, 1e36])
def test_inputs_of_any_size(pool: Pool, size: float, dtype: torch.dtype) -> None:
    weight = replace(grid(), scales=torch.full((OUT, 1), 1e-3))
    x = torch.zeros(2, IN, dtype=dtype)
    x[0, 7] = size
    x[0, 8] = -size / 2
    exact = x.double() @ weight.dequantise().double().T
    got = quantised_linear(pool, x, product_with(weight, dtype))
    # Below 2^-100 of one there are fewer bits.
    torch.testing.assert_close(got.double(), exact, rtol=1e-2 if size > 1e-32 else 1, atol=1e-38)
    assert (got[1] == 0).all()


def test_products_that_do_not_fit_are_refused(pool: Pool) -> None:
    product, x = product_with(grouped(ordered=True)), draw(2, IN)
    assert product.order is not None
    outside = product.order.clone()
    outside[3] = IN
    for wrong, name in (
        (replace(product, order=outside), "order"),
        (replace(product, words=product.words[:, :-1]), "inputs"),
        (replace(product, words=product.words.view(torch.int8)), "words"),
        (replace(product, scales=product.scales.double()), "scales"),
        (replace(product, zeros=torch.zeros(3, 3, 31, dtype=torch.uint8)), "zeros"),
        (replace(product, minima=torch.zeros(3, 2, 32, dtype=torch.float16)), "minima"),
        (replace(product, minima=product.scales.float()), "minima"),
        (replace(product, factors=torch.zeros(3, 3, 31, dtype=torch.int8)), "factors"),
        (replace(product, factors=torch.zeros(3, 3, 32, dtype=torch.int8), minima=product.scales), "minima"),
        (replace(product, span=8), "spans"),
        (replace(product, bits=5), "bits"),
        (replace(product, order=None, depth=1000), "1000"),
    ):
        with pytest.raises(ValueError, match=name):
            quantised_linear(pool, draw(2, wrong.depth), wrong)
    with pytest.raises(ValueError, match="x must"):
        quantised_linear(pool, x[:, :-1], product)
    with pytest.raises(ValueError, match="float64"):
        quantised_linear(pool, x.double(), product)
