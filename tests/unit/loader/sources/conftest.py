from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from loader.sources.cache import Asking, ModelCache
from tests.support.file_server import FileServer, serve_files
from tests.support.tiny_checkpoint import make_tiny_llama


@pytest.fixture
def server() -> Iterator[FileServer]:
    with serve_files() as served:
        yield served


@pytest.fixture
def cache(tmp_path: Path) -> ModelCache:
    return ModelCache(tmp_path / "cache")


@pytest.fixture
def asking() -> Asking:
    """Asks without any wait between two tries."""
    return Asking(pause_s=0.0, patience_s=0.0, poll_s=0.01)


@pytest.fixture(scope="session")
def tiny_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a tiny sharded model, by name."""
    folder = make_tiny_llama(tmp_path_factory.mktemp("tiny"), sharded=True)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def hub(server: FileServer, tiny_files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> FileServer:
    """A Hub with one model, and nothing in the cache of this machine."""
    server.publish("org/tiny", {**tiny_files, "pytorch_model.bin": b"\x80\x02", "modeling.py": b"import os"})
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    return server


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    return folder
