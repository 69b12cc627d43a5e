"""Failures reported of other engines: what they wrote and could not read, where files come from, what is in them.

Numbers are those of the public issues; `repo_number` is in each test's name.
"""

import hashlib
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from loader.checkpoint import Checkpoint, open_checkpoint
from loader.errors import CheckpointError
from loader.formats.slicing import Split, slice_checkpoint
from loader.integrity import verify_once
from loader.layout import weight_slices
from loader.shares import RankPlace
from loader.sources.cache import Asking, ModelCache
from loader.sources.lock import STALE_S, Waiting, acquire
from loader.sources.owner import Owner
from loader.sources.resolve import resolve
from loader.weights import load_weights
from tests.support.file_server import FileServer, serve_files
from tests.support.tiny_checkpoint import make_tiny_llama


def load(checkpoint: Checkpoint, place: RankPlace) -> dict[str, torch.Tensor]:
    wanted = weight_slices(checkpoint.config, place)
    return load_weights(checkpoint, wanted, dtype=torch.float32, progress=lambda n: None, cancelled=lambda: False)


def places(tp: int, pp: int) -> list[RankPlace]:
    return [RankPlace(rank, tp, stage, pp) for stage in range(pp) for rank in range(tp)]


@pytest.mark.parametrize(("saved", "tie"), [((1, 1), False), ((2, 1), False), ((4, 3), False), ((2, 2), True)])
@pytest.mark.parametrize("loaded", [(1, 1), (2, 1), (4, 2)])
def test_vllm_41174_and_sglang_25332_a_sliced_save_loads_at_any_split(
    tmp_path: Path, saved: tuple[int, int], loaded: tuple[int, int], tie: bool
) -> None:
    """Their sharded_state cannot load its own save, and is bound to the tensor-parallel size that wrote it."""
    source = open_checkpoint(make_tiny_llama(tmp_path / "m", num_layers=3, vocab_size=321, tie=tie))
    slice_checkpoint(
        source, tmp_path / "out", Split(*saved), progress=lambda done, total: None, cancelled=lambda: False
    )
    sliced = open_checkpoint(tmp_path / "out")
    for place in places(*loaded):
        expected, found = load(source, place), load(sliced, place)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_sglang_25332_a_sliced_save_can_be_sliced_again(tmp_path: Path) -> None:
    source = open_checkpoint(make_tiny_llama(tmp_path / "m"))
    for number, split in enumerate([Split(4), Split(1, 2), Split(2)]):
        target = tmp_path / str(number)
        slice_checkpoint(source, target, split, progress=lambda done, total: None, cancelled=lambda: False)
        source = open_checkpoint(target)
    expected = load(open_checkpoint(tmp_path / "m"), RankPlace())
    found = load(source, RankPlace())
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_vllm_53537_a_shard_of_the_right_size_with_wrong_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Headers cannot tell; the hash that the Hub, a manifest or SHA256SUMS gives can, before a tensor is loaded."""
    monkeypatch.setenv("STEPWIRE_CACHE", str(tmp_path / "cache"))
    folder = make_tiny_llama(tmp_path / "m", sharded=True)
    shard = folder / "model-00002-of-00002.safetensors"
    sums = [f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.name}" for p in folder.glob("*.safetensors")]
    (folder / "SHA256SUMS").write_text("\n".join(sums))
    data = bytearray(shard.read_bytes())
    data[-1000:] = bytes(1000)
    shard.write_bytes(data)
    checkpoint = open_checkpoint(folder)
    with pytest.raises(CheckpointError) as caught:
        verify_once(checkpoint)
    assert (caught.value.code, caught.value.file) == ("invalid", shard)
    assert caught.value.found == hashlib.sha256(data).hexdigest()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    with serve_files() as server:
        files = {path.name: path.read_bytes() for path in make_tiny_llama(tmp_path / "m").iterdir()}
        server.publish("org/tiny", files)
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


@pytest.mark.parametrize("left_by", ["a process that has ended", "another machine"])
def test_huggingface_hub_2543_a_lock_that_a_crash_left_behind(tmp_path: Path, hub: FileServer, left_by: str) -> None:
    """Their download waits for it for ever. Ours takes it over, and says so."""
    cache = ModelCache(tmp_path / "cache")
    told: list[str] = []
    with resolve("org/tiny", report=told.append, cache=cache):
        (entry,) = cache.entries()
    cache.evict(entry.key)
    lock = tmp_path / "cache" / "sources" / "locks" / entry.key
    if left_by == "another machine":
        lock.write_bytes(replace(Owner.here(), place="another machine").encode())
        os.utime(lock, (time.time() - STALE_S - 5,) * 2)
    else:
        lock.write_bytes(replace(Owner.here(), pid=1 << 22).encode())
    with resolve("org/tiny", report=told.append, cache=cache, asking=Asking(told.append, patience_s=0.0)) as found:
        assert open_checkpoint(found.path).total_bytes > 0
    assert any("took over" in text for text in told)
    assert not lock.exists()


def test_huggingface_hub_2543_a_lock_that_is_held_is_named_and_given_up(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with acquire(lock, Waiting()), pytest.raises(CheckpointError, match=r"process .* holds .* has not gone on"):
        acquire(lock, Waiting(patience_s=0.0))
