from pathlib import Path

import pytest
import torch

from loader.reading.extents import LONG_RUN_BYTES, PAGE_BYTES, Extent, extents, least_room
from loader.reading.results import Result, plan_results
from loader.tensors import TensorInfo, WeightSlice
from tests.support.fake_checkpoint import fake_checkpoint

FILE = Path("f.safetensors")


def stored(name: str, shape: tuple[int, ...], offset: int, dtype: str = "F32") -> TensorInfo:
    size = {"F32": 4, "BF16": 2}[dtype]
    return TensorInfo(name, dtype, shape, FILE, offset, torch.Size(shape).numel() * size, name)


def planned(infos: list[TensorInfo], wanted: list[WeightSlice]) -> list[Result]:
    return plan_results(fake_checkpoint(infos), wanted, torch.float32)


def cut(infos: list[TensorInfo], wanted: list[WeightSlice], room: int) -> list[Extent]:
    return list(extents(planned(infos, wanted), lambda: room))


def test_neighbours_are_read_together_up_to_the_room() -> None:
    sizes = [10, 3000, 10, 5, 9000]
    infos, offset = [], 1000
    for number, size in enumerate(sizes):
        infos.append(stored(f"t{number}", (size,), offset))
        offset += 4 * size
    found = cut(infos, [WeightSlice(info.name, info.shape) for info in infos], 5 * PAGE_BYTES)
    assert [(extent.start, extent.stop) for extent in found] == [(1000, 20480), (20480, 40960), (40960, offset)]
    assert [extent.number for extent in found] == [0, 1, 2]
    assert sum(extent.wanted_bytes for extent in found) == 4 * sum(sizes)
    assert all(extent.buffer_bytes <= 5 * PAGE_BYTES for extent in found)


def test_a_gap_of_pages_is_not_read() -> None:
    infos = [stored("a", (10,), 0), stored("b", (10,), 40 + PAGE_BYTES - 1), stored("c", (10,), 3 * PAGE_BYTES)]
    found = cut(infos, [WeightSlice(info.name, info.shape) for info in infos], 64 * PAGE_BYTES)
    assert [[fragment.source.info.name for fragment in extent.fragments] for extent in found] == [["a", "b"], ["c"]]


def test_short_runs_are_read_with_what_lies_between_and_shared() -> None:
    info = stored("a", (100, 1024), 8, "BF16")
    (found,) = cut([info], [WeightSlice("a", (100, 1024), 1, 256, 512)], 1 << 20)
    assert found.is_shared
    assert (found.start, found.stop) == (8 + 512, 8 + 99 * 2048 + 1024)
    assert found.wanted_bytes == 100 * 512


def test_long_runs_are_read_by_themselves() -> None:
    width = LONG_RUN_BYTES // 4
    info = stored("a", (3, 4 * width), 0)
    found = cut([info], [WeightSlice("a", info.shape, 1, width, 2 * width)], 1 << 20)
    assert [(extent.start, extent.stop) for extent in found] == [
        ((4 * row + 1) * LONG_RUN_BYTES, (4 * row + 2) * LONG_RUN_BYTES) for row in range(3)
    ]
    assert not any(extent.is_shared for extent in found)


@pytest.mark.parametrize("offset", [0, 4095])
def test_the_least_room_holds_a_row_wherever_it_begins(offset: int) -> None:
    info = stored("a", (4, 20000), offset)
    results = planned([info], [WeightSlice("a", info.shape, 1, 0, 10000)])
    room = least_room(results)
    found = list(extents(results, lambda: room))
    assert sum(extent.wanted_bytes for extent in found) == 4 * 40000
    assert all(extent.fragments and extent.buffer_bytes <= room for extent in found)
