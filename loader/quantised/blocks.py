"""GGUF blocks as they are kept in memory: the integers of a row side by side, and beside them its scales.

Integers come in the order of the inputs, as 4 or 8 bits: what computes with 5 or 6 takes longer to take them apart than
to read them. What a weight stands for is what `loader.dequantise` makes of it, bit for bit.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from loader.quantised.bits import pack_rows, row_bytes
from loader.quantised.packed import GroupedInts
from loader.quantised.schemes import BlockScheme
from loader.shares import Share

# So many values are taken apart at once: each is a byte meanwhile, in several copies.
_TILE_VALUES = 1 << 20


def pack_blocks(stored: Tensor, scheme: BlockScheme, inputs: Share) -> GroupedInts:
    """The columns `inputs` of a weight whose blocks that hold some of them are `stored`, uint8 [rows, bytes]."""
    form, size = scheme.form, scheme.block_size
    wide = scheme.whole_blocks(inputs)
    rows, blocks = stored.shape[0], len(wide) // size
    skip, count = inputs.start - wide.start, len(inputs)
    words = torch.empty((rows, row_bytes(count, form.bits)), dtype=torch.uint8)
    by_block = stored.view(rows * blocks, -1)
    tile = max(1, _TILE_VALUES // len(wide))
    for start in range(0, rows, tile):
        part = slice(start, start + tile)
        words[part] = _words(
            by_block[start * blocks : (start + tile) * blocks], scheme, len(wide), slice(skip, skip + count)
        )
    scales, minima, factors, minimum_factors = (
        None if tensor is None else tensor.reshape(rows, -1).contiguous() for tensor in _scales(by_block, scheme.dtype)
    )
    assert scales is not None
    return GroupedInts(
        words=words,
        scales=scales,
        zeros=None,
        group_of=None,
        bits=form.bits,
        num_inputs=count,
        group_size=form.group_size,
        first=skip,
        minima=minima,
        factors=factors,
        minimum_factors=minimum_factors,
    )


def _words(by_block: Tensor, scheme: BlockScheme, width: int, columns: slice) -> Tensor:
    """The words of the chosen columns of rows of `width` values."""
    form, halves = scheme.form, _HALVES.get(scheme.dtype)
    if halves is not None and columns == slice(0, width):
        start, size = halves
        return _pairs(by_block[:, start:].reshape(by_block.shape[0], -1, size)).view(-1, width // 2)
    values = _INTEGERS[scheme.dtype](by_block).view(-1, width)[:, columns]
    if form.zero:
        values = values + ((1 << (form.bits - 1)) - form.zero)
    return pack_rows(values.contiguous(), form.bits)


# Types of 4 bits with nothing else: where the halves of bytes begin in a block, and of how many bytes all low ones come
# before all high ones.
_HALVES = {"Q4_0": (2, 16), "Q4_1": (4, 16), "Q4_K": (16, 32)}


def _pairs(packed: Tensor) -> Tensor:
    """uint8 [..., n] -> [..., 2, n / 2]: the low halves of each two bytes in one, then the high ones."""
    two = packed.clone(memory_format=torch.contiguous_format).view(torch.int16)
    result = torch.empty((*two.shape[:-1], 2, two.shape[-1]), dtype=torch.uint8)
    first, second = torch.empty_like(two), torch.empty_like(two)  # new memory for each step would take most of the time
    for half in range(2):
        torch.bitwise_and(two, 0x0F, out=first)
        two >>= 4
        torch.bitwise_and(two, 0xF0, out=second)
        first |= second
        result[..., half, :] = first
    return result


def _halves(packed: Tensor) -> Tensor:
    """uint8 [..., n] -> [..., 2, n]: low halves, then high halves."""
    return torch.stack([packed & 0x0F, packed >> 4], dim=-2)


def _shifted(packed: Tensor, shifts: tuple[int, ...], mask: int) -> Tensor:
    """uint8 [..., n] -> [..., shifts, n]: the bits of `mask` above each shift."""
    by = torch.tensor(shifts, dtype=torch.uint8).view(-1, 1)
    return (packed.unsqueeze(-2) >> by) & mask


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:] ^ 0x80


def _q4(blocks: Tensor) -> Tensor:
    return _halves(blocks[:, -16:])


def _q5(blocks: Tensor) -> Tensor:
    fifth = (blocks[:, -20:-16].unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)) & 1
    return _halves(blocks[:, -16:]).view(-1, 32) | (fifth.view(-1, 32) << 4)


def _q2_k(blocks: Tensor) -> Tensor:
    return _shifted(blocks[:, 16:80].reshape(-1, 2, 32), (0, 2, 4, 6), 3)


def _q3_k(blocks: Tensor) -> Tensor:
    low = _shifted(blocks[:, 32:96].reshape(-1, 2, 32), (0, 2, 4, 6), 3).view(-1, 8, 32)
    high = _shifted(blocks[:, :32], tuple(range(8)), 1)
    return low | (high << 2)


def _q4_k(blocks: Tensor) -> Tensor:
    return _halves(blocks[:, 16:].reshape(-1, 4, 32))


def _q5_k(blocks: Tensor) -> Tensor:
    low = _halves(blocks[:, 48:].reshape(-1, 4, 32)).view(-1, 8, 32)
    return low | (_shifted(blocks[:, 16:48], tuple(range(8)), 1) << 4)


def _q6_k(blocks: Tensor) -> Tensor:
    low = _halves(blocks[:, :128].reshape(-1, 2, 64)).view(-1, 8, 32)
    high = _shifted(blocks[:, 128:192].reshape(-1, 2, 32), (0, 2, 4, 6), 3).view(-1, 8, 32)
    return low | (high << 4)


_INTEGERS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4,
    "Q4_1": _q4,
    "Q5_0": _q5,
    "Q5_1": _q5,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
"""Blocks uint8 [num_blocks, bytes] -> their integers, which are not negative, uint8 of num_blocks x values."""

Scales = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]


def _scales(blocks: Tensor, dtype: str) -> Scales:
    """Scales, minima, factors and factors of minima, by blocks; the first two float16, the others int8."""
    if dtype in ("Q4_K", "Q5_K"):
        packed = blocks[:, 4:16]
        first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
        factors = torch.cat([first & 0x3F, (third & 0x0F) | ((first >> 2) & 0x30)], dim=1)
        minimum_factors = torch.cat([second & 0x3F, (third >> 4) | ((second >> 2) & 0x30)], dim=1)
        return _half(blocks, 0), -_half(blocks, 2), factors.view(torch.int8), minimum_factors.view(torch.int8)
    if dtype == "Q2_K":
        packed = blocks[:, :16]
        factors = (packed & 0x0F).view(torch.int8)
        return _half(blocks, 80), -_half(blocks, 82), factors, (packed >> 4).view(torch.int8)
    if dtype == "Q3_K":
        low = _halves(blocks[:, 96:104]).reshape(-1, 16)
        high = _shifted(blocks[:, 104:108], (0, 2, 4, 6), 3).reshape(-1, 16)
        return _half(blocks, 108), None, (low | (high << 4)).view(torch.int8) - 32, None
    if dtype == "Q6_K":
        return _half(blocks, 208), None, blocks[:, 192:208].contiguous().view(torch.int8), None
    return _half(blocks, 0), _half(blocks, 2) if dtype in ("Q4_1", "Q5_1") else None, None, None


def _half(blocks: Tensor, start: int) -> Tensor:
    """The float16 at byte `start` of each block, [num_blocks, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16)
