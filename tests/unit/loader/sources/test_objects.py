import builtins
from collections.abc import Iterator
from typing import Any

import fsspec
import pytest

from loader.errors import CheckpointError
from loader.sources import objects
from loader.sources.objects import object_model
from loader.sources.remote import RemoteFile


@pytest.fixture
def memory(tiny_files: dict[str, bytes]) -> Iterator[Any]:
    """A file system in memory, with a tiny model at /m."""
    system = fsspec.filesystem("memory")
    for name, data in tiny_files.items():
        system.pipe_file(f"/m/{name}", data)
    yield system
    system.store.clear()
    system.pseudo_dirs[:] = [""]


def test_a_folder(memory: Any, tiny_files: dict[str, bytes]) -> None:
    memory.pipe_file("/m/model.py", b"import os")
    memory.pipe_file("/m/pytorch_model.bin", b"\x80\x02")
    model = object_model("memory://m")
    assert {file.name: file.num_bytes for file in model.files} == {n: len(d) for n, d in tiny_files.items()}
    for file in model.files:
        assert b"".join(model.reader.chunks(file, 7)) == tiny_files[file.name][7:]


def test_a_changed_file_is_another_version(memory: Any) -> None:
    before = object_model("memory://m").files
    memory.pipe_file("/m/config.json", memory.cat_file("/m/config.json"))
    changed = [a.name for a, b in zip(before, object_model("memory://m").files, strict=True) if a != b]
    assert changed == ["config.json"]


def test_shards_in_a_folder_of_their_own(memory: Any) -> None:
    index = memory.cat_file("/m/model.safetensors.index.json").replace(b'"model-0', b'"parts/model-0')
    memory.pipe_file("/m/model.safetensors.index.json", index)
    for number in (1, 2):
        name = f"model-0000{number}-of-00002.safetensors"
        memory.mv(f"/m/{name}", f"/m/parts/{name}")
    names = [file.name for file in object_model("memory://m").files]
    assert [name for name in names if "parts/" in name] == [f"parts/model-0000{n}-of-00002.safetensors" for n in (1, 2)]


def test_an_index_that_names_a_missing_shard(memory: Any) -> None:
    memory.rm_file("/m/model-00001-of-00002.safetensors")
    with pytest.raises(CheckpointError, match="lacks a file that its index names") as caught:
        object_model("memory://m")
    assert caught.value.code == "not_found"


def test_one_gguf(memory: Any) -> None:
    memory.pipe_file("/q/m.gguf", b"GGUF1234")
    model = object_model("memory://q/m.gguf")
    assert [(file.name, file.num_bytes) for file in model.files] == [("m.gguf", 8)]
    assert b"".join(model.reader.chunks(model.files[0], 0)) == b"GGUF1234"


@pytest.mark.parametrize("url", ["memory://nothing", "memory://nothing/m.gguf"])
def test_nothing_there(memory: Any, url: str) -> None:
    with pytest.raises(CheckpointError, match="does not exist") as caught:
        object_model(url)
    assert caught.value.code == "not_found"


@pytest.mark.parametrize(
    "url", ["simplecache::memory://m", "zip://m::memory://m", "reference://m", "dir://m", "data://m"]
)
def test_urls_that_lead_through_others(url: str) -> None:
    with pytest.raises(CheckpointError, match="reads through another URL"):
        object_model(url)


def test_a_protocol_that_nobody_knows() -> None:
    with pytest.raises(CheckpointError, match="a protocol that fsspec knows") as caught:
        object_model("nonsense://m")
    assert caught.value.code == "unsupported"


def test_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("s3fs"):
            raise ImportError("No module named 's3fs'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(CheckpointError, match=r"needs another package: .*s3fs") as caught:
        object_model("s3://bucket/m")
    assert caught.value.code == "unsupported"


def test_a_listing_is_bounded(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "MAX_FILES", 3)
    with pytest.raises(CheckpointError, match="name a folder of at most 3 files"):
        object_model("memory://m")


class _Failing:
    def __init__(self, error: Exception) -> None:
        self._error = error

    def __getattr__(self, name: str) -> Any:
        def fail(*args: Any, **kwargs: Any) -> Any:
            raise self._error

        return fail


@pytest.mark.parametrize("error", [PermissionError("denied"), RuntimeError("NoCredentialsError")])
def test_a_store_that_refuses(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setattr(fsspec, "url_to_fs", lambda url: (_Failing(error), "m"))
    with pytest.raises(CheckpointError, match=str(error)) as caught:
        object_model("s3://bucket/m")
    assert caught.value.code == "unavailable"


@pytest.mark.parametrize("size", [None, -1, "7", True])
def test_a_size_that_is_none(memory: Any, monkeypatch: pytest.MonkeyPatch, size: object) -> None:
    monkeypatch.setattr(type(memory), "info", lambda self, path: {"size": size, "type": "file"})
    with pytest.raises(CheckpointError, match="does not tell the size"):
        object_model("memory://q/m.gguf")


def test_failures_while_reading_may_be_tried_again() -> None:
    reader = objects.ObjectReader(_Failing(RuntimeError("throttled")), "m")
    with pytest.raises(OSError, match="throttled"):
        next(reader.chunks(RemoteFile("x", 3), 0))
