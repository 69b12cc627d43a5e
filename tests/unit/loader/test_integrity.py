import hashlib
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from loader import integrity
from loader.checkpoint import Checkpoint, open_checkpoint
from loader.errors import CheckpointError, LoadCancelled
from loader.formats.slicing import Split, slice_checkpoint
from loader.integrity import bytes_to_verify, verify_files, verify_once
from tests.support.file_server import keep_snapshot
from tests.support.tiny_checkpoint import make_tiny_llama


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where results are remembered."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("STEPWIRE_CACHE", str(folder))
    return folder / "verified"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many bytes were read to be hashed since it was last asked."""
    counted = [0]
    real = os.pread

    def pread(descriptor: int, num_bytes: int, offset: int) -> bytes:
        data = real(descriptor, num_bytes, offset)
        counted[0] += len(data) if num_bytes == integrity._READ_BYTES else 0
        return data

    def since() -> int:
        result, counted[0] = counted[0], 0
        return result

    monkeypatch.setattr(os, "pread", pread)
    return since


def write_sums(folder: Path) -> None:
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n"
        for path in sorted(folder.iterdir())
        if path.suffix in (".safetensors", ".json")
    ]
    (folder / "SHA256SUMS").write_text("".join(lines))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = make_tiny_llama(tmp_path / "m", sharded=True)
    write_sums(folder)
    return folder


def flip(path: Path, offset: int = -1) -> None:
    """Changes one byte, and neither size nor header."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def again(checkpoint: Checkpoint) -> integrity.Verification:
    return verify_files(checkpoint, lambda done, total: None, lambda: False, again=True)


def test_files_are_read_once(folder: Path, reads: Callable[[], int]) -> None:
    checkpoint = open_checkpoint(folder)
    announced = bytes_to_verify(checkpoint)
    first = verify_once(checkpoint)
    assert [path.name for path in first.verified if path.suffix == ".safetensors"] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    assert reads() == sum(path.stat().st_size for path in first.verified) == announced
    assert bytes_to_verify(checkpoint) == 0
    second = verify_once(open_checkpoint(folder))
    assert (second.verified, second.remembered, second.unknown) == ((), first.verified, ())
    assert reads() == 0
    assert again(checkpoint).verified == first.verified


def test_vllm_53537_right_size_and_wrong_bytes(folder: Path) -> None:
    file = folder / "model-00002-of-00002.safetensors"
    expected = hashlib.sha256(file.read_bytes()).hexdigest()
    flip(file)
    with pytest.raises(CheckpointError, match="does not hold what it was published with") as caught:
        verify_once(open_checkpoint(folder))
    error = caught.value
    assert (error.code, error.file, error.expected) == ("invalid", file, expected)
    assert error.found == hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.mark.parametrize("change", ["content", "time", "replaced"])
def test_a_file_that_changed_is_read_again(folder: Path, reads: Callable[[], int], change: str) -> None:
    verify_once(open_checkpoint(folder))
    reads()
    file = folder / "model-00001-of-00002.safetensors"
    if change == "content":
        flip(file)
        with pytest.raises(CheckpointError):
            verify_once(open_checkpoint(folder))
        return
    if change == "time":
        os.utime(file, ns=(1, 1))
    else:
        status, copy = file.stat(), folder / "copy"
        copy.write_bytes(file.read_bytes())
        os.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns))
        copy.replace(file)
    assert verify_once(open_checkpoint(folder)).verified == (file,)
    assert reads() == file.stat().st_size


def test_another_expected_hash_is_another_question(folder: Path) -> None:
    verify_once(open_checkpoint(folder))
    sums = folder / "SHA256SUMS"
    sums.write_text(sums.read_text().replace(sums.read_text()[:8], "0" * 8))
    with pytest.raises(CheckpointError):
        verify_once(open_checkpoint(folder))


def test_what_has_no_hash_is_named(tmp_path: Path, reads: Callable[[], int]) -> None:
    folder = make_tiny_llama(tmp_path / "m")
    found = verify_once(open_checkpoint(folder))
    assert (found.verified, found.remembered, found.unknown) == ((), (), (folder / "model.safetensors",))
    assert reads() == 0


def test_the_hubs_cache_and_its_names(tmp_path: Path) -> None:
    files = {path.name: path.read_bytes() for path in make_tiny_llama(tmp_path / "m").iterdir()}
    snapshot = keep_snapshot(tmp_path / "hub", "org/tiny", files)
    assert snapshot / "model.safetensors" in verify_once(open_checkpoint(snapshot)).verified
    flip((snapshot / "model.safetensors").resolve())
    with pytest.raises(CheckpointError, match=r"model\.safetensors does not hold"):
        verify_once(open_checkpoint(snapshot))


def test_a_sliced_checkpoint(tmp_path: Path) -> None:
    source, out = open_checkpoint(make_tiny_llama(tmp_path / "m")), tmp_path / "out"
    slice_checkpoint(source, out, Split(2), progress=lambda done, total: None, cancelled=lambda: False)
    ranks = sorted(out.glob("rank-*"))
    assert set(verify_once(open_checkpoint(out)).verified) == set(ranks)
    flip(ranks[1])
    with pytest.raises(CheckpointError) as caught:
        verify_once(open_checkpoint(out))
    assert caught.value.file == ranks[1]


def test_progress(folder: Path) -> None:
    told: list[tuple[int, int]] = []
    found = verify_once(open_checkpoint(folder), lambda *pair: told.append(pair))
    total = sum(path.stat().st_size for path in found.verified)
    assert max(told) == (total, total)


def test_it_can_be_cancelled(folder: Path) -> None:
    with pytest.raises(LoadCancelled):
        verify_once(open_checkpoint(folder), cancelled=lambda: True)


def test_a_wrong_file_says_more_than_those_stopped_by_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong one ends while another is being read, which then stops."""
    monkeypatch.setattr(integrity, "_READ_BYTES", 64)
    flip(folder / "config.json", 0)
    (folder / "config.json").write_bytes((folder / "config.json").read_bytes().replace(b"z", b"{"))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        verify_once(open_checkpoint(folder))


def test_without_a_folder_to_write_to(folder: Path, memory: Path, reads: Callable[[], int]) -> None:
    memory.parent.write_text("no folder")
    for _ in range(2):
        assert verify_once(open_checkpoint(folder)).remembered == ()
    assert reads() > 0


def test_a_damaged_memory_counts_as_none(folder: Path, memory: Path) -> None:
    first = verify_once(open_checkpoint(folder))
    (record,) = memory.glob("*.json")
    for damage in ("{", "[]", json.dumps({str(path): [1] for path in first.verified})):
        record.write_text(damage)
        assert verify_once(open_checkpoint(folder)).verified == first.verified


def test_ranks_of_one_machine_read_once(folder: Path, reads: Callable[[], int]) -> None:
    checkpoint = open_checkpoint(folder)
    results: list[integrity.Verification] = []
    threads = [threading.Thread(target=lambda: results.append(verify_once(checkpoint))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(len(result.verified) > 0 for result in results) == [False, False, True]
    assert reads() == sum(path.stat().st_size for path in {*results[0].verified, *results[0].remembered})
