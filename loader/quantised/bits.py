"""Values of few bits, packed densely: value i of a row is bits [i · bits, (i + 1) · bits) of the row, lowest first.

Words of 32 bits in this order are the same bits, so a row of words is a row of bytes without a change.
"""

import torch
from torch import Tensor

# Bits of a value -> values and bytes of the smallest group of whole bytes.
GROUPS = {2: (4, 1), 3: (8, 3), 4: (2, 1), 8: (1, 1)}


def row_bytes(num_values: int, bits: int) -> int:
    """Bytes of a row of so many values."""
    values, size = GROUPS[bits]
    return -(-num_values // values) * size


def pack_rows(values: Tensor, bits: int) -> Tensor:
    """uint8 [rows, values], each below 2^bits -> uint8 [rows, bytes]; the end of a row is padded with zeros."""
    if bits == 8:
        return values.contiguous()
    per_group, size = GROUPS[bits]
    rows, count = values.shape
    num_groups = -(-count // per_group)
    padded = torch.nn.functional.pad(values, (0, num_groups * per_group - count)).view(rows, num_groups, per_group)
    if size == 1:
        packed = padded[..., 0].clone()
        for i in range(1, per_group):
            packed |= padded[..., i] << (i * bits)
        return packed
    word = torch.zeros((rows, num_groups), dtype=torch.int32, device=values.device)
    for i in range(per_group):
        word |= padded[..., i].int() << (i * bits)
    return torch.stack([(word >> (8 * i)) & 0xFF for i in range(size)], dim=-1).to(torch.uint8).view(rows, -1)


def unpack_rows(packed: Tensor, bits: int, count: int) -> Tensor:
    """uint8 [rows, bytes] -> the first `count` values of each row, uint8 [rows, count]."""
    if bits == 8:
        return packed[:, :count]
    per_group, size = GROUPS[bits]
    rows, mask = packed.shape[0], (1 << bits) - 1
    if size == 1:
        values = torch.stack([(packed >> (i * bits)) & mask for i in range(per_group)], dim=-1)
        return values.view(rows, -1)[:, :count]
    groups = packed.view(rows, -1, size).int()
    word = groups[..., 0].clone()
    for i in range(1, size):
        word |= groups[..., i] << (8 * i)
    values = torch.stack([(word >> (i * bits)) & mask for i in range(per_group)], dim=-1)
    return values.to(torch.uint8).view(rows, -1)[:, :count]


def rows_of_words(words: Tensor, bits: int, skip: int, count: int) -> Tensor:
    """Words int32 [rows, words] -> the `count` values after the first `skip` of each row, packed as bytes.

    The result shares the words' memory where its rows are the words' whole. The end of a row may hold anything.
    """
    packed = _as_bytes(words)
    if skip == 0:
        return packed[:, : row_bytes(count, bits)].contiguous()
    return pack_rows(unpack_rows(packed, bits, skip + count)[:, skip:], bits)


def values_of_words(words: Tensor, bits: int, skip: int, count: int) -> Tensor:
    """Words int32 [rows, words] -> the `count` values after the first `skip` of each row, uint8 [rows, count]."""
    return unpack_rows(_as_bytes(words), bits, skip + count)[:, skip:]


def _as_bytes(words: Tensor) -> Tensor:
    # By way of one dimension: what counts as contiguous may have any stride along a dimension of 1.
    return words.contiguous().view(-1).view(torch.uint8).view(words.shape[0], -1)
