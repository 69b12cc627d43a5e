import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from loader.checkpoint import open_checkpoint
from loader.errors import CheckpointError
from loader.gguf_rope import llama3_divisors
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


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_rotary_factors_in_a_later_part(tmp_path: Path) -> None:
    divisors = np.array(llama3_divisors(500000.0, 16, LLAMA3), np.float32)
    make_tiny_gguf(
        tmp_path / "m.gguf",
        metadata={"llama.rope.freq_base": 500000.0},
        extra_tensors={"rope_freqs.weight": divisors},
        split_max_tensors=8,
    )
    rope = open_checkpoint(tmp_path).config.rope
    assert (rope.scaling_type, rope.parameters["factor"]) == ("llama3", 8.0)


def test_rotary_factors_in_several_parts(tmp_path: Path) -> None:
    factors = {f"rope_factors_{name}.weight": np.ones(8, np.float32) for name in ("long", "short")}
    fill = {f"fill{number}": np.ones(8, np.float32) for number in range(8)}
    first, *others = factors
    make_tiny_gguf(
        tmp_path / "m.gguf",
        extra_tensors={first: factors[first], **fill, others[0]: factors[others[0]]},
        split_max_tensors=8,
    )
    assert "lie in 2 of its parts" in refused(tmp_path).message
