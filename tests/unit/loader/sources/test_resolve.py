import hashlib
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest
from filelock import SoftFileLock

from loader.checkpoint import open_checkpoint
from loader.errors import CheckpointError
from loader.formats.slicing import Split, slice_checkpoint
from loader.sources.cache import Asking, ModelCache
from loader.sources.resolve import configured_cache, resolve
from tests.support.file_server import COMMIT, FileServer, keep_snapshot
from tests.support.tiny_checkpoint import make_tiny_llama
from tests.support.tiny_gguf import make_tiny_gguf


def silent(text: str) -> None:
    return


def place(model: str, cache: ModelCache, asking: Asking) -> Path:
    with resolve(model, report=silent, cache=cache, asking=asking) as found:
        open_checkpoint(found.path)
        return found.path


def test_a_path_is_itself(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path / "m")
    assert resolve(str(folder), report=silent).path == folder
    assert resolve(f"file://{folder}", report=silent).path == folder


@pytest.mark.parametrize("model", ["missing", "./missing", "/missing/x", "~/missing", "../a/b", "", "a\0b", "a/b/c"])
def test_what_can_only_be_a_path_is_not_looked_for_elsewhere(model: str) -> None:
    assert resolve(model, report=silent).path == Path(model)


def test_a_folder_of_this_machine_comes_before_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny_llama(tmp_path / "org" / "tiny")
    monkeypatch.chdir(tmp_path)
    assert resolve("org/tiny", report=silent).path == Path("org/tiny")
    assert resolve("org/mistyped", report=silent).path == Path("org/mistyped")


def test_from_memory(cache: ModelCache, asking: Asking, tiny_files: dict[str, bytes]) -> None:
    system = fsspec.filesystem("memory")
    try:
        for name, data in tiny_files.items():
            system.pipe_file(f"/m/{name}", data)
        path = place("memory://m", cache, asking)
    finally:
        system.store.clear()
        system.pseudo_dirs[:] = [""]
    assert {file.name: file.read_bytes() for file in path.iterdir()} == tiny_files


def test_from_a_server_and_later_without_it(
    cache: ModelCache, asking: Asking, server: FileServer, tiny_files: dict[str, bytes]
) -> None:
    server.files = {f"/m/{name}": data for name, data in tiny_files.items()}
    path = place(f"{server.url}/m/", cache, asking)
    server.status = {f"/m/{name}": 500 for name in tiny_files}
    assert place(f"{server.url}/m", cache, asking) == path
    server.status["/other/config.json"] = 500
    with pytest.raises(CheckpointError, match="cannot be reached"):
        place(f"{server.url}/other", cache, asking)


