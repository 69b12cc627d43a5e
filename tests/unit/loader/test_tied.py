"""An output layer that a tied model stores all the same."""

from pathlib import Path

import pytest

from loader.errors import CheckpointError, LoadCancelled
from loader.tensors import TensorInfo, WeightSlice
from loader.tied import check_tied_head
from tests.support.fake_checkpoint import fake_checkpoint

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
ROWS = bytes(range(64)) * 2  # eight rows of 16 bytes


def check(folder: Path, head: bytes, *, dtypes: tuple[str, str], cancelled: bool = False, start: int = 0) -> None:
    infos = []
    for name, dtype, data in ((EMBEDDING, dtypes[0], ROWS), (HEAD, dtypes[1], head)):
        path = folder / name
        path.write_bytes(data)
        infos.append(TensorInfo(name, dtype, (8, 4 if dtype == "F32" else 16), path, 0, len(ROWS), name))
    want = WeightSlice(EMBEDDING, infos[0].shape, 0, start, 8)
    check_tied_head(fake_checkpoint(infos, tie=True), [want], lambda: cancelled)


@pytest.mark.parametrize("dtype", ["F32", "F8_E4M3", "I8"])
def test_one_that_repeats_the_embedding_is_accepted(tmp_path: Path, dtype: str) -> None:
    check(tmp_path, ROWS, dtypes=(dtype, dtype))
    with pytest.raises(LoadCancelled):
        check(tmp_path, ROWS, dtypes=(dtype, dtype), cancelled=True)


@pytest.mark.parametrize("dtype", ["F32", "F8_E4M3", "I8"])
def test_one_that_differs_is_refused_where_this_rank_would_use_it(tmp_path: Path, dtype: str) -> None:
    head = bytearray(ROWS)
    head[3 * 16 + 2] ^= 1
    with pytest.raises(CheckpointError, match="in row 3") as caught:
        check(tmp_path, bytes(head), dtypes=(dtype, dtype))
    assert (caught.value.code, caught.value.tensor) == ("invalid", HEAD)
    check(tmp_path, bytes(head), dtypes=(dtype, dtype), start=4)


def test_types_that_cannot_be_compared_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="differs"):
        check(tmp_path, ROWS, dtypes=("I8", "F8_E4M3"))


def test_a_file_that_became_shorter_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="became shorter") as caught:
        check(tmp_path, ROWS[:-4], dtypes=("I8", "I8"))
    assert caught.value.tensor == HEAD
