"""Packed layouts, element by element."""

import pytest
import torch

from worker_service.kernels.kv_rounding import restore_heads, round_heads
from worker_service.kernels.layout import DTYPES, KvLayout, empty_huge, pack_gate_up, pack_linear


@pytest.mark.parametrize(("dtype", "depth"), [(torch.float32, 1), (torch.bfloat16, 2), (torch.float16, 1)])
def test_pack_linear(dtype: torch.dtype, depth: int) -> None:
    weight = torch.randn(40, 6).to(dtype)
    packed = pack_linear(weight)
    assert packed.shape == (2, 6 // depth, 32, depth) and packed.is_contiguous()
    for row in range(64):
        for column in range(6):
            expected = weight[row, column] if row < 40 else 0.0
            assert packed[row // 32, column // depth, row % 32, column % depth] == expected


@pytest.mark.parametrize("dtype", DTYPES)
def test_packing_into_a_place_of_its_own(dtype: torch.dtype) -> None:
    weight = torch.randn(40, 20).to(dtype)[:, 2:8]
    out = torch.empty_like(pack_linear(weight))
    assert pack_linear(weight, out) is out
    assert torch.equal(out, pack_linear(weight.contiguous()))


def test_gate_and_up_take_turns() -> None:
    gate, up = torch.randn(32, 4), torch.randn(32, 4)
    packed = pack_gate_up(gate, up)
    for panel in range(2):
        rows = slice(16 * panel, 16 * panel + 16)
        assert torch.equal(packed[panel, :, :16, 0].T, gate[rows])
        assert torch.equal(packed[panel, :, 16:, 0].T, up[rows])


def test_what_cannot_be_packed_is_refused() -> None:
    with pytest.raises(ValueError, match="float64"):
        pack_linear(torch.zeros(32, 4, dtype=torch.float64))
    with pytest.raises(ValueError, match="pairs"):
        pack_linear(torch.zeros(32, 5, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="16 rows"):
        pack_gate_up(torch.zeros(24, 4), torch.zeros(24, 4))
    with pytest.raises(ValueError, match="block_size 8"):
        KvLayout(1, 1, 1, 8, 16, torch.float32)


@pytest.mark.parametrize(("dtype", "depth"), [(torch.float32, 1), (torch.bfloat16, 2), (torch.float16, 1)])
def test_keys_and_values(dtype: torch.dtype, depth: int) -> None:
    layout = KvLayout(3, 2, 2, 16, 32, dtype)
    cache = layout.allocate()
    assert cache.nbytes == layout.num_bytes == 3 * layout.block_bytes and not cache.any()
    keys, values = torch.randn(2, 3, 2, 16, 32).to(dtype)
    layout.from_plain(cache, 1, keys, values)
    assert not cache[:, 0].any()
    for got, expected in zip(layout.to_plain(cache, 1), (keys, values), strict=True):
        assert torch.equal(got, expected)
    block, head, position, dim = 2, 1, 5, 9
    stored_key = cache[block, 1, 0, head].view(32 // depth, 16, depth)[dim // depth, position, dim % depth]
    stored_value = cache[block, 1, 1, head].view(16 // depth, 32, depth)[position // depth, dim, position % depth]
    assert stored_key == keys[block, head, position, dim] and stored_value == values[block, head, position, dim]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounded_keys_and_values(dtype: torch.dtype) -> None:
    layout = KvLayout(3, 2, 2, 16, 32, dtype, torch.int8)
    cache = layout.allocate()
    assert layout.block_bytes == 2 * 2 * 2 * 16 * (32 + 4)
    assert cache.dtype == torch.int8 and cache.nbytes == layout.num_bytes == 3 * layout.block_bytes
    keys, values = torch.randn(2, 3, 2, 16, 32).to(dtype)
    layout.from_plain(cache, 1, keys, values)
    assert not cache[:, 0].any()
    for got, whole in zip(layout.to_plain(cache, 1), (keys, values), strict=True):
        assert got.dtype == dtype and torch.equal(got, restore_heads(*round_heads(whole, torch.int8), dtype))
    with pytest.raises(ValueError, match="int8"):
        KvLayout(1, 1, 1, 16, 16, dtype, torch.float8_e4m3fn)


def test_huge_memory_is_zeroed_and_outlives_its_maker() -> None:
    memory = empty_huge(5 * 2**20)
    assert memory.data_ptr() % 2**21 == 0 and memory.numel() == 5 * 2**20
    assert not memory.any()
    memory.fill_(7)
    assert memory.view(torch.int32)[-1] == 0x07070707
