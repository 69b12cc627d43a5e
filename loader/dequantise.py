"""GGUF block formats -> float tensors, in torch, whole chunks at a time.

Each format is computed in float32 in the order of operations of the reference implementation, so values are equal
bit for bit before the cast to the wanted type.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from loader.gguf_format import GGML_TYPES

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def dequantise(raw: Tensor, dtype: str, out: Tensor) -> None:
    """Writes the values that the bytes `raw` hold in the GGUF type `dtype` into `out`.

    `raw` is uint8 and flat; `out` is contiguous, of any float type, with as many values as `raw` encodes.
    """
    plain = _PLAIN.get(dtype)
    if plain is not None:
        out.view(-1).copy_(raw.view(plain))
        return
    _, block_values, block_bytes = GGML_TYPES[dtype_number(dtype)]
    blocks = raw.view(-1, block_bytes)
    target = out.view(-1, block_values)
    decode = _DECODERS.get(dtype)
    if decode is None:
        target.copy_(_by_reference(blocks, dtype))
    else:
        decode(blocks, target)


def dtype_number(dtype: str) -> int:
    """The number by which GGUF names a storage type."""
    return next(number for number, known in GGML_TYPES.items() if known[0] == dtype)


def _half(blocks: Tensor, start: int) -> Tensor:
    """The float16 at byte `start` of each block, as float32 [num_blocks, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """uint8 [..., n] -> float32 [..., 2, n]: low halves, then high halves."""
    values = torch.empty((*packed.shape[:-1], 2, packed.shape[-1]), dtype=torch.float32)
    values[..., 0, :] = packed & 0x0F
    values[..., 1, :] = packed >> 4
    return values


def _q8_0(blocks: Tensor, out: Tensor) -> None:
    values = blocks[:, 2:].view(torch.int8).float()
    out.copy_(values.mul_(_half(blocks, 0)))


def _q4_0(blocks: Tensor, out: Tensor) -> None:
    values = _nibbles(blocks[:, 2:]).view(-1, 32)
    out.copy_(values.sub_(8.0).mul_(_half(blocks, 0)))


def _q4_1(blocks: Tensor, out: Tensor) -> None:
    values = _nibbles(blocks[:, 4:]).view(-1, 32)
    out.copy_(values.mul_(_half(blocks, 0)).add_(_half(blocks, 2)))


def _fifth_bits(packed: Tensor) -> Tensor:
    """uint8 [num_blocks, 4] -> float32 [num_blocks, 32]: 16 where the bit of a value is set, else 0."""
    shifts = torch.arange(8, dtype=torch.uint8)
    bits = (packed.unsqueeze(-1) >> shifts) & 1
    return bits.reshape(-1, 32).float().mul_(16.0)


def _q5_0(blocks: Tensor, out: Tensor) -> None:
    values = _nibbles(blocks[:, 6:]).view(-1, 32).add_(_fifth_bits(blocks[:, 2:6]))
    out.copy_(values.sub_(16.0).mul_(_half(blocks, 0)))


def _q5_1(blocks: Tensor, out: Tensor) -> None:
    values = _nibbles(blocks[:, 8:]).view(-1, 32).add_(_fifth_bits(blocks[:, 4:8]))
    out.copy_(values.mul_(_half(blocks, 0)).add_(_half(blocks, 2)))


def _six_bit_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """uint8 [num_blocks, 12] -> the 8 scales and 8 minima of a block, float32 [num_blocks, 8] each."""
    first, second, third = packed.view(-1, 3, 4).unbind(1)
    scales = torch.cat([first & 0x3F, (third & 0x0F) | ((first >> 2) & 0x30)], dim=1)
    minima = torch.cat([second & 0x3F, (third >> 4) | ((second >> 2) & 0x30)], dim=1)
    return scales.float(), minima.float()


def _scale_and_shift(blocks: Tensor, values: Tensor, out: Tensor) -> None:
    """`values` [num_blocks, 8, 32] by the scales of Q4_K and Q5_K."""
    scales, minima = _six_bit_scales(blocks[:, 4:16].contiguous())
    scales.mul_(_half(blocks, 0))
    minima.mul_(_half(blocks, 2))
    values.mul_(scales.unsqueeze(-1)).sub_(minima.unsqueeze(-1))
    out.copy_(values.view(-1, 256))


def _q4_k(blocks: Tensor, out: Tensor) -> None:
    values = _nibbles(blocks[:, 16:].contiguous().view(-1, 4, 32)).view(-1, 8, 32)
    _scale_and_shift(blocks, values, out)


def _q5_k(blocks: Tensor, out: Tensor) -> None:
    values = _nibbles(blocks[:, 48:].contiguous().view(-1, 4, 32)).view(-1, 8, 32)
    shifts = torch.arange(8, dtype=torch.uint8).view(1, 8, 1)
    bits = (blocks[:, 16:48].unsqueeze(1) >> shifts) & 1
    values.add_(bits.float().mul_(16.0))
    _scale_and_shift(blocks, values, out)


def _q6_k(blocks: Tensor, out: Tensor) -> None:
    low = blocks[:, :128].contiguous().view(-1, 2, 1, 64)
    low = torch.cat([low & 0x0F, low >> 4], dim=2).view(-1, 8, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(1, 1, 4, 1)
    high = ((blocks[:, 128:192].contiguous().view(-1, 2, 1, 32) >> shifts) & 3).view(-1, 8, 32)
    values = (low | (high << 4)).float().sub_(32.0).view(-1, 16, 16)
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float().mul_(_half(blocks, 208))
    out.copy_(values.mul_(scales.unsqueeze(-1)).view(-1, 256))


def _by_reference(blocks: Tensor, dtype: str) -> Tensor:
    """The rare formats, by the package that defines them. Imported here: it costs a sixth of a second."""
    from gguf import GGMLQuantizationType, quants

    values = quants.dequantize(blocks.numpy(), GGMLQuantizationType[dtype])
    return torch.from_numpy(np.ascontiguousarray(values))


_DECODERS: dict[str, Callable[[Tensor, Tensor], None]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
