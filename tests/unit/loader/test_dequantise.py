import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from loader.dequantise import dequantise
from loader.gguf_format import GGML_TYPES

QUANTISED = {name: (values, size) for name, values, size in GGML_TYPES.values() if values > 1}
# Where float16 scales lie in a block: random bytes there would be NaN or infinite.
SCALES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}


def random_blocks(name: str, num_blocks: int = 37) -> NDArray[np.uint8]:
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (num_blocks, QUANTISED[name][1]), dtype=np.uint8)
    for offset in SCALES[name]:
        scales = rng.standard_normal(num_blocks).astype(np.float16)
        blocks[:, offset : offset + 2] = scales.view(np.uint8).reshape(num_blocks, 2)
    return blocks


@pytest.mark.parametrize("name", QUANTISED)
def test_bit_for_bit_as_the_reference(name: str) -> None:
    blocks = random_blocks(name)
    expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name])
    out = torch.empty(blocks.shape[0], QUANTISED[name][0])
    dequantise(torch.from_numpy(blocks).view(-1), name, out)
    assert np.isfinite(expected).all()
    np.testing.assert_array_equal(out.numpy().view(np.int32), expected.astype(np.float32).view(np.int32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", QUANTISED)
def test_rounds_once_to_the_wanted_type(name: str, dtype: torch.dtype) -> None:
    raw = torch.from_numpy(random_blocks(name)).view(-1)
    exact = torch.empty(37, QUANTISED[name][0])
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
