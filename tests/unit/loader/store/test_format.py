"""The header of an entry: what was written comes back, and nothing else is believed."""

import json
import struct
from dataclasses import replace

import numpy as np
import pytest

from loader.store.format import (
    MAGIC,
    PREFIX_BYTES,
    Header,
    StoredTensor,
    decode_header,
    digest,
    encode_header,
    header_length,
    plan_file,
)
from tests.support.restart_store import KEY

TENSOR = StoredTensor("float32", (2, 3), 4096, 24, ("0" * 32,))
HEADER = Header(KEY, "/models/m", 1_700_000_000, 4160, {"w": TENSOR})


def signed(text: bytes) -> tuple[bytes, bytes]:
    """A prefix that vouches for a header."""
    return MAGIC + struct.pack("<Q", len(text)) + bytes.fromhex(digest(text)), text


def split(data: bytes) -> tuple[bytes, bytes]:
    return data[:PREFIX_BYTES], data[PREFIX_BYTES:]


def test_a_header_survives() -> None:
    prefix, text = split(encode_header(HEADER))
    assert header_length(prefix) == len(text)
    assert decode_header(prefix, text, 4160) == HEADER


def test_a_plan_aligns_and_never_overlaps() -> None:
    sizes = [("float32", (3, 5)), ("int8", (7,)), ("bfloat16", (0, 4)), ("uint8", ()), ("float64", (9,))]
    offsets, total = plan_file(sizes, 5000)
    ends = [offset + size for offset, size in zip(offsets, (60, 7, 0, 1, 72), strict=True)]
    assert offsets[0] == 8192 and all(offset % 64 == 0 for offset in offsets)
    assert all(end <= start for end, start in zip(ends, [*offsets[1:], total], strict=True))


def test_large_tensors_have_a_digest_for_each_64_mib() -> None:
    large = StoredTensor("uint8", (130 << 20,), 4096, 130 << 20, ("0" * 32,) * 3)
    pieces = large.pieces()
    assert [end - start for start, end in pieces] == [64 << 20, 64 << 20, 2 << 20]
    assert pieces[0][0] == 4096 and pieces[-1][1] == 4096 + (130 << 20)


@pytest.mark.parametrize(
    ("prefix", "text"),
    [
        (b"", "too short"),
        (bytes(32), "not written to its end"),
        (b"GGUF" + bytes(28), "not written to its end"),
        (MAGIC[:7] + b"\x02" + bytes(24), "format is version 2"),
        (MAGIC + b"\xff" * 24, "claims"),
    ],
)
def test_other_prefixes_are_refused(prefix: bytes, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        header_length(prefix)


@pytest.mark.parametrize(
    "tensor",
    [
        replace(TENSOR, dtype="float3"),
        replace(TENSOR, shape=(2, 4)),
        replace(TENSOR, shape=(-2, -3)),
        replace(TENSOR, offset=4097),
        replace(TENSOR, offset=64),
        replace(TENSOR, offset=1 << 40),
        replace(TENSOR, hashes=()),
        replace(TENSOR, shape=(1,) * 20),
    ],
)
def test_tensors_that_cannot_be_are_refused(tensor: StoredTensor) -> None:
    prefix, text = split(encode_header(replace(HEADER, tensors={"w": tensor})))
    with pytest.raises(ValueError):
        decode_header(prefix, text, 4160)


def test_another_size_of_the_file_is_refused() -> None:
    with pytest.raises(ValueError, match="4159 bytes"):
        decode_header(*split(encode_header(HEADER)), 4159)


@pytest.mark.parametrize(
    "value", [[], {}, {"key": 1}, 3, None, {**json.loads(encode_header(HEADER)[32:]), "tensors": 1}]
)
def test_other_json_is_refused(value: object) -> None:
    with pytest.raises(ValueError):
        decode_header(*signed(json.dumps(value).encode()), 4160)


def test_every_changed_byte_is_found() -> None:
    data = encode_header(HEADER)
    draws = np.random.default_rng(0)
    for place in range(len(data)):
        changed = bytearray(data)
        changed[place] ^= int(draws.integers(1, 256))
        with pytest.raises(ValueError):
            decode_header(*split(bytes(changed)), 4160)
