import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from loader.checkpoint import open_checkpoint
from loader.errors import CheckpointError, LoadCancelled
from loader.integrity import bytes_to_verify
from loader.sources import cache as module
from loader.sources.cache import Asking, ModelCache, entry_key
from loader.sources.http import http_model
from loader.sources.owner import Owner
from loader.sources.remote import RemoteFile, RemoteModel
from tests.support.file_server import FileServer


class Source:
    """Serves zeros, and counts how often."""

    def __init__(self) -> None:
        self.reads = 0

    def chunks(self, file: RemoteFile, start: int) -> Iterator[bytes]:
        self.reads += 1
        yield bytes(file.num_bytes - start)


def model(name: str = "m", num_bytes: int = 1000, version: str = "1", source: Source | None = None) -> RemoteModel:
    files = [RemoteFile("model.safetensors", num_bytes, version)]
    return RemoteModel(f"x://{name}", name, files, source or Source())


def names(cache: ModelCache) -> list[str]:
    return [entry.url.removeprefix("x://") for entry in cache.entries()]


def test_a_model_is_brought_once(cache: ModelCache, asking: Asking) -> None:
    source = Source()
    for _ in range(2):
        with cache.hold(model(source=source), "x://m", asking) as held:
            assert held.path.name == "m"
            assert (held.path / "model.safetensors").read_bytes() == bytes(1000)
    assert source.reads == 1
    (entry,) = cache.entries()
    assert (entry.url, entry.num_bytes, entry.in_use, entry.path) == ("x://m", 1000, False, held.path)


def test_what_lies_at_a_path_is_kept(cache: ModelCache, asking: Asking, tmp_path: Path) -> None:
    with cache.hold(model(), "x://m", asking) as held:
        path = held.path
    for inside in (path, path / "model.safetensors"):
        again = cache.hold_path(inside)
        assert again is not None and again.path == path
        assert cache.entries()[0].in_use
        again.release()
        assert not cache.entries()[0].in_use
    assert cache.hold_path(tmp_path / "elsewhere") is None
    assert cache.hold_path(cache.folder / "entries" / "none" / "m") is None


def test_its_hashes_are_known(
    cache: ModelCache, asking: Asking, server: FileServer, tiny_files: dict[str, bytes]
) -> None:
    server.files = {f"/m/{name}": data for name, data in tiny_files.items()}
    with cache.hold(http_model(f"{server.url}/m"), "m", asking) as held:
        first = open_checkpoint(held.path).fingerprint
        for path in held.path.iterdir():
            os.utime(path, (1, 1))
        assert open_checkpoint(held.path).fingerprint == first


