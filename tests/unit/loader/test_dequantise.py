import gguf
import numpy as np
import pytest
import torch

from loader.dequantise import dequantise
from tests.support.gguf_blocks import BLOCKS, random_blocks


@pytest.mark.parametrize("name", BLOCKS)
def test_bit_for_bit_as_the_reference(name: str) -> None:
    blocks = random_blocks(name, 37)
    expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name])
    out = torch.empty(blocks.shape[0], BLOCKS[name][0])
    dequantise(torch.from_numpy(blocks).view(-1), name, out)
    assert np.isfinite(expected).all()
    np.testing.assert_array_equal(out.numpy().view(np.int32), expected.astype(np.float32).view(np.int32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", BLOCKS)
def test_rounds_once_to_the_wanted_type(name: str, dtype: torch.dtype) -> None:
    raw = torch.from_numpy(random_blocks(name, 37)).view(-1)
    exact = torch.empty(37, BLOCKS[name][0])
    rounded = torch.empty_like(exact, dtype=dtype)
    dequantise(raw, name, exact)
    dequantise(raw, name, rounded)
    assert torch.equal(rounded, exact.to(dtype))


@pytest.mark.parametrize(("name", "dtype"), [("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16)])
def test_plain_types(name: str, dtype: torch.dtype) -> None:
    values = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    out = torch.empty(3, 5)
    dequantise(values.view(-1).view(torch.uint8), name, out)
    assert torch.equal(out, values.float())
