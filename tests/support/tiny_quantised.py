"""Quantised weights as each format stores them, with what they stand for, written from the formats' definitions.

Slow and plain: values are put into words one after the other, as Python's integers. Needs no torch.
"""

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_CODES = {"F32": "<f4", "F16": "<f2", "I32": "<i4", "I64": "<i8", "I8": "i1", "F8_E4M3": "u1", "U8": "u1"}


@dataclass(frozen=True, slots=True)
class Tensor:
    """An array with the storage type of safetensors that its bytes are."""

    dtype: str
    array: NDArray[Any]


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """The tensors that stand for a weight, by the last part of their names, and the weight [out, in] itself."""

    tensors: dict[str, Tensor]
    dense: Floats


@dataclass(frozen=True, slots=True)
class Shape:
    """What is to be drawn: the sizes of a weight, and how it is quantised; `group_size` -1 is one group of all.

    Where `balanced`, weights are about 0 on the average, as a model's must be to tell one token from another.
    """

    num_outputs: int
    num_inputs: int
    bits: int = 4
    group_size: int = 32
    symmetric: bool = True
    act_order: bool = False
    scale_dtype: str = "F16"
    balanced: bool = False

    @property
    def group(self) -> int:
        return self.num_inputs if self.group_size == -1 else self.group_size

    @property
    def num_groups(self) -> int:
        return -(-self.num_inputs // self.group)


def words_of(values: Iterable[int], bits: int) -> list[int]:
    """The words of 32 bits that hold the values one after the other, lowest bits first, as signed integers."""
    number, count = 0, 0
    for value in values:
        number |= int(value) << (count * bits)
        count += 1
    num_words = -(-count * bits // 32)
    return [_signed((number >> (32 * word)) & 0xFFFFFFFF) for word in range(num_words)]


def gptq_weight(rng: np.random.Generator, shape: Shape, *, version: int = 1, has_g_idx: bool = True) -> QuantisedWeight:
    """GPTQ in its first or second version."""
    drawn = _draw(rng, shape)
    offset, limit = (1 if version == 1 else 0), 1 << shape.bits
    qweight = [words_of(drawn.values[o], shape.bits) for o in range(shape.num_outputs)]
    qzeros = [
        words_of(((int(drawn.zeros[g, o]) - offset) % limit for o in range(shape.num_outputs)), shape.bits)
        for g in range(shape.num_groups)
    ]
    tensors = {
        "qweight": Tensor("I32", np.array(qweight, dtype=np.int64).T),
        "qzeros": Tensor("I32", np.array(qzeros, dtype=np.int64)),
        "scales": Tensor(shape.scale_dtype, drawn.scales),
    }
    if has_g_idx or shape.act_order:
        tensors["g_idx"] = Tensor("I32", drawn.group_of)
    return QuantisedWeight(tensors, drawn.dense())


def awq_weight(rng: np.random.Generator, shape: Shape) -> QuantisedWeight:
    """AWQ in the version "gemm": nibble n of a word holds column AWQ_ORDER[n] of its eight."""
    drawn = _draw(rng, shape)

    def packed(row: Sequence[int]) -> list[int]:
        columns = [int(row[start + AWQ_ORDER[n]]) for start in range(0, len(row), 8) for n in range(8)]
        return words_of(columns, 4)

    return QuantisedWeight(
        {
            "qweight": Tensor("I32", np.array([packed(drawn.values[:, i]) for i in range(shape.num_inputs)])),
            "qzeros": Tensor("I32", np.array([packed(row) for row in drawn.zeros])),
            "scales": Tensor(shape.scale_dtype, drawn.scales),
        },
        drawn.dense(),
    )


def packed_weight(rng: np.random.Generator, shape: Shape) -> QuantisedWeight:
    """compressed-tensors' pack-quantized."""
    drawn = _draw(rng, shape)
    tensors = {
        "weight_packed": Tensor("I32", np.array([words_of(row, shape.bits) for row in drawn.values])),
        "weight_scale": Tensor(shape.scale_dtype, drawn.scales.T),
        "weight_shape": Tensor("I64", np.array([shape.num_outputs, shape.num_inputs])),
    }
    if not shape.symmetric:
        columns = [words_of(drawn.zeros[g], shape.bits) for g in range(shape.num_groups)]
        tensors["weight_zero_point"] = Tensor("I32", np.array(columns).T)
    if shape.act_order:
        tensors["weight_g_idx"] = Tensor("I32", drawn.group_of)
    return QuantisedWeight(tensors, drawn.dense())


def grid_weight(
    rng: np.random.Generator,
    shape: Shape,
    *,
    dtype: str,
    block: tuple[int, int],
    scale_name: str = "weight_scale",
    scale_shape: tuple[int, ...] | None = None,
) -> QuantisedWeight:
    """8-bit values with a scale a block; a block of 0 rows or columns has all of them."""
    rows, columns = shape.num_outputs, shape.num_inputs
    if dtype == "I8":
        stored: NDArray[Any] = rng.integers(-127, 128, (rows, columns))
        values = stored.astype(np.float64)
        spread = 74.0
    else:
        stored = rng.integers(0, 256, (rows, columns))
        stored[(stored & 0x7F) == 0x7F] = 0  # no number
        values = np.array([e4m3(code) for code in range(256)])[stored]
        spread = 150.0
    grid = tuple(1 if size == 0 else -(-total // size) for total, size in zip((rows, columns), block, strict=True))
    scales = _as_stored(rng.uniform(0.5, 1.5, grid) / spread / np.sqrt(columns), shape.scale_dtype)
    dense = values.astype(np.float32)
    for o in range(rows):
        by_column = [i // block[1] if block[1] else 0 for i in range(columns)]
        dense[o] *= scales[o // block[0] if block[0] else 0].astype(np.float32)[by_column]
    tensors = {
        "weight": Tensor(dtype, stored),
        scale_name: Tensor(shape.scale_dtype, scales if scale_shape is None else scales.reshape(scale_shape)),
    }
    return QuantisedWeight(tensors, dense)


def e4m3(code: int) -> float:
    """The value of a float8 e4m3 that is a number: 1 bit of sign, 4 of exponent, biased by 7, and 3 of mantissa."""
    exponent, mantissa = code >> 3 & 15, code & 7
    size = 2.0 ** (exponent - 7) * (1 + mantissa / 8) if exponent else 2.0**-6 * mantissa / 8
    return -size if code & 128 else size


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """One safetensors file of tensors of any type."""
    header: dict[str, Any] = {}
    data = bytearray()
    for name, tensor in tensors.items():
        raw = np.ascontiguousarray(tensor.array).astype(_CODES[tensor.dtype]).tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.array.shape), "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(data))


@dataclass(frozen=True, slots=True)
class _Drawn:
    """values [out, in]; zeros and scales [groups, out]; the group of each input."""

    values: Ints
    zeros: Ints
    scales: NDArray[Any]
    group_of: Ints

    def dense(self) -> Floats:
        columns = []
        for i, group in enumerate(self.group_of):
            differences = (self.values[:, i] - self.zeros[group]).astype(np.float32)
            columns.append(self.scales[group].astype(np.float32) * differences)
        return np.stack(columns, axis=1)


def _draw(rng: np.random.Generator, shape: Shape) -> _Drawn:
    limit, middle = 1 << shape.bits, 1 << (shape.bits - 1)
    zeros = np.full((shape.num_groups, shape.num_outputs), middle)
    if not shape.symmetric:
        low, high = (middle - 1, middle + 2) if shape.balanced else (0, limit)
        zeros = rng.integers(low, high, zeros.shape)
    group_of = np.arange(shape.num_inputs) // shape.group
    if shape.act_order:
        group_of = rng.permutation(group_of)
    scales = rng.uniform(0.5, 1.5, zeros.shape) / (limit / 3.4) / np.sqrt(shape.num_inputs)
    values = rng.integers(1 if shape.balanced else 0, limit, (shape.num_outputs, shape.num_inputs))
    return _Drawn(values, zeros, _as_stored(scales, shape.scale_dtype), group_of)


def _as_stored(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    return values.astype(_CODES[dtype])


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word
