import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from loader.errors import CheckpointError
from loader.gguf_format import read_gguf_file
from tests.support.tiny_gguf import make_tiny_gguf


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def entry(key: bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def info(name: bytes, dims: tuple[int, ...] = (4,), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def content(
    *, entries: tuple[bytes, ...] = (), infos: tuple[bytes, ...] = (info(b"t"),), data: bytes = b"\0" * 16
) -> bytes:
    header = b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(entries)) + b"".join(entries) + b"".join(infos)
    return header + b"\0" * (-len(header) % 32) + data


def refused(path: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        read_gguf_file(path)
    assert caught.value.file == path
    return caught.value


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


@pytest.mark.parametrize("quantisation", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_agrees_with_the_reference_reader(path: Path, quantisation: str) -> None:
    make_tiny_gguf(path, quantisation=quantisation)
    file, reference = read_gguf_file(path), gguf.GGUFReader(path)
    for field in reference.fields.values():
        if not field.name.startswith("GGUF."):
            value = file.metadata[field.name]
            value = list(value) if hasattr(value, "tolist") else value
            assert value == field.contents()
    expected = {
        tensor.name: (tensor.tensor_type.name, tuple(reversed(tensor.shape.tolist())), tensor.data_offset)
        for tensor in reference.tensors
    }
    assert {tensor.name: (tensor.dtype, tensor.shape, tensor.offset) for tensor in file.tensors} == expected
    assert {tensor.name: tensor.num_bytes for tensor in file.tensors} == {
        tensor.name: int(tensor.n_bytes) for tensor in reference.tensors
    }


def test_every_kind_of_value(path: Path) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("u8", 255)
    writer.add_int8("i8", -1)
    writer.add_uint16("u16", 65535)
    writer.add_int16("i16", -2)
    writer.add_int32("i32", -3)
    writer.add_uint64("u64", 2**64 - 1)
    writer.add_int64("i64", -(2**63))
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_string("text", "grüße")
    writer.add_array("bools", [True, False])
    writer.add_array("texts", ["a", "", "ß"])
    writer.add_array("floats", [0.5, -1.0])
    writer.add_tensor("t", np.zeros((2, 3), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    metadata = read_gguf_file(path).metadata
    assert [metadata[key] for key in ("u8", "i8", "u16", "i16", "i32")] == [255, -1, 65535, -2, -3]
    assert [metadata[key] for key in ("u64", "i64", "f64", "yes", "text")] == [2**64 - 1, -(2**63), 0.1, True, "grüße"]
    assert [list(metadata[key]) for key in ("bools", "texts", "floats")] == [  # type: ignore[arg-type]
        [True, False],
        ["a", "", "ß"],
        [0.5, -1.0],
    ]


def test_vocabulary_longer_than_the_first_read(path: Path) -> None:
    tokens = [f"{number:0100d}" for number in range(50_000)]
    make_tiny_gguf(path, metadata={"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": None})
    assert read_gguf_file(path).metadata["tokenizer.ggml.tokens"] == tokens


def test_version_2(path: Path) -> None:
    raw = make_tiny_gguf(path).read_bytes()
    path.write_bytes(b"GGUF" + struct.pack("<I", 2) + raw[8:])
    assert read_gguf_file(path).version == 2


def test_own_alignment(path: Path) -> None:
    header = content(entries=(entry(b"general.alignment", 4, struct.pack("<I", 64)),), data=b"")
    path.write_bytes(header + b"\0" * (-len(header) % 64) + b"\1" * 16)
    assert read_gguf_file(path).tensors[0].offset % 64 == 0


@pytest.mark.parametrize("value", [0, 4, 24, 1 << 21])
def test_bad_alignment(path: Path, value: int) -> None:
    path.write_bytes(content(entries=(entry(b"general.alignment", 4, struct.pack("<I", value)),)))
    assert "alignment" in refused(path).message


def test_one_byte_short(path: Path) -> None:
    raw = make_tiny_gguf(path).read_bytes()
    path.write_bytes(raw[:-1])
    assert "1 bytes are missing" in refused(path).message


def test_one_byte_long(path: Path) -> None:
    raw = make_tiny_gguf(path).read_bytes()
    path.write_bytes(raw + b"\0")
    assert "1 bytes too many" in refused(path).message


def test_padding_after_the_last_tensor_is_allowed(path: Path) -> None:
    path.write_bytes(content(data=b"\0" * 16))
    assert read_gguf_file(path).tensors[0].num_bytes == 16
    path.write_bytes(content(data=b"\0" * 32))
    assert read_gguf_file(path).num_bytes % 32 == 0


def test_truncated_anywhere_in_the_header(path: Path) -> None:
    raw = content(
        entries=(
            entry(b"a", 8, text(b"abc")),
            entry(b"b", 9, struct.pack("<IQ", 8, 2) + text(b"x") + text(b"yz")),
            entry(b"c", 9, struct.pack("<IQ3i", 5, 3, 1, 2, 3)),
        )
    )
    path.write_bytes(raw)
    read_gguf_file(path)
    for size in range(len(raw)):
        path.write_bytes(raw[:size])
        assert refused(path).code == "invalid"


def test_empty_file(path: Path) -> None:
    path.write_bytes(b"")
    assert "not a GGUF file" in refused(path).message


def test_missing_file(path: Path) -> None:
    assert refused(path).code == "not_found"


def test_directory(path: Path) -> None:
    path.mkdir()
    assert "not a regular file" in refused(path).message


def test_web_page(path: Path) -> None:
    path.write_bytes(b"<!DOCTYPE html><html>Sign in</html>")
    assert "web page" in refused(path).message


@pytest.mark.parametrize(("version", "name"), [(1, "version 1"), (4, "version 4"), (3 << 24, "big-endian")])
def test_version_we_do_not_read(path: Path, version: int, name: str) -> None:
    path.write_bytes(b"GGUF" + struct.pack("<I", version) + content()[8:])
    error = refused(path)
    assert error.code == "unsupported"
    assert name in error.message


HUGE = struct.pack("<Q", (1 << 64) - 1)


@pytest.mark.parametrize(
    "raw",
    [
        b"GGUF" + struct.pack("<I", 3) + HUGE + struct.pack("<Q", 0),
        b"GGUF" + struct.pack("<I", 3) + struct.pack("<Q", 0) + HUGE,
        content(entries=(HUGE + b"key",)),
        content(entries=(entry(b"a", 8, HUGE),)),
        content(entries=(entry(b"a", 9, struct.pack("<I", 8) + HUGE),)),
        content(entries=(entry(b"a", 9, struct.pack("<I", 5) + HUGE),)),
        content(entries=(entry(b"a", 9, struct.pack("<I", 7) + HUGE),)),
        content(entries=(entry(b"a", 9, struct.pack("<I", 9) + HUGE),)),
        content(entries=(entry(b"a", 9, struct.pack("<IQ", 8, 2) + text(b"x") + HUGE),)),
        content(infos=(HUGE,)),
        content(infos=(info(b"t", (1 << 60, 1 << 60)),)),
        content(infos=(info(b"t", (0,)),)),
        content(infos=(info(b"t", (4, 1 << 40)),)),
        content(infos=(info(b"t", offset=1 << 60),)),
        content(infos=(text(b"t") + struct.pack("<I", 5) + b"\0" * 60,)),
        content(infos=(text(b"t") + struct.pack("<I", 0) + b"\0" * 60,)),
        content(infos=(text(b"t") + struct.pack("<I", 0xFFFFFFFF),)),
    ],
)
def test_hostile_lengths(path: Path, raw: bytes) -> None:
    path.write_bytes(raw)
    assert refused(path).code == "invalid"


def test_header_beyond_the_limit(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loader.gguf_format.MAX_HEADER_BYTES", 4096)
    path.write_bytes(content(entries=(entry(b"a", 8, text(b"x" * 5000)),)))
    assert "more than 4096 bytes" in refused(path).message


@pytest.mark.parametrize(
    ("raw", "what"),
    [
        (content(entries=(entry(b"a\xff", 7, b"\1"),)), "not UTF-8"),
        (content(entries=(entry(b"a", 8, text(b"\xff")),)), "not UTF-8"),
        (content(entries=(entry(b"a", 9, struct.pack("<IQ", 8, 1) + text(b"\xff")),)), "not UTF-8"),
        (content(infos=(info(b"\xff"),)), "not UTF-8"),
        (content(entries=(entry(b"a", 7, b"\1"), entry(b"a", 7, b"\1"))), "twice"),
        (content(infos=(info(b"t"), info(b"t", offset=32)), data=b"\0" * 48), "twice"),
        (content(entries=(entry(b"a", 13, b""),)), "unknown type 13"),
        (content(entries=(entry(b"a", 9, struct.pack("<IQ", 9, 0)),)), "unknown type 9"),
        (content(infos=()), "no tensors"),
    ],
)
def test_refuses_what_makes_no_sense(path: Path, raw: bytes, what: str) -> None:
    path.write_bytes(raw)
    assert what in refused(path).message


@pytest.mark.parametrize(("offset", "size"), [(16, 48), (0, 16), (64, 80)])
def test_overlap_and_hole(path: Path, offset: int, size: int) -> None:
    path.write_bytes(content(infos=(info(b"t"), info(b"u", offset=offset)), data=b"\0" * size))
    assert refused(path).tensor in ("t", "u")


@pytest.mark.parametrize(("kind", "name"), [(16, "IQ2_XXS"), (999, "number 999")])
def test_storage_type_we_do_not_read(path: Path, kind: int, name: str) -> None:
    path.write_bytes(content(infos=(info(b"t", (256,), kind),)))
    error = refused(path)
    assert (error.code, error.found, error.tensor) == ("unsupported", name, "t")


def test_rows_that_do_not_fill_their_blocks(path: Path) -> None:
    path.write_bytes(content(infos=(info(b"t", (33,), 8),)))
    assert "multiple of 32" in (refused(path).expected or "")


def test_random_damage_never_escapes(path: Path) -> None:
    """Whatever a flipped byte does to the header, it is read or refused; nothing else comes out."""
    raw = make_tiny_gguf(path).read_bytes()
    header = read_gguf_file(path).tensors[0].offset
    rng = np.random.default_rng(0)
    outcomes: set[Callable[..., object] | str] = set()
    for position in rng.integers(0, header, 300).tolist():
        damaged = bytearray(raw)
        damaged[position] ^= 1 << int(rng.integers(0, 8))
        path.write_bytes(damaged)
        try:
            read_gguf_file(path)
            outcomes.add("read")
        except CheckpointError as error:
            outcomes.add(error.code)
    assert "invalid" in outcomes
