import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from loader.errors import CheckpointError
from loader.files import foreign_kind, parse_json_object, read_exactly, read_head, read_json_object, read_small
from loader.gguf_format import read_gguf_file
from loader.safetensors_format import read_safetensors_file


def test_small_file_that_is_too_large(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b"x" * 11)
    assert read_small(path, 11) == b"x" * 11
    with pytest.raises(CheckpointError, match="larger than 10 bytes"):
        read_small(path, 10)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_json_object(tmp_path / "a.json")
    assert caught.value.code == "not_found"


@pytest.mark.parametrize("content", [b"", b"null", b'"a"', b"1", b"nonsense"])
def test_not_an_object(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_json_object(path)
    assert (caught.value.code, caught.value.file) == ("invalid", path)


def test_reads_to_the_end_and_no_further(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(bytes(range(100)))
    descriptor = os.open(path, os.O_RDONLY)
    try:
        assert read_exactly(descriptor, 10, 95) == bytes(range(95, 100))
        assert read_exactly(descriptor, 10, 5) == bytes(range(5, 15))
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("head", [b"", b"{}", b"\0" * 8, b"plain text"])
def test_nothing_people_mistake_for_weights(head: bytes) -> None:
    assert foreign_kind(head) is None


@pytest.mark.parametrize("read", [read_small, read_head, read_json_object, read_safetensors_file, read_gguf_file])
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path, read: Callable[[Path], object]) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="not a regular file") as caught:
        read(tmp_path / "pipe")
    assert caught.value.file == tmp_path / "pipe"


def test_memory_follows_the_file_and_not_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"x" * 1000)
    tracemalloc.start()
    try:
        read_small(path, 1 << 30)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("content", ['{"a": "\\ud800"}', '{"\\udc00": 1}', '{"a": [{"b": "x\\ud83dy"}]}'])
def test_half_of_a_character(content: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        parse_json_object(Path("a"), content.encode())
    str(caught.value).encode()


def test_a_character_spelled_in_halves() -> None:
    text = json.dumps({"a": "\U0001f600"})
    assert "\\ud83d" in text
    assert parse_json_object(Path("a"), text.encode()) == {"a": "\U0001f600"}
