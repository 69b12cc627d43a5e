"""Recorded decodes on a device that only pretends to record, and paged kernels, against plain attention."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.tiny_checkpoint import TINY_FAMILIES, make_tiny_llama
from tests.support.tiny_runner import Driver, load_tiny, make_runner
from worker_service.kernels.kv_rounding import KV_DTYPES
from worker_service.kernels.paged.reference import ReferenceKernel
from worker_service.runtime.decode_graphs import Recorded, bucket_sizes
from worker_service.runtime.executor import Paging
from worker_service.runtime.step import Sampling

NUM_OUTPUTS = 12


class FakeRecorder:
    """Computes anew at each replay, into the memory of the first result, as a graph does."""

    def __init__(self) -> None:
        self.num_replays: dict[int, int] = {}

    def record(self, compute: Callable[[], torch.Tensor]) -> Recorded:
        result = compute()
        size = len(result)
        self.num_replays[size] = 0

        def replay() -> None:
            self.num_replays[size] += 1
            result.copy_(compute())

        return Recorded(result, replay)

    def driver_bytes(self) -> int:
        return 7


@pytest.mark.parametrize("most", [1, 2, 3, 16, 17, 200, 1000, 1024, 4096])
def test_every_batch_has_a_size_that_is_not_much_larger(most: int) -> None:
    sizes = bucket_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == min(most, 1024)
    for count in range(1, sizes[-1] + 1):
        fitting = min(size for size in sizes if size >= count)
        assert fitting < 2 * count or fitting == count
        assert count <= 32 or fitting - count <= count // 4


def outputs(path: Path, paging: Paging | None, stored: torch.dtype | None = None) -> list[list[int]]:
    """Sequences that come and go, in chunks and decodes, some of them drawn."""
    runner, cache = make_runner(load_tiny(path), stored=stored, paging=paging)
    driver, rng = Driver(runner, cache), random.Random(0)
    for i, length in enumerate((1, 3, 4, 17, 40, 90)):
        prompt = [rng.randrange(320) for _ in range(length)]
        driver.add(i, prompt, Sampling(temperature=1.0, seed=i) if i % 2 else None)
    while waiting := [s for s in driver.sequences.values() if len(s.output) < NUM_OUTPUTS]:
        if driver.step_id and rng.random() < 0.1:
            driver.preempt(next(s.sequence_id for s in waiting if s.known))
        chosen = waiting if rng.random() < 0.7 else waiting[: rng.randrange(1, len(waiting) + 1)]
        output = driver.step({s.sequence_id: rng.choice((5, 60)) for s in chosen})
        assert not output.errors
    return [s.output for s in driver.sequences.values()]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_kernels_and_recorded_decodes_give_the_same_tokens(tmp_path: Path, family: str) -> None:
    path = make_tiny_llama(tmp_path / family, config_overrides=TINY_FAMILIES[family])
    recorder = FakeRecorder()
    expected = outputs(path, None)
    assert outputs(path, Paging(ReferenceKernel())) == expected
    assert outputs(path, Paging(ReferenceKernel(), recorder)) == expected
    assert set(recorder.num_replays) == {1, 2, 4, 8, 16}
    assert recorder.num_replays[8] and sum(recorder.num_replays.values()) > 5


@pytest.mark.parametrize("stored", KV_DTYPES.values(), ids=KV_DTYPES)
def test_kernels_and_recorded_decodes_read_rounded_caches(tiny_path: Path, stored: torch.dtype) -> None:
    expected = outputs(tiny_path, None, stored)
    assert outputs(tiny_path, Paging(ReferenceKernel(), FakeRecorder()), stored) == expected


def test_rows_that_nobody_asked_for_write_the_spare_block_alone(tiny_path: Path) -> None:
    recorder = FakeRecorder()
    runner, cache = make_runner(load_tiny(tiny_path), num_blocks=20, paging=Paging(ReferenceKernel(), recorder))
    driver = Driver(runner, cache)
    for i in range(3):
        driver.add(i, [5, 6, 7])
    driver.step(dict.fromkeys(range(3), 100))
    cache._data[cache.num_blocks] = torch.nan
    used = {block for sequence in driver.sequences.values() for block in sequence.blocks}
    others = [block for block in range(cache.num_blocks) if block not in used]
    driver.step(dict.fromkeys(range(3), 1))
    assert recorder.num_replays[4] == 1, "three rows are computed as four"
    assert not bool(cache._data[others].any())
    assert not bool(cache._data[cache.num_blocks, :, :, :, 0].isnan().any()), "the fourth row wrote there"
    assert not bool(cache._data[: cache.num_blocks].isnan().any())