def test_from_the_hub_and_later_without_it(
    cache: ModelCache, asking: Asking, hub: FileServer, hub_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = place("org/tiny", cache, asking)
    assert place("hf://org/tiny@main", cache, asking) == path
    assert hub.gets().count("model-00001-of-00002.safetensors") == 1
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    assert place("org/tiny", cache, asking) == path
    with pytest.raises(CheckpointError, match="download the model and pass its folder") as caught:
        place("org/other", cache, asking)
    assert caught.value.code == "unavailable"


def test_a_commit_that_is_here_needs_no_network(
    cache: ModelCache, asking: Asking, hub: FileServer, hub_cache: Path
) -> None:
    path = place(f"org/tiny@{COMMIT}", cache, asking)
    hub.requests.clear()
    assert place(f"org/tiny@{COMMIT}", cache, asking) == path
    assert hub.requests == []


def test_what_the_hubs_own_cache_has_is_not_brought_again(
    cache: ModelCache, asking: Asking, hub: FileServer, hub_cache: Path, tiny_files: dict[str, bytes]
) -> None:
    snapshot = keep_snapshot(hub_cache, "org/tiny", tiny_files)
    assert place("org/tiny", cache, asking) == snapshot
    assert cache.entries() == []
    assert not any(name.endswith(".safetensors") for name in hub.gets())


def test_the_hubs_own_cache_without_a_network(
    cache: ModelCache, hub_cache: Path, tiny_files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    snapshot = keep_snapshot(hub_cache, "org/tiny", tiny_files)
    told: list[str] = []
    assert place("org/tiny", cache, Asking(told.append)) == snapshot
    assert str(snapshot) in told[0]


def test_huggingface_hub_2543_a_lock_left_behind(
    cache: ModelCache, asking: Asking, hub: FileServer, hub_cache: Path, tiny_files: dict[str, bytes]
) -> None:
    """Locks that a crash left in huggingface_hub's cache, as files and held, are not even looked at."""
    locks = hub_cache / ".locks" / "models--org--tiny"
    locks.mkdir(parents=True)
    sums = [hashlib.sha256(data).hexdigest() for data in tiny_files.values()]
    held = [SoftFileLock(locks / f"{sha256}.lock") for sha256 in sums]
    for lock in held:
        lock.acquire()
    try:
        assert {file.name for file in place("org/tiny", cache, asking).iterdir()} == set(tiny_files)
    finally:
        for lock in held:
            lock.release()


def test_a_sliced_checkpoint_from_a_server(
    tmp_path: Path, cache: ModelCache, asking: Asking, server: FileServer
) -> None:
    source, out = open_checkpoint(make_tiny_llama(tmp_path / "m")), tmp_path / "out"
    slice_checkpoint(source, out, Split(2), progress=lambda done, total: None, cancelled=lambda: False)
    server.files = {f"/out/{path.name}": path.read_bytes() for path in out.iterdir()}
    path = place(f"{server.url}/out", cache, asking)
    assert open_checkpoint(path).fingerprint == open_checkpoint(out).fingerprint


@pytest.mark.parametrize("source", ["http", "memory", "hub", "the Hub's own cache"])
def test_all_parts_of_a_gguf_come_with_one(
    tmp_path: Path, cache: ModelCache, asking: Asking, hub: FileServer, hub_cache: Path, source: str
) -> None:
    folder = tmp_path / "parts"
    folder.mkdir()
    make_tiny_gguf(folder / "m.gguf", split_max_tensors=8)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    part = max(files)
    system = fsspec.filesystem("memory")
    for name, data in files.items():
        system.pipe_file(f"/q/{name}", data)
    hub.files |= {f"/q/{name}": data for name, data in files.items()}
    hub.publish("org/quants", {f"Q4/{name}": data for name, data in files.items()})
    if source == "the Hub's own cache":
        keep_snapshot(hub_cache, "org/here", files)
    url = {
        "http": f"{hub.url}/q/{part}",
        "memory": f"memory://q/{part}",
        "hub": f"org/quants/Q4/{part}",
        "the Hub's own cache": f"org/here/{part}@{COMMIT}",
    }[source]
    try:
        path = place(url, cache, asking)
    finally:
        system.store.clear()
        system.pseudo_dirs[:] = [""]
    assert path.name == min(files)
    assert {file.name: file.read_bytes() for file in path.parent.iterdir()} == files


@pytest.mark.parametrize("limit", ["many", "-1", "1.5", "¹"])
def test_a_limit_that_is_no_number(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setenv("STEPWIRE_CACHE_BYTES", limit)
    with pytest.raises(CheckpointError, match="STEPWIRE_CACHE_BYTES"):
        configured_cache()


def test_a_local_path_imports_nothing_of_it(tmp_path: Path) -> None:
    program = (
        "import sys; from loader.sources.resolve import resolve; resolve(sys.argv[1], report=print); "
        "print(sorted({'fsspec', 'huggingface_hub', 'urllib.request', 'torch', 'numpy'} & set(sys.modules)))"
    )
    arguments = [sys.executable, "-c", program, str(tmp_path)]
    result = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stdout.strip()) == (0, "[]"), result.stderr
