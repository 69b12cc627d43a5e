"""Byte ranges against the bytes of real files."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from loader.byte_runs import byte_runs, rank_byte_runs
from loader.checkpoint import open_checkpoint
from loader.errors import CheckpointError
from loader.layout import weight_slices
from loader.shares import RankPlace
from loader.tensors import TensorInfo, WeightSlice
from tests.support.tiny_checkpoint import make_tiny_llama


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_ranges_hold_the_values_of_the_slices(tmp_path: Path, tp: int) -> None:
    checkpoint = open_checkpoint(make_tiny_llama(tmp_path / "m", vocab_size=321, sharded=True))
    files = {info.file: info.file.read_bytes() for info in checkpoint.tensors.values()}
    for rank in range(tp):
        for want in weight_slices(checkpoint.config, RankPlace(rank, tp)):
            info = checkpoint.tensors[want.name]
            data = files[info.file]
            whole = np.frombuffer(data, np.float32, info.num_bytes // 4, info.offset).reshape(info.shape)
            part = whole if want.dim is None else whole.take(range(want.start, want.stop), want.dim)
            runs = byte_runs(info, want)
            assert b"".join(data[start:stop] for start, stop in runs.ranges) == part.tobytes()
            assert runs.num_bytes == part.nbytes


def test_the_ranges_of_all_ranks_cover_the_files(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_tiny_llama(tmp_path / "m", kv_heads=4, num_layers=3, sharded=True))
    covered: dict[Path, set[int]] = {}
    for stage in range(3):
        for rank in range(4):
            wanted = weight_slices(checkpoint.config, RankPlace(rank, 4, stage, 3))
            runs = rank_byte_runs(checkpoint.path, checkpoint.tensors, wanted)
            assert [(run.file, run.offset) for run in runs] == sorted((run.file, run.offset) for run in runs)
            for run in runs:
                for start, stop in run.ranges:
                    covered.setdefault(run.file, set()).update(range(start, stop))
    assert sum(map(len, covered.values())) == checkpoint.total_bytes


def test_quantised_blocks_and_rotary_heads_are_taken_whole() -> None:
    file = Path("m.gguf")
    plain = TensorInfo("t", "Q4_1", (4, 96), file, 100, 4 * 3 * 20, "t")
    columns = byte_runs(plain, WeightSlice("t", (4, 96), 1, 40, 70))
    assert list(columns.ranges) == [(100 + row * 60 + 20, 100 + row * 60 + 60) for row in range(4)]
    rotary = dataclasses.replace(plain, rotary_heads=2)
    rows = byte_runs(rotary, WeightSlice("t", (4, 96), 0, 1, 2))
    assert list(rows.ranges) == [(100, 100 + 2 * 60)]
    empty = byte_runs(plain, WeightSlice("t", (4, 96), 0, 1, 1))
    assert empty.num_bytes == 0


def test_a_tensor_that_is_missing_or_of_another_shape_is_named() -> None:
    info = TensorInfo("t", "F32", (2, 2), Path("f"), 0, 16, "t")
    with pytest.raises(CheckpointError, match="expected \\[2, 4\\]"):
        byte_runs(info, WeightSlice("t", (2, 4)))
    with pytest.raises(CheckpointError, match="no tensor 'u'"):
        rank_byte_runs(Path("m"), {"t": info}, [WeightSlice("u", (2, 2))])
