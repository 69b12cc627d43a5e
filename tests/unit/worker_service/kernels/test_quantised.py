"""Products with quantised weights against products of what the weights, and rounded inputs, stand for."""

import numpy as np
import pytest
import torch

from loader.quantised.activations import Activation
from loader.quantised.packed import GroupedInts, Packed, ScaledGrid
from loader.quantised.rounding import rounded_weight
from tests.support.tiny_quantised import e4m3
from worker_service.kernels import quantised
from worker_service.kernels.quantised import make_joined_linear, make_quantised_linear, rounded_input

FP8_VALUES = sorted({e4m3(code) for code in range(256) if code & 0x7F != 0x7F})


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def nearest_fp8(value: float) -> float:
    """The float8 nearest to a value; of two as near the one whose mantissa is even, as IEEE rounds."""
    best = min(abs(value - candidate) for candidate in FP8_VALUES)
    near = [candidate for candidate in FP8_VALUES if abs(value - candidate) == best]
    return near[0] if len(near) == 1 else next(c for c in near if _mantissa(c) % 2 == 0)


def _mantissa(value: float) -> int:
    return next(code for code in range(256) if e4m3(code) == value) & 7


def rounded_by_definition(x: np.ndarray, activation: Activation, scale: float | None) -> np.ndarray:
    """One value after the other."""
    result = np.zeros_like(x)
    largest = 127.0 if activation.kind == "int8" else 448.0
    size = activation.group_size or x.shape[1]
    for row in range(x.shape[0]):
        for start in range(0, x.shape[1], size):
            group = x[row, start : start + size]
            step = np.float32(scale) if scale is not None else np.float32(np.abs(group).max() / np.float32(largest))
            for i, value in enumerate(group):
                scaled = np.float32(value / (step if step > 0 else np.float32(1)))
                if activation.kind == "int8":
                    stored = float(np.clip(np.rint(scaled), -128, 127))
                else:
                    stored = nearest_fp8(float(np.clip(scaled, -448, 448)))
                result[row, start + i] = np.float32(stored) * step
    return result


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("group_size", [None, 16])
def test_inputs_are_rounded_token_by_token(kind: str, group_size: int | None) -> None:
    activation = Activation("int8" if kind == "int8" else "fp8", group_size=group_size)
    x = draw(4, 40)
    x[1] *= 1000
    x[2] = 0
    expected = rounded_by_definition(x.numpy(), activation, None)
    np.testing.assert_allclose(rounded_input(x, activation, None).numpy(), expected, rtol=1e-6)
    alone = rounded_input(x[:1], activation, None)
    assert torch.equal(alone, rounded_input(x, activation, None)[:1])


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_static_scale_is_used_and_what_exceeds_it_is_clipped(kind: str) -> None:
    activation = Activation("int8" if kind == "int8" else "fp8", is_static=True)
    x = draw(3, 20)
    x[0, 0] = 1e6
    scale = torch.tensor(0.01)
    expected = rounded_by_definition(x.numpy(), activation, 0.01)
    np.testing.assert_allclose(rounded_input(x, activation, scale).numpy(), expected, rtol=1e-6)


def test_groups_of_a_share_begin_where_those_of_the_whole_do() -> None:
    activation = Activation("fp8", group_size=16)
    x = draw(2, 64)
    whole = rounded_input(x, activation, None)
    # A share that begins inside a group rounds the rest of it by what it sees of it.
    assert torch.equal(rounded_input(x[:, 24:], activation, None, first=24)[:, 8:], whole[:, 32:])


WEIGHTS: dict[str, Packed] = {
    "int4": rounded_weight(draw(50, 70, seed=1), "int4"),
    "int8": rounded_weight(draw(50, 70, seed=1), "int8"),
    "fp8": rounded_weight(draw(50, 70, seed=1), "fp8"),
}


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tile", [1, 7 * 70, 1 << 19])
def test_weights_alone(name: str, dtype: torch.dtype, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantised, "_TILE_VALUES", tile)
    weight, x, bias = WEIGHTS[name], draw(5, 70).to(dtype), draw(50, seed=3).to(dtype)
    expected = torch.nn.functional.linear(x, weight.dequantise().to(dtype), bias)
    result = make_quantised_linear(weight, bias)(x)
    assert result.dtype == dtype
    torch.testing.assert_close(result, expected, rtol=1e-2 if dtype != torch.float32 else 1e-5, atol=2e-2)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("group_size", [None, 32])
def test_rounded_inputs_times_rounded_weights(kind: str, group_size: int | None) -> None:
    """Equal to the sums of products of 8-bit values, scaled: W8A8 as int8 and as fp8."""
    activation = Activation("int8" if kind == "int8" else "fp8", group_size=group_size)
    plain = WEIGHTS["int8" if kind == "int8" else "fp8"]
    assert isinstance(plain, ScaledGrid)
    weight = ScaledGrid(plain.values, plain.scales, None, 1, 70, activation=activation)
    x = draw(5, 70)
    inputs = rounded_by_definition(x.numpy(), activation, None).astype(np.float64)
    expected = inputs @ plain.dequantise().numpy().astype(np.float64).T
    np.testing.assert_allclose(make_quantised_linear(weight)(x).numpy(), expected, rtol=1e-4, atol=1e-4)


def test_int8_products_are_those_of_the_integers() -> None:
    activation = Activation("int8")
    plain = WEIGHTS["int8"]
    assert isinstance(plain, ScaledGrid)
    x = draw(3, 70)
    scales = x.abs().amax(dim=1, keepdim=True) / 127
    integers = (x / scales).round().long()
    expected = (integers @ plain.values.long().T).double() * scales.double() * plain.scales.double().T
    weight = ScaledGrid(plain.values, plain.scales, None, 1, 70, activation=activation)
    torch.testing.assert_close(make_quantised_linear(weight)(x).double(), expected, rtol=1e-5, atol=1e-5)


def test_joined_products_keep_a_form_each() -> None:
    x, plain = draw(4, 70), draw(9, 70, seed=5)
    bias = draw(50, seed=6)
    joined = make_joined_linear([WEIGHTS["int4"], plain, WEIGHTS["fp8"]], [None, None, bias])(x)
    parts = [
        make_quantised_linear(WEIGHTS["int4"])(x),
        torch.nn.functional.linear(x, plain),
        make_quantised_linear(WEIGHTS["fp8"], bias)(x),
    ]
    torch.testing.assert_close(joined, torch.cat(parts, dim=1))
    whole = make_joined_linear([plain, plain], [draw(9), draw(9)])(x)
    torch.testing.assert_close(whole[:, :9], torch.nn.functional.linear(x, plain, draw(9)))


def test_a_static_input_needs_its_scale() -> None:
    with pytest.raises(ValueError, match="scale"):
        rounded_input(draw(1, 4), Activation("int8", is_static=True), None)


def test_forms_that_do_not_fit_together_are_refused() -> None:
    words = torch.zeros(4, 8, dtype=torch.uint8)
    scales = torch.ones(4, 1)
    with pytest.raises(ValueError, match="words"):
        GroupedInts(words, scales, None, None, 4, 17, 32)
    with pytest.raises(ValueError, match="zeros"):
        GroupedInts(words, scales, torch.zeros(4, 2, dtype=torch.uint8), None, 4, 16, 32)
    with pytest.raises(ValueError, match="groups"):
        GroupedInts(words, scales, None, None, 4, 16, 8)
    with pytest.raises(ValueError, match="cover"):
        ScaledGrid(torch.zeros(4, 8, dtype=torch.int8), torch.ones(1, 1), None, 2, 8)
