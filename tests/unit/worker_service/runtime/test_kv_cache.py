import pytest
import torch

from worker_service.kernels.kv_rounding import KV_DTYPES, restore_heads, round_heads
from worker_service.runtime.errors import RuntimeFailure
from worker_service.runtime.kv_cache import CacheShape, KvCache

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_written_by_slot_is_gathered_by_block(dtype: torch.dtype) -> None:
    shape = CacheShape(3, 2, 8, dtype)
    cache = KvCache(shape, 5, 4, CPU)
    assert cache.num_bytes == cache._data.nbytes == 5 * 4 * shape.bytes_per_token
    key, value = torch.randn(2, 6, 2, 8).to(dtype)
    slots = torch.tensor([12, 13, 14, 15, 4, 5])  # block 3, then the start of block 1
    cache.write(1, cache.slot_rows(slots), key, value)
    keys, values = cache.gather(1, cache.block_rows(torch.tensor([[3, 1]])))
    for gathered, written in ((keys, key), (values, value)):
        by_head = gathered.view(2, 8, 8)
        assert torch.equal(by_head[:, :6], written.transpose(0, 1))
        assert not bool(by_head[:, 6:].any())
    assert not bool(cache._data[:, [0, 2]].any())


@pytest.mark.parametrize("stored", KV_DTYPES.values(), ids=KV_DTYPES)
def test_what_is_rounded_is_read_as_it_was_answered(stored: torch.dtype) -> None:
    shape = CacheShape(3, 2, 8, torch.bfloat16, stored)
    cache = KvCache(shape, 5, 4, CPU, num_spare=1)
    assert shape.bytes_per_token == 3 * 2 * 2 * (8 + 4)
    assert cache.num_bytes == 6 * 4 * shape.bytes_per_token
    key, value = torch.randn(2, 6, 2, 8).bfloat16()
    slots = torch.tensor([12, 13, 14, 15, 4, 5])
    answered = cache.write(1, cache.slot_rows(slots), key, value)
    gathered = cache.gather(1, cache.block_rows(torch.tensor([[3, 1]])))
    for read, rounded, written in zip(gathered, answered, (key, value), strict=True):
        by_head = read.view(2, 8, 8)
        assert torch.equal(by_head[:, :6], rounded.transpose(0, 1)) and not bool(by_head[:, 6:].any())
        assert torch.equal(rounded, restore_heads(*round_heads(written, stored), torch.bfloat16))
    cache.clear(torch.tensor([3, 1]))
    assert not any(bool(part.any()) for part in cache.gather(1, cache.block_rows(torch.tensor([[3, 1]]))))


def test_clearing_zeroes_these_blocks_in_all_layers() -> None:
    cache = KvCache(CacheShape(2, 1, 4, torch.float32), 4, 2, CPU)
    cache._data.fill_(float("nan"))
    cache.clear(torch.tensor([2, 0]))
    assert not bool(cache._data[[0, 2]].any())
    assert bool(cache._data[[1, 3]].isnan().all())


def test_a_cache_that_does_not_fit_says_what_it_needs() -> None:
    with pytest.raises(RuntimeFailure) as failed:
        KvCache(CacheShape(100, 100, 1000, torch.float32), 2**22, 1024, CPU)
    assert failed.value.code == "out_of_memory"
    assert failed.value.metadata["needed_bytes"] in str(failed.value)
    assert "num_kv_blocks" in str(failed.value)
