import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loader.byte_runs import rank_byte_runs
from loader.checkpoint import Checkpoint, open_checkpoint
from loader.config import OtherModel
from loader.errors import CheckpointError, LoadCancelled
from loader.formats import slicing
from loader.formats.slicing import Split, slice_checkpoint
from loader.layout import weight_slices
from loader.shares import RankPlace
from tests.support.slow_reader import read_slowly
from tests.support.tiny_checkpoint import TINY_FAMILIES, make_tiny_llama
from tests.support.tiny_gguf import make_tiny_gguf
from tests.support.tiny_quantised_models import fp8_tensor, make_tiny_quantised

SPLITS = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 3), (4, 3)]


def sliced(checkpoint: Checkpoint, folder: Path, tp: int = 2, pp: int = 1, dtype: str = "auto") -> Checkpoint:
    slice_checkpoint(
        checkpoint, folder, Split(tp, pp, dtype), progress=lambda done, total: None, cancelled=lambda: False
    )
    return open_checkpoint(folder)


@pytest.fixture
def source(tmp_path: Path) -> Checkpoint:
    return open_checkpoint(make_tiny_llama(tmp_path / "source", num_layers=3, sharded=True))


def same_tensors(first: Checkpoint, second: Checkpoint) -> bool:
    names = {want.name for want in weight_slices(first.config, RankPlace())}
    return all(np.array_equal(read_slowly(first.tensors[n]), read_slowly(second.tensors[n])) for n in names)


@pytest.mark.parametrize(("tp", "pp"), SPLITS)
@pytest.mark.parametrize("tie", [False, True])
def test_every_split_holds_the_whole_model(tmp_path: Path, tp: int, pp: int, tie: bool) -> None:
    source = open_checkpoint(make_tiny_llama(tmp_path / "source", num_layers=3, vocab_size=321, tie=tie))
    result = sliced(source, tmp_path / "out", tp, pp)
    assert (result.format, result.config) == ("presliced", source.config)
    assert same_tensors(source, result)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names >= {"config.json", "tokenizer.json", "stepwire.json"}
    assert sum(name.startswith("rank-") for name in names) == tp * pp


@pytest.mark.parametrize("family", [*TINY_FAMILIES])
def test_every_family(tmp_path: Path, family: str) -> None:
    source = open_checkpoint(make_tiny_llama(tmp_path / "source", config_overrides=TINY_FAMILIES[family]))
    assert same_tensors(source, sliced(source, tmp_path / "out"))


def test_what_ranks_hold_alike_is_stored_once(tmp_path: Path, source: Checkpoint) -> None:
    """Two key-value heads over four ranks, norms on all of them: no byte more than the model has."""
    assert sliced(source, tmp_path / "out", 4, 3).total_bytes == source.total_bytes


def test_a_rank_of_the_same_split_reads_its_file_from_end_to_end(tmp_path: Path, source: Checkpoint) -> None:
    result = sliced(source, tmp_path / "out", 2)
    for rank in (0, 1):
        runs = rank_byte_runs(result.path, result.tensors, weight_slices(result.config, RankPlace(rank, 2)))
        for number, path in enumerate(sorted({run.file for run in runs})):
            ranges = sorted(pair for run in runs if run.file == path for pair in run.ranges)
            assert all(stop == start for (_, stop), (start, _) in pairwise(ranges))
            if number == rank:
                assert ranges[-1][1] == path.stat().st_size


@pytest.mark.parametrize(("dtype", "stored"), [("float16", "F16"), ("bfloat16", "BF16"), ("float32", "F32")])
def test_another_type(tmp_path: Path, source: Checkpoint, dtype: str, stored: str) -> None:
    result = sliced(source, tmp_path / "out", dtype=dtype)
    assert {info.dtype for info in result.tensors.values()} == {stored}
    assert result.config.dtype == dtype
    name = "model.layers.1.mlp.down_proj.weight"
    expected = read_slowly(source.tensors[name])
    assert np.allclose(read_slowly(result.tensors[name]), expected, rtol=2**-8, atol=1e-6)


def test_copies_have_one_fingerprint(tmp_path: Path, source: Checkpoint) -> None:
    result = sliced(source, tmp_path / "out")
    shutil.copytree(tmp_path / "out", tmp_path / "copy", copy_function=shutil.copyfile)
    assert open_checkpoint(tmp_path / "copy").fingerprint == result.fingerprint


# --- writing


@pytest.fixture
def left(tmp_path: Path, source: Checkpoint) -> Callable[[], list[str]]:
    """What there is beside the source."""
    return lambda: sorted(path.name for path in tmp_path.iterdir() if path != source.path)


def test_a_full_disk_leaves_nothing(
    tmp_path: Path, source: Checkpoint, left: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="No space left on device") as caught:
        sliced(source, tmp_path / "out")
    assert (caught.value.code, caught.value.file, left()) == ("unavailable", tmp_path / "out", [])


def test_too_little_room_is_told_before_anything_is_read(
    tmp_path: Path, source: Checkpoint, left: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slicing.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 0, 10))
    monkeypatch.setattr(slicing, "load_weights", None)
    with pytest.raises(CheckpointError, match="are needed and 10 are free"):
        sliced(source, tmp_path / "out")
    assert left() == []


def test_a_cancelled_one_leaves_nothing(tmp_path: Path, source: Checkpoint, left: Callable[[], list[str]]) -> None:
    with pytest.raises(LoadCancelled):
        slice_checkpoint(source, tmp_path / "out", Split(), progress=lambda done, total: None, cancelled=lambda: True)
    assert left() == []


def test_nothing_is_overwritten(tmp_path: Path, source: Checkpoint) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match="exists already"):
        sliced(source, tmp_path / "out")


