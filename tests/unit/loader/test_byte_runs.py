"""Byte ranges against the bytes of real files."""

import dataclasses
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from loader.byte_runs import byte_runs, rank_byte_runs, stored_parts
from loader.checkpoint import open_checkpoint
from loader.errors import CheckpointError
from loader.layout import weight_slices
from loader.shares import RankPlace
from loader.tensors import Piece, TensorInfo, WeightSlice
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


def in_pieces(dim: int, cuts: list[int], *, shape: tuple[int, int] = (4, 6)) -> TensorInfo:
    """An I32 tensor stored in pieces between the cuts, each in a file of its own."""
    pieces = []
    for number, (start, stop) in enumerate(pairwise(cuts)):
        part = (stop - start, shape[1]) if dim == 0 else (shape[0], stop - start)
        info = TensorInfo("t", "I32", part, Path(f"{number}"), 8, 4 * part[0] * part[1], "t")
        pieces.append(Piece(dim, start, stop, info))
    return TensorInfo("t", "I32", shape, Path("0"), 0, 4 * shape[0] * shape[1], "t", pieces=tuple(pieces))


def test_a_slice_of_pieces_is_what_they_have_of_it() -> None:
    want = WeightSlice("t", (4, 6), 1, 1, 5, as_stored=True)
    first, second = stored_parts(in_pieces(1, [0, 2, 6]), want)
    assert (first.source, first.dim, first.start, first.stop) == (WeightSlice("t", (4, 2), 1, 1, 2, True), 1, 0, 1)
    assert (second.source, second.dim, second.start, second.stop) == (WeightSlice("t", (4, 4), 1, 0, 3, True), 1, 1, 4)
    (only,) = stored_parts(in_pieces(1, [0, 2, 6]), WeightSlice("t", (4, 6), 1, 3, 6))
    assert (only.info.file, only.start, only.stop) == (Path("1"), 0, 3)
    runs = rank_byte_runs(Path("m"), {"t": in_pieces(0, [0, 1, 4])}, [WeightSlice("t", (4, 6), 1, 0, 3)])
    assert [(run.file, list(run.ranges)) for run in runs] == [
        (Path("0"), [(8, 20)]),
        (Path("1"), [(8, 20), (32, 44), (56, 68)]),
    ]


def test_pieces_that_leave_something_out_are_refused() -> None:
    whole = in_pieces(0, [0, 1, 2, 4])
    for missing, index in ((0, 0), (1, 1), (2, 2)):
        pieces = tuple(piece for number, piece in enumerate(whole.pieces) if number != missing)
        with pytest.raises(CheckpointError, match=f"do not join at index {index} of dimension 0") as caught:
            stored_parts(dataclasses.replace(whole, pieces=pieces), WeightSlice("t", (4, 6)))
        assert caught.value.tensor == "t"


def test_a_piece_of_another_shape_is_refused_and_a_copy_is_left_aside() -> None:
    whole = in_pieces(0, [0, 1, 4])
    narrow = dataclasses.replace(whole.pieces[1].info, shape=(3, 5))
    pieces = (whole.pieces[0], dataclasses.replace(whole.pieces[1], info=narrow))
    with pytest.raises(CheckpointError, match="expected \\[3, 6\\]"):
        stored_parts(dataclasses.replace(whole, pieces=pieces), WeightSlice("t", (4, 6)))
    twice = dataclasses.replace(whole, pieces=(*whole.pieces, whole.pieces[0]))
    assert stored_parts(twice, WeightSlice("t", (4, 6))) == stored_parts(whole, WeightSlice("t", (4, 6)))
