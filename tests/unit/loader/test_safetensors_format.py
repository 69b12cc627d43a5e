import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from loader.errors import CheckpointError
from loader.safetensors_format import read_safetensors_file


def write_raw(path: Path, header: Any, data: bytes = b"", *, padding: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += padding
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def refused(path: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        read_safetensors_file(path)
    assert caught.value.file == path
    assert str(path) in str(caught.value)
    return caught.value


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


@pytest.fixture
def sound(path: Path) -> Path:
    save_file({"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.ones(4, np.int8)}, path)
    return path


@pytest.mark.parametrize("num_header_bytes", [0x280, 0x380, 0x480, 0x8B1F])
def test_a_header_whose_length_begins_like_another_kind_of_file(path: Path, num_header_bytes: int) -> None:
    header = json.dumps({"x": entry([1], 0, 4)}).encode()
    write_raw(path, header, b"1234", padding=b" " * (num_header_bytes - len(header)))
    assert [tensor.name for tensor in read_safetensors_file(path).tensors] == ["x"]


def test_finds_what_the_reference_library_wrote(sound: Path) -> None:
    file = read_safetensors_file(sound)
    raw = sound.read_bytes()
    with safe_open(sound, "np") as reference:
        assert sorted(tensor.name for tensor in file.tensors) == sorted(reference.keys())
        for tensor in file.tensors:
            expected = reference.get_tensor(tensor.name)
            assert tensor.shape == expected.shape
            assert raw[tensor.offset : tensor.offset + tensor.num_bytes] == expected.tobytes()
    assert file.num_bytes == len(raw)


def test_accepts_scalars_empty_tensors_metadata_and_leading_space(path: Path) -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "scalar": entry([], 0, 4),
        "empty": entry([0, 7], 4, 4),
        "half": entry([4], 4, 6, "F4"),
    }
    write_raw(path, b" \n" + json.dumps(header).encode(), b"\0" * 6, padding=b"   ")
    tensors = {tensor.name: tensor for tensor in read_safetensors_file(path).tensors}
    assert tensors["scalar"].num_bytes == 4
    assert tensors["empty"].num_bytes == 0
    assert tensors["half"].num_bytes == 2


def test_one_byte_short(sound: Path) -> None:
    sound.write_bytes(sound.read_bytes()[:-1])
    error = refused(sound)
    assert error.code == "invalid"
    assert "truncated: 1 bytes are missing" in error.message


def test_one_byte_long(sound: Path) -> None:
    sound.write_bytes(sound.read_bytes() + b"\0")
    assert "1 bytes too many" in refused(sound).message


def test_truncated_inside_the_header(sound: Path) -> None:
    sound.write_bytes(sound.read_bytes()[:20])
    assert "truncated inside its header" in refused(sound).message


@pytest.mark.parametrize("size", range(8))
def test_shorter_than_its_length_field(path: Path, size: int) -> None:
    path.write_bytes(b"\0" * size)
    assert f"has {size} bytes" in refused(path).message


def test_missing_file(path: Path) -> None:
    assert refused(path).code == "not_found"


@pytest.mark.parametrize("length", [100_000_001, 1 << 40, (1 << 63) - 1, (1 << 64) - 1])
def test_hostile_header_length(path: Path, length: int) -> None:
    path.write_bytes(struct.pack("<Q", length) + b"{}")
    assert str(length) in refused(path).message


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 123\n", "git-LFS pointer"),
        (b"<!DOCTYPE html><html><body>404</body></html>", "web page"),
        (b"\n<html>", "web page"),
        (b"GGUF\x03\0\0\0", "GGUF"),
        (b"PK\x03\x04" + b"\0" * 40, "zip archive"),
        (b"\x80\x02}q\0.", "pickle"),
    ],
)
def test_names_what_a_renamed_file_is(path: Path, content: bytes, kind: str) -> None:
    path.write_bytes(content)
    error = refused(path)
    assert kind in error.message
    assert error.remedy


@pytest.mark.parametrize(
    ("header", "text"),
    [
        (b"", "not valid JSON"),
        (b"\0\0\0\0", "not valid JSON"),
        (b"[]", "not a JSON object"),
        (b"{", "not valid JSON"),
        (b'{"__metadata__": {}, "x": NaN}', "NaN is no JSON"),
        (b'{"x": [-Infinity]}', "Infinity is no JSON"),
        (b'{"a\xff": 1}', "not UTF-8"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{}}', "occurs twice"),
        ({"__metadata__": {"n": 1}}, "__metadata__"),
        ({"a": []}, "something else than an object"),
        ({"a": entry([1], 0, 4, "F99")}, "unknown type"),
        ({"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}, "unknown type"),
        ({"a": entry([-1], 0, 4)}, "shape"),
        ({"a": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}}, "shape"),
        ({"a": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}, "shape"),
        ({"a": {"dtype": "F32", "shape": "1", "data_offsets": [0, 4]}}, "shape"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}, "data_offsets"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}, "data_offsets"),
        ({"a": {"dtype": "F32", "shape": [1]}}, "data_offsets"),
        ({"a": entry([2], 0, 4)}, "takes 8"),
        ({"a": entry([1], 4, 0)}, "-4 bytes"),
        ({"a": entry([3], 0, 1, "F4")}, "takes 1.5"),
        ({"a": entry([1 << 61, 1 << 61], 0, 4)}, "takes"),
    ],
)
def test_refuses_a_wrong_header(path: Path, header: Any, text: str) -> None:
    write_raw(path, header, b"\0\0\0\0")
    error = refused(path)
    assert error.code == "invalid"
    assert text in error.message


def test_hole_between_tensors(path: Path) -> None:
    write_raw(path, {"a": entry([1], 0, 4), "b": entry([1], 8, 12)}, b"\0" * 12)
    error = refused(path)
    assert "hole" in error.message
    assert error.tensor == "b"


def test_overlapping_tensors(path: Path) -> None:
    write_raw(path, {"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, b"\0" * 12)
    error = refused(path)
    assert "overlaps" in error.message
    assert error.tensor == "b"


def test_data_that_does_not_begin_at_zero(path: Path) -> None:
    write_raw(path, {"a": entry([1], 4, 8)}, b"\0" * 8)
    assert refused(path).expected == "offset 0"


def test_directory_in_place_of_a_file(path: Path) -> None:
    path.mkdir()
    assert "not a regular file" in refused(path).message
