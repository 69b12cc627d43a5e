"""Random damage to the files of a checkpoint: to bytes, to JSON as text and as values, and to GGUF entries."""

import json
import random
import re
import struct
from collections.abc import Callable
from typing import Any

_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?")
_EDGES = (0, 1, 2, 7, 31, 255, 256, 1 << 16, (1 << 31) - 1, 1 << 32, 1 << 62, (1 << 63) - 1, (1 << 64) - 1)
_TEXTS = ("", "x", "$A", "a:b", "\0", "../x", "/etc/hostname", "\ud800", "é" * 40, "A" * 5000, "<|im_end|>", "llama3")


def damaged_bytes(rng: random.Random, data: bytes, limit: int | None = None) -> bytes:
    """`data` with a few bytes flipped, cut, inserted, copied or set to edge numbers, within its first `limit`."""
    raw = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        end = min(len(raw), limit or len(raw))
        if end == 0:
            break
        position = rng.randrange(end)
        kind = rng.randrange(7)
        if kind == 0:
            raw[position] ^= 1 << rng.randrange(8)
        elif kind == 1:
            raw[position] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, 0x22, 0x7B, 0x5D, rng.randrange(256)))
        elif kind == 2:
            del raw[position : position + rng.choice((1, 1, 4, 8, 100))]
        elif kind == 3:
            raw[position:position] = rng.randbytes(rng.choice((1, 4, 8, 100)))
        elif kind == 4:
            raw[position:position] = raw[position : position + rng.choice((8, 40, 400))]
        elif kind == 5:
            number = struct.pack("<Q", rng.choice(_EDGES))[: rng.choice((1, 4, 8))]
            raw[position : position + len(number)] = number
        else:
            del raw[rng.choice((position, len(raw) - 1)) :]
    return bytes(raw)


def damaged_json(rng: random.Random, text: bytes) -> bytes:
    """`text`, a JSON object, with its values, its structure or its letters changed."""
    if rng.random() < 0.25:
        return damaged_bytes(rng, text)
    if rng.random() < 0.2:
        return _damaged_text(rng, text)
    value = json.loads(text)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        value = _damaged_value(rng, value)
    return json.dumps(value).encode("utf-8", "surrogatepass")


def _damaged_text(rng: random.Random, text: bytes) -> bytes:
    kind = rng.randrange(5)
    if kind == 0:  # the same key twice
        keys = list(re.finditer(rb'"[^"\\]*": ?("[^"\\]*"|[\d.]+|\[[\d, ]*\])', text))
        if keys:
            found = rng.choice(keys)
            return text[: found.start()] + found[0] + b", " + _swapped_number(rng, found[0]) + text[found.end() :]
    if kind == 1:
        return text.replace(b": ", b": " + b'{"a":' * 100_000, 1)
    if kind == 2:
        return _swapped_number(rng, text, rng.choice((b"1" + b"0" * 5000, b"1e999", b"-1e999", b"NaN", b"-Infinity")))
    if kind == 3:
        return b"[" * rng.choice((100, 100_000)) + text
    return _swapped_number(rng, text)


def _swapped_number(rng: random.Random, text: bytes, number: bytes | None = None) -> bytes:
    found = list(_NUMBER.finditer(text))
    if not found:
        return text
    place = rng.choice(found)
    other = number or rng.choice((rng.choice(found)[0], str(rng.choice(_EDGES)).encode(), b"-1", b"0.5", b"1e3"))
    return text[: place.start()] + other + text[place.end() :]


def _strange_value(rng: random.Random) -> Any:
    deep: Any = []
    for _ in range(rng.choice((2, 50, 400))):
        deep = [deep] if rng.random() < 0.5 else {"a": deep}
    numbers = (*_EDGES, -1, 0.5, -0.0, 1e300, float("nan"), float("inf"), 10**300, 10**4000)
    other = (None, True, False, [], {}, deep, ["x"], [0, None], {"a": 1}, [[1 << 40] * 200], [1 << 61] * 3000, [3] * 3)
    return rng.choice((rng.choice(numbers), rng.choice(_TEXTS), rng.choice(other)))


def _damaged_value(rng: random.Random, value: Any) -> Any:
    """Goes down a random path, and changes what is there."""
    if not isinstance(value, dict | list) or not value or rng.random() < 0.02:
        if type(value) in (int, float) and rng.random() < 0.5:
            return value + rng.choice((-1, 1, 8, 64, -value, value))
        return _strange_value(rng)
    keys: list[Any] = list(value) if isinstance(value, dict) else list(range(len(value)))
    key, other = rng.choice(keys), rng.choice(keys)
    kind = rng.randrange(10)
    if kind == 0:
        del value[key]
    elif kind == 1:
        value[key], value[other] = value[other], value[key]
    elif kind == 2:
        value[key] = value[other]
    elif kind == 3:
        value[key] = _strange_value(rng)
    elif kind == 4 and isinstance(value, dict):
        value[rng.choice((*_TEXTS, key + "x", "type", "rope_scaling"))] = rng.choice((value[key], _strange_value(rng)))
    elif kind == 5 and isinstance(value, dict):
        value[rng.choice((key.upper(), key[:-1], other))] = value.pop(key)
    else:
        value[key] = _damaged_value(rng, value[key])
    return value


