import json
from collections.abc import Iterator

import pytest

from loader.errors import CheckpointError
from loader.sources import remote
from loader.sources.remote import RemoteFile, choose_files, gguf_names, is_safe_name, last_part, read_small_remote


def choose(names: list[str], contents: dict[str, object] | None = None) -> list[str]:
    files = {name: RemoteFile(name, 10) for name in names}

    def find(name: str) -> RemoteFile:
        return RemoteFile(name, 11)

    read = {name: json.dumps(content).encode() for name, content in (contents or {}).items()}
    return [file.name for file in choose_files("x://m", files, lambda file: read[file.name], find=find)]


INDEX = "model.safetensors.index.json"


def test_one_file_and_what_goes_with_it() -> None:
    wanted = ["chat_template.jinja", "config.json", "merges.txt", "model.safetensors", "tokenizer.json"]
    unwanted = [
        "model.py",
        "pytorch_model.bin",
        "README.md",
        "consolidated.safetensors",
        "x.pt",
        "tokenizer.py",
        "sub/x.json",
    ]
    assert choose(wanted + unwanted) == wanted


def test_an_index_decides() -> None:
    names = ["config.json", INDEX, "a.safetensors", "left_over.safetensors", "m.gguf"]
    weight_map = {"weight_map": {"x": "a.safetensors", "y": "sub/b.safetensors"}}
    assert choose(names, {INDEX: weight_map}) == ["a.safetensors", "config.json", INDEX, "sub/b.safetensors"]


def test_shards_without_an_index() -> None:
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "consolidated.00.safetensors"]
    assert choose(names) == names[:2]


def test_a_sliced_checkpoint() -> None:
    names = ["stepwire.json", "rank-0-of-1-stage-0-of-1.safetensors", "other.safetensors"]
    manifest = {"files": {names[1]: {}}}
    assert choose(names, {"stepwire.json": manifest}) == [names[1], names[0]]


def test_one_gguf_in_parts() -> None:
    names = ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
    assert choose([*names, "config.json"]) == ["config.json", *names]


def test_the_parts_of_a_gguf() -> None:
    assert gguf_names("sub/m.gguf") == ["sub/m.gguf"]
    parts = [f"sub/m-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    assert gguf_names(parts[0]) == gguf_names(parts[2]) == parts
    assert gguf_names("m-00001-of-99999.gguf") == ["m-00001-of-99999.gguf"]


def test_several_ggufs() -> None:
    with pytest.raises(CheckpointError, match=r"name one of them, as in x://m/a\.gguf"):
        choose(["b.gguf", "a.gguf"])


def test_only_pickles() -> None:
    with pytest.raises(CheckpointError, match="pickled weights are never downloaded"):
        choose(["config.json", "pytorch_model.bin"])


def test_too_many_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "MAX_FILES", 3)
    with pytest.raises(CheckpointError, match="holds 4 files"):
        choose(["a", "b", "c", "d"])


@pytest.mark.parametrize(
    "content",
    [
        [],
        {},
        {"weight_map": []},
        {"weight_map": {"x": 1}},
        {"weight_map": {"x": "../a.safetensors"}},
        {"weight_map": {"x": "/a.safetensors"}},
        {"weight_map": {"x": "a.bin"}},
        {"weight_map": {"x": ".hidden.safetensors"}},
    ],
)
def test_an_index_that_is_not_to_be_followed(content: object) -> None:
    with pytest.raises(CheckpointError) as caught:
        choose([INDEX], {INDEX: content})
    assert caught.value.code == "invalid"


@pytest.mark.parametrize("name", ["a", "a/b.json", "ünï.safetensors", "a b.json", "a-1_2.x"])
def test_safe_names(name: str) -> None:
    assert is_safe_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/a",
        "a/",
        "../a",
        "a/../b",
        ".",
        "a//b",
        ".git",
        "a\\b",
        "a\0b",
        "a\nb",
        "a:b",
        "x" * 256,
        "a/b/c/d/e",
        "a\u202eb",
    ],
)
def test_names_that_could_do_harm(name: str) -> None:
    assert not is_safe_name(name)


def test_a_small_file_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "MAX_INDEX_BYTES", 10)

    class Endless:
        read = 0

        def chunks(self, file: RemoteFile, start: int) -> Iterator[bytes]:
            while True:
                self.read += 4
                yield b"1234"

    reader = Endless()
    with pytest.raises(CheckpointError, match="larger than 10 bytes"):
        read_small_remote(reader, RemoteFile("config.json", 3))
    assert reader.read == 12


@pytest.mark.parametrize(
    ("url", "name"),
    [("s3://b/models/m-7B/", "m-7B"), ("http://h/m.gguf?token=1", "m.gguf"), ("x://", "x_"), ("s3://b/..", "model")],
)
def test_a_name_for_the_folder(url: str, name: str) -> None:
    assert last_part(url) == name
