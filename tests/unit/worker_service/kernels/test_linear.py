"""Packed products against torch's own."""

import pytest
import torch

from worker_service.kernels.linear import can_pack, make_linear, plain_linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 3, 32, 200])
def test_equals_plain_linear(dtype: torch.dtype, with_bias: bool, num_rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(48, 40, generator=generator) / 6).to(dtype)
    bias = torch.randn(48, generator=generator).to(dtype) if with_bias else None
    x = torch.randn(num_rows, 40, generator=generator).to(dtype)
    exact = plain_linear(weight.double(), None if bias is None else bias.double())(x.double())
    got = make_linear(weight, bias)(x)
    assert got.dtype == dtype
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}[dtype]
    torch.testing.assert_close(got.double(), exact, rtol=tolerance, atol=tolerance)


def test_a_slice_of_a_tensor_can_be_packed() -> None:
    whole = torch.randn(20, 30)
    weight = whole[:, 3:17]
    x = torch.randn(4, 14)
    torch.testing.assert_close(make_linear(weight)(x), x @ weight.T)


def test_types_without_a_packed_product_are_left_to_torch() -> None:
    assert not can_pack(torch.zeros(2, 2, dtype=torch.float16))
    assert not can_pack(torch.zeros(2, 2, dtype=torch.float64))