def test_what_was_hashed_as_it_came_is_not_read_again_to_be_verified(
    tmp_path: Path, asking: Asking, server: FileServer, tiny_files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPWIRE_CACHE", str(tmp_path))
    server.files = {f"/m/{name}": data for name, data in tiny_files.items()}
    with ModelCache(tmp_path).hold(http_model(f"{server.url}/m"), "m", asking) as held:
        checkpoint = open_checkpoint(held.path)
        assert bytes_to_verify(checkpoint) == 0
        file = held.path / "model-00001-of-00002.safetensors"
        os.utime(file, (1, 1))
        assert bytes_to_verify(checkpoint) == file.stat().st_size


def test_one_gguf_is_a_file(cache: ModelCache, asking: Asking, server: FileServer) -> None:
    server.files["/q/m.gguf"] = b"GGUF"
    with cache.hold(http_model(f"{server.url}/q/m.gguf"), "m", asking) as held:
        assert held.path.read_bytes() == b"GGUF"


def test_another_version_is_another_entry(cache: ModelCache, asking: Asking) -> None:
    paths = set()
    for version in "12":
        with cache.hold(model(version=version), "x://m", asking) as held:
            paths.add(held.path)
    assert len(paths) == 2
    assert entry_key(model()) != entry_key(model(num_bytes=999))


def test_found_by_name_without_the_source(cache: ModelCache, asking: Asking) -> None:
    assert cache.find("x://m@main") is None
    with cache.hold(model(), "x://m@main", asking) as held:
        pass
    found = cache.find("x://m@main")
    assert found is not None
    with found:
        assert found.path == held.path
    assert cache.find("x://other@main") is None


@pytest.mark.parametrize("damage", ["gone", "short", "no record"])
def test_a_damaged_entry_is_brought_again(cache: ModelCache, asking: Asking, damage: str) -> None:
    with cache.hold(model(), "x://m", asking) as held:
        file = held.path / "model.safetensors"
    if damage == "gone":
        file.unlink()
    elif damage == "short":
        file.write_bytes(b"")
    else:
        (held.path.parent / "entry.json").write_text("{")
    assert cache.find("x://m") is None
    with cache.hold(model(), "x://m", asking):
        assert file.read_bytes() == bytes(1000)


def test_a_cache_that_others_fill(cache: ModelCache, asking: Asking, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mounted read-only: what is whole there is used, and nothing is written."""
    with cache.hold(model(), "x://m", asking) as held:
        pass
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setattr(module.Mark, "try_make", None)
    found = cache.find("x://m")
    assert found is not None
    assert cache.hold(model(), "x://m", asking).path == found.path == held.path


# --- the limit


@pytest.fixture
def small(tmp_path: Path, asking: Asking) -> ModelCache:
    """A cache with room for two models of 1000 bytes and their records, in which `a` was used before `b`."""
    cache = ModelCache(tmp_path / "cache", limit_bytes=3000)
    for number, name in enumerate("ab"):
        with cache.hold(model(name), name, asking) as held:
            pass
        os.utime(held.path.parent / "entry.json", (number, number))
    return cache


def test_the_longest_unused_goes_first(small: ModelCache, asking: Asking) -> None:
    told: list[str] = []
    with small.hold(model("c"), "c", replace(asking, report=told.append)):
        assert names(small) == ["c", "b"]
    assert "removed x://a from the cache" in told


def test_use_counts_and_not_age(small: ModelCache, asking: Asking) -> None:
    with small.hold(model("a"), "a", asking):
        pass
    with small.hold(model("c"), "c", asking):
        assert names(small) == ["c", "a"]


def test_what_is_in_use_stays(small: ModelCache, asking: Asking) -> None:
    with small.hold(model("a"), "a", asking), small.hold(model("b"), "b", asking):
        assert not small.evict(small.entries()[0].key)
        with pytest.raises(CheckpointError, match="1000 bytes do not fit") as caught:
            small.hold(model("c"), "c", asking)
    assert caught.value.code == "unavailable"
    assert sorted(names(small)) == ["a", "b"]


def test_a_lease_of_a_dead_process_does_not_count(small: ModelCache, asking: Asking, tmp_path: Path) -> None:
    for entry in small.entries():
        lease = tmp_path / "cache" / "sources" / "leases" / entry.key / "dead"
        lease.write_bytes(replace(Owner.here(), pid=1 << 22).encode())
    with small.hold(model("c"), "c", asking):
        assert names(small) == ["c", "b"]


def test_a_download_given_up_goes_too(tmp_path: Path, asking: Asking) -> None:
    cache = ModelCache(tmp_path / "cache", limit_bytes=2500)
    with pytest.raises(LoadCancelled):
        cache.hold(model("a", 2000), "a", replace(asking, cancelled=lambda: True))
    partial = next((tmp_path / "cache" / "sources" / "partial").iterdir())
    (partial / "a" / "model.safetensors.part").write_bytes(bytes(1500))
    with cache.hold(model("b", 2000), "b", asking):
        assert names(cache) == ["b"]
    assert not partial.exists()


def test_a_model_larger_than_the_cache(cache: ModelCache, asking: Asking, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="its limit is 500"):
        ModelCache(tmp_path / "cache", 500).hold(model(), "m", asking)


def test_a_model_larger_than_the_disk(cache: ModelCache, asking: Asking, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 0, 900))
    source = Source()
    with pytest.raises(CheckpointError, match="900 bytes of its disk are free"):
        cache.hold(model(source=source), "m", asking)
    assert source.reads == 0


def test_evicting_by_hand(small: ModelCache) -> None:
    key = small.entries()[0].key
    assert small.evict(key)
    assert names(small) == ["a"]


def test_a_folder_that_cannot_be_made(tmp_path: Path, asking: Asking) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="STEPWIRE_CACHE") as caught:
        ModelCache(tmp_path / "file").hold(model(), "m", asking)
    assert caught.value.code == "unavailable"


# --- several processes


PROGRAM = """
import sys
from pathlib import Path
from loader.sources.cache import Asking, ModelCache
from loader.sources.http import http_model

def report(text):
    print(text, flush=True)

cache = ModelCache(Path(sys.argv[1]))
with cache.hold(http_model(sys.argv[2]), "m", Asking(report, pause_s=0.0, poll_s=0.01)) as held:
    print(sum(path.stat().st_size for path in held.path.iterdir()), flush=True)
"""


def start(cache_folder: Path, url: str) -> "subprocess.Popen[str]":
    arguments = [sys.executable, "-c", PROGRAM, str(cache_folder), url]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)


def test_two_processes_bring_a_model_once(tmp_path: Path, server: FileServer, tiny_files: dict[str, bytes]) -> None:
    server.files = {f"/m/{name}": data for name, data in tiny_files.items()}
    both = [start(tmp_path, f"{server.url}/m") for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0].splitlines() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert [lines[-1] for lines in outputs] == [str(sum(map(len, tiny_files.values())))] * 2
    reads = server.gets()
    assert all(reads.count(name) == 1 for name in tiny_files if name.endswith(".safetensors"))


def test_one_killed_in_the_middle_of_a_file_is_taken_up(
    tmp_path: Path, server: FileServer, tiny_files: dict[str, bytes], asking: Asking
) -> None:
    name = "model-00001-of-00002.safetensors"
    server.files = {f"/m/{n}": data for n, data in tiny_files.items()}
    server.stall_after[name] = 50_000
    process = start(tmp_path, f"{server.url}/m")
    assert server.stalled.wait(60)
    partial = tmp_path / "sources" / "partial"
    while not any(path.stat().st_size >= 50_000 for path in partial.rglob(f"{name}.part")):
        assert process.poll() is None
        server.stalled.wait(0.001)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    server.go_on.set()
    server.requests.clear()
    told: list[str] = []
    found = http_model(f"{server.url}/m")
    with ModelCache(tmp_path).hold(found, "m", replace(asking, report=told.append)) as held:
        assert {path.name: path.read_bytes() for path in held.path.iterdir()} == tiny_files
    assert any("took over" in text for text in told)
    assert ("GET", f"/m/{name}", "bytes=50000-") in server.requests