def test_progress_ends_at_all_bytes(tmp_path: Path, source: Checkpoint) -> None:
    told: list[tuple[int, int]] = []
    total = slice_checkpoint(
        source, tmp_path / "out", Split(2), progress=lambda *pair: told.append(pair), cancelled=lambda: False
    )
    assert told == sorted(told)
    assert told[-1] == (total, total) == (source.total_bytes, source.total_bytes)


@pytest.mark.parametrize(("split", "text"), [(Split(3), "use one of tp 1, 2, 4"), (Split(1, 4), "use a pp of 1 to 3")])
def test_a_split_that_cannot_be(tmp_path: Path, source: Checkpoint, split: Split, text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        slice_checkpoint(source, tmp_path / "out", split, progress=lambda *pair: None, cancelled=lambda: False)


def test_a_gguf_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="safetensors form"):
        sliced(open_checkpoint(make_tiny_gguf(tmp_path / "m.gguf")), tmp_path / "out")


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    source = open_checkpoint(make_tiny_quantised(tmp_path / "m", fp8_tensor()))
    with pytest.raises(CheckpointError, match="has quantised weights"):
        sliced(source, tmp_path / "out", 1)


def test_models_that_are_none_of_ours_are_refused(tmp_path: Path, source: Checkpoint) -> None:
    other = replace(source, config=replace(source.config, other=OtherModel({}, {})))
    with pytest.raises(CheckpointError, match="none of our own models"):
        sliced(other, tmp_path / "out", 1)


# --- reading


@pytest.fixture
def refused(tmp_path: Path, source: Checkpoint) -> Callable[[Callable[[dict[str, Any]], object]], CheckpointError]:
    """Changes the manifest of a sliced checkpoint and answers what that brings."""
    sliced(source, tmp_path / "out")

    def change_and_open(change: Callable[[dict[str, Any]], object]) -> CheckpointError:
        path = tmp_path / "out" / "stepwire.json"
        manifest = json.loads(path.read_text())
        change(manifest)
        path.write_text(json.dumps(manifest))
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(tmp_path / "out")
        return caught.value

    return change_and_open


NORM, QUERY = "model.norm.weight", "model.layers.0.self_attn.q_proj.weight"
RANK_0, RANK_1 = "rank-0-of-2-stage-0-of-1.safetensors", "rank-1-of-2-stage-0-of-1.safetensors"


@pytest.mark.parametrize(
    ("change", "code", "text"),
    [
        (lambda m: m.update(version=2), "unsupported", "update Stepwire"),
        (lambda m: m.update(version="1"), "invalid", "version"),
        (lambda m: m.update(format="other"), "invalid", "stepwire-presliced"),
        (lambda m: m.update(dtype="int8"), "invalid", "dtype"),
        (lambda m: m.update(files={}), "invalid", "has no 'files'"),
        (lambda m: m["files"].update({"../x.safetensors": {"bytes": 8}}), "invalid", "no safetensors file beside it"),
        (lambda m: m["files"].update({"/x.safetensors": {"bytes": 8}}), "invalid", "no safetensors file beside it"),
        (lambda m: m["files"].update({"x.safetensors": {"bytes": 8}}), "not_found", "x.safetensors"),
        (lambda m: m["files"][RANK_1].update(bytes=9), "invalid", "stepwire.json says 9"),
        (lambda m: m["files"].pop(RANK_1), "invalid", "lacks the part"),
        (lambda m: m["tensors"].pop(NORM), "invalid", "does not name"),
        (lambda m: m["tensors"][NORM].update(shape=[65]), "invalid", "end at 64 of 65"),
        (lambda m: m["tensors"][NORM].update(shape=[]), "invalid", "no shape"),
        (lambda m: m["tensors"][NORM].update(pieces=[]), "invalid", "names no part"),
        (lambda m: m["tensors"][NORM].update(pieces=[[RANK_1, 0, 0, 64]]), "invalid", "lacks the part"),
        (lambda m: m["tensors"][QUERY]["pieces"].pop(), "invalid", "end at 32 of 64"),
        (lambda m: m["tensors"][QUERY]["pieces"][0].__setitem__(3, 31), "invalid", "has the shape"),
        (lambda m: m["tensors"][QUERY]["pieces"][1].__setitem__(1, 2), "invalid", "wrongly"),
        (lambda m: m["tensors"][QUERY]["pieces"][1].__setitem__(1, True), "invalid", "wrongly"),
        (lambda m: m["tensors"][QUERY]["pieces"][1].__setitem__(slice(2, 4), [0, 32]), "invalid", "end at 32 of 64"),
    ],
)
def test_a_manifest_that_does_not_fit(
    refused: Callable[[Callable[[dict[str, Any]], object]], CheckpointError],
    change: Callable[[dict[str, Any]], object],
    code: str,
    text: str,
) -> None:
    error = refused(change)
    assert error.code == code
    assert re.search(text, str(error)), str(error)


def test_a_config_of_another_kind_of_model(tmp_path: Path, source: Checkpoint) -> None:
    sliced(source, tmp_path / "out")
    path = tmp_path / "out" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": ["SomeForCausalLM"]}))
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path / "out")
    assert (caught.value.code, caught.value.found) == ("unsupported", "SomeForCausalLM")


def test_a_rank_file_of_another_slicing(tmp_path: Path, source: Checkpoint) -> None:
    sliced(source, tmp_path / "out")
    sliced(source, tmp_path / "four", 4)
    shutil.copy(tmp_path / "four" / "rank-1-of-4-stage-0-of-1.safetensors", tmp_path / "out" / RANK_1)
    with pytest.raises(CheckpointError, match="copy the folder again") as caught:
        open_checkpoint(tmp_path / "out")
    assert caught.value.file == tmp_path / "out" / RANK_1