class GgufParts:
    """A GGUF cut into its entries, tensor descriptions and data, to be joined again with changes."""

    def __init__(self, data: bytes) -> None:
        num_tensors, num_entries = struct.unpack_from("<QQ", data, 8)
        self._data, self._position = data, 24
        self.entries = [self._span(self._skip_entry) for _ in range(num_entries)]
        self.infos = [self._span(self._skip_info) for _ in range(num_tensors)]
        self.body = data[self._position + -self._position % 32 :]

    @property
    def header_size(self) -> int:
        """Bytes before the tensor data."""
        return len(self._data) - len(self.body)

    def damaged(self, rng: random.Random) -> bytes:
        """The file with entries and descriptions removed, doubled, swapped or changed inside."""
        entries, infos, counts_off = list(self.entries), list(self.infos), 0
        for _ in range(rng.choice((1, 1, 2, 4))):
            parts = rng.choice((entries, entries, infos))
            if not parts:
                continue
            index, other = rng.randrange(len(parts)), rng.randrange(len(parts))
            kind = rng.randrange(7)
            if kind == 0:
                del parts[index]
            elif kind == 1:
                parts.append(parts[index])
            elif kind == 2 and parts is entries:  # the value of another key
                parts[index] = self._key(parts[index]) + parts[other][len(self._key(parts[other])) :]
            elif kind == 3 and parts is entries:
                parts[index] = self._key(parts[index]) + _gguf_value(rng)
            elif kind == 4:
                parts[index], parts[other] = parts[other], parts[index]
            elif kind == 5:
                counts_off = rng.choice((-1, 1, 1 << 40, 1 << 63))
            else:
                length = len(self._key(parts[index]))
                parts[index] = parts[index][:length] + damaged_bytes(rng, parts[index][length:], 64)
        counts = ((len(infos) + counts_off) % (1 << 64), len(entries))
        header = self._data[:8] + struct.pack("<QQ", *counts) + b"".join(entries) + b"".join(infos)
        return header + b"\0" * (-len(header) % 32) + self.body

    @staticmethod
    def _key(part: bytes) -> bytes:
        return part[: 8 + struct.unpack_from("<Q", part)[0]] if len(part) >= 8 else part

    def _span(self, skip: Callable[[], None]) -> bytes:
        start = self._position
        skip()
        return self._data[start : self._position]

    def _number(self, layout: str) -> int:
        (value,) = struct.unpack_from(layout, self._data, self._position)
        self._position += struct.calcsize(layout)
        return int(value)

    def _skip_text(self) -> None:
        length = self._number("<Q")
        self._position += length

    def _skip_entry(self) -> None:
        self._skip_text()
        kind, count = self._number("<I"), 1
        if kind == 9:
            kind, count = self._number("<I"), self._number("<Q")
        if kind == 8:
            for _ in range(count):
                self._skip_text()
        else:
            self._position += count * {0: 1, 1: 1, 2: 2, 3: 2, 7: 1, 10: 8, 11: 8, 12: 8}.get(kind, 4)

    def _skip_info(self) -> None:
        self._skip_text()
        num_dims = self._number("<I")
        self._position += 8 * num_dims + 12


def _gguf_value(rng: random.Random) -> bytes:
    number = rng.choice(_EDGES)
    text = rng.choice(_TEXTS).encode("utf-8", "surrogatepass")
    if rng.random() < 0.1:
        text = b"a" * 200_000
    packed = struct.pack("<Q", len(text)) + text
    return rng.choice(
        (
            struct.pack("<IB", 7, number % 2),
            struct.pack("<II", 4, number % (1 << 32)),
            struct.pack("<Ii", 5, -1),
            struct.pack("<IQ", 10, number),
            struct.pack("<If", 6, rng.choice((float("nan"), float("inf"), -1.0, 0.0, 1e30))),
            struct.pack("<Id", 12, 1e308),
            struct.pack("<I", 8) + packed,
            struct.pack("<IIQ", 9, 8, 3) + packed * 3,
            struct.pack("<IIQ", 9, 5, 4) + struct.pack("<4i", 3, -1, 1 << 30, 0),
            struct.pack("<IIQ", 9, 6, 320) + struct.pack("<320f", *[float("nan"), 1.0] * 160),
            struct.pack("<IIQ", 9, rng.choice((0, 7, 8, 9, 12, 99)), number),
            struct.pack("<IIQ", 9, rng.choice((0, 8, 12)), 0),
        )
    )
