import os
from pathlib import Path

import pytest

from loader.errors import CheckpointError
from loader.files import foreign_kind, read_exactly, read_json_object, read_small


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
