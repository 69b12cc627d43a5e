"""A plain model of torch's operator for weights of 4 bits on CUDA: its layout, what it asks of its arguments, and what
it computes."""

import pytest
import torch

GROUP_SIZES = (32, 64, 128, 256)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of torch's own, which a CPU has not."""
    monkeypatch.setattr(torch, "_convert_weight_to_int4pack", convert)
    monkeypatch.setattr(torch, "_weight_int4pack_mm", multiply)


def convert(halves: torch.Tensor, inner_tiles: int) -> torch.Tensor:
    """uint8 [out, in / 2], the first of two values in the high bits -> int32 [out / 8, tiles, 32, inner_tiles / 2].

    A word of lane t has eight values of output t // 4 of its tile: of the inputs 2 (t % 4) + (0, 1, 8, 9) of one tile
    of 16 and of the next one, those with even numbers in the low half.
    """
    num_outputs, num_inputs = halves.shape[0], 2 * halves.shape[1]
    assert halves.dtype == torch.uint8 and halves.is_contiguous() and inner_tiles in (2, 4, 8)
    assert num_outputs % 8 == 0 and num_inputs % (16 * inner_tiles) == 0
    values = torch.stack((halves >> 4, halves & 0xF), dim=-1).view(num_outputs, num_inputs).long()
    tiles = values.view(num_outputs // 8, 8, -1, 16 * inner_tiles).transpose(1, 2).flatten(2)
    parts = tiles[:, :, _order(inner_tiles)].view(*tiles.shape[:2], 32, inner_tiles // 2, 8)
    words = (parts << (4 * torch.arange(8))).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def _order(inner_tiles: int) -> torch.Tensor:
    """Which value of a tile, row after row, each part of each of its words is, from the lowest bits on."""
    order = []
    for lane in range(32):
        for pair in range(inner_tiles // 2):
            even = [32 * pair + 16 * tile + 8 * half + 2 * (lane % 4) for tile in (0, 1) for half in (0, 1)]
            order += [lane // 4 * 16 * inner_tiles + offset + odd for odd in (0, 1) for offset in even]
    return torch.tensor(order)


def multiply(x: torch.Tensor, words: torch.Tensor, group_size: int, scales_and_zeros: torch.Tensor) -> torch.Tensor:
    """bfloat16 [rows, in] -> [rows, out], the weight being (q - 8) * scale + zero in bfloat16."""
    num_inputs, num_outputs, inner_tiles = x.shape[1], 8 * words.shape[0], 2 * words.shape[3]
    assert x.dtype == scales_and_zeros.dtype == torch.bfloat16 and words.dtype == torch.int32
    assert x.is_contiguous() and words.is_contiguous() and scales_and_zeros.is_contiguous()
    assert group_size in GROUP_SIZES and num_inputs % group_size == 0
    assert words.shape[1:3] == (num_inputs // (16 * inner_tiles), 32)
    assert scales_and_zeros.shape == (num_inputs // group_size, num_outputs, 2)
    parts = ((words[..., None] >> (4 * torch.arange(8))) & 0xF).flatten(2)
    tiles = torch.empty(parts.shape)
    tiles[:, :, _order(inner_tiles)] = parts.float()
    values = tiles.view(*parts.shape[:2], 8, 16 * inner_tiles).transpose(1, 2).reshape(num_outputs, num_inputs)
    scales, zeros = (part.t().repeat_interleave(group_size, dim=1).float() for part in scales_and_zeros.unbind(2))
    weight = ((values - 8) * scales + zeros).bfloat16()
    return torch.nn.functional.linear(x, weight)
