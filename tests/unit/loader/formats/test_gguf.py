import shutil
from pathlib import Path

import pytest
import torch

from loader.checkpoint import open_checkpoint
from loader.errors import CheckpointError
from loader.layout import weight_slices
from loader.shares import RankPlace
from loader.weights import load_weights
from tests.support.tiny_gguf import make_tiny_gguf


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    folder = tmp_path / "parts"
    folder.mkdir()
    make_tiny_gguf(folder / "m.gguf", split_max_tensors=8)
    return sorted(folder.glob("*.gguf"))


def refused(path: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    return caught.value


@pytest.mark.parametrize("start", ["first part", "last part", "folder"])
def test_parts_are_the_whole_model(tmp_path: Path, parts: list[Path], start: str) -> None:
    assert len(parts) == 3
    path = {"first part": parts[0], "last part": parts[-1], "folder": parts[0].parent}[start]
    split, whole = open_checkpoint(path), open_checkpoint(make_tiny_gguf(tmp_path / "m.gguf"))
    assert split.config == whole.config
    assert split.gguf_metadata == whole.gguf_metadata
    assert {info.file for info in split.tensors.values()} == set(parts)
    wanted = weight_slices(whole.config, RankPlace())
    loaded, expected = (
        load_weights(c, wanted, dtype=torch.float32, progress=lambda n: None, cancelled=lambda: False)
        for c in (split, whole)
    )
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_the_content_of_every_part_is_in_the_fingerprint(parts: list[Path]) -> None:
    before = open_checkpoint(parts[0]).fingerprint
    data = bytearray(parts[2].read_bytes())
    data[-1] ^= 1
    parts[2].write_bytes(data)
    assert open_checkpoint(parts[0]).fingerprint != before


def test_a_part_is_missing(parts: list[Path]) -> None:
    parts[1].unlink()
    error = refused(parts[0])
    assert (error.code, error.file, error.found) == ("not_found", parts[1], "2 files")


def test_a_part_under_another_name(parts: list[Path]) -> None:
    renamed = parts[0].rename(parts[0].parent.parent / "m.gguf")
    error = refused(renamed)
    assert (error.code, error.file, error.found) == ("invalid", renamed, "m.gguf")


def test_parts_in_wrong_order(parts: list[Path]) -> None:
    shutil.copy(parts[2], parts[1])
    error = refused(parts[0])
    assert (error.code, error.file, error.expected) == ("invalid", parts[1], "part 1 of 3")


def test_parts_of_two_models(tmp_path: Path, parts: list[Path]) -> None:
    other = tmp_path / "other"
    other.mkdir()
    make_tiny_gguf(other / "m.gguf", split_max_tensors=8, without=["blk.0.attn_q.weight"])
    shutil.copy(sorted(other.glob("*.gguf"))[0], parts[0])
    assert refused(parts[1]).code == "invalid"
