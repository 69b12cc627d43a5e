"""How the compiled kernels want weights and keys and values to lie, in plain torch.

All of it is ordinary contiguous tensors: they can be stored in a file and mapped.
"""

import math
import mmap
from dataclasses import dataclass

import torch

from loader.needs import KV_SCALE_BYTES
from worker_service.kernels.kv_rounding import restore_heads, round_heads

LANES = 16
PANEL = 32
"""Rows of a weight that are packed together."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""That the kernels compute in, in the order of SW_F32 and the others."""

_HUGE_PAGE = 2 * 2**20


def rounded_up(count: int, multiple: int) -> int:
    """The next multiple."""
    return -(-count // multiple) * multiple


def depth_of(dtype: torch.dtype) -> int:
    """Values of one row that lie side by side: vdpbf16ps multiplies pairs. Raises ValueError for other types."""
    if dtype not in DTYPES:
        raise ValueError(f"the kernels compute in float32, bfloat16 and float16, not in {dtype}")
    return 2 if dtype == torch.bfloat16 else 1


def empty_huge(num_bytes: int) -> torch.Tensor:
    """Zeroed bytes [num_bytes] in huge pages where the system grants them, occupied when first touched.

    Streaming through weights in small pages costs a walk of the page table every 4 KiB.
    """
    memory = mmap.mmap(-1, max(1, num_bytes) + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    skip = -whole.data_ptr() % _HUGE_PAGE
    return whole[skip : skip + num_bytes]


def pack_linear(weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """[out, in] -> [ceil(out / 32), in / depth, 32, depth], the last rows filled up with zeros.

    `out` is where to put it, of that shape and type. Raises ValueError for a type that is not served
    or, in bfloat16, an odd number of columns.
    """
    depth = depth_of(weight.dtype)
    num_rows, num_columns = weight.shape
    if num_columns % depth:
        raise ValueError(f"a weight with {num_columns} columns cannot be packed in pairs")
    missing = -num_rows % PANEL
    if missing:
        weight = torch.cat((weight, weight.new_zeros(missing, num_columns)))
    panels = weight.reshape(-1, PANEL, num_columns // depth, depth)
    if depth == 2:
        # Pairs move as one, which copies several times as fast.
        pairs = panels.view(torch.int32).permute(0, 2, 1, 3)
        if out is None:
            return pairs.contiguous().view(weight.dtype)
        out.view(torch.int32).copy_(pairs)
        return out
    permuted = panels.permute(0, 2, 1, 3)
    return permuted.contiguous() if out is None else out.copy_(permuted)


def pack_gate_up(gate: torch.Tensor, up: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Two weights [inner, in] in the layout of `pack_linear`, 16 rows of each in turn: one product yields
    both factors of the same columns. Raises ValueError when `inner` is not a multiple of 16."""
    inner, num_columns = gate.shape
    if inner % LANES or up.shape != gate.shape:
        raise ValueError(f"gate {list(gate.shape)} and up {list(up.shape)} must be alike, with a multiple of 16 rows")
    parts = [part.reshape(-1, LANES, num_columns) for part in (gate, up)]
    return pack_linear(torch.stack(parts, 1).view(2 * inner, num_columns), out)


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Keys and values in one buffer [num_blocks, layers, 2, kv_heads, block_size * head_dim].

    Of a block and head, keys lie as [head_dim / depth, block_size, depth] and values as
    [block_size / depth, head_dim, depth]. Where they are `stored` as int8, scales are behind either, float32
    [block_size]. Raises ValueError for sizes that are no multiples of 16.
    """

    num_blocks: int
    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    dtype: torch.dtype
    stored: torch.dtype | None = None

    def __post_init__(self) -> None:
        depth_of(self.dtype)
        if self.stored not in (None, torch.int8):
            raise ValueError(f"the kernels keep keys and values as they are or as int8, not as {self.stored}")
        for name in ("block_size", "head_dim"):
            if getattr(self, name) % LANES:
                raise ValueError(f"{name} {getattr(self, name)} is not a multiple of {LANES}")

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Of the buffer."""
        width = self.head_dim if self.stored is None else self.head_dim + KV_SCALE_BYTES
        return (self.num_blocks, self.num_layers, 2, self.num_kv_heads, self.block_size * width)

    @property
    def held(self) -> torch.dtype:
        """Of the buffer."""
        return self.dtype if self.stored is None else self.stored

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers."""
        return math.prod(self.shape[1:]) * self.held.itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffer."""
        return self.num_blocks * self.block_bytes

    def allocate(self) -> torch.Tensor:
        """The buffer; its memory is occupied block by block, on first use. Raises OSError."""
        return empty_huge(self.num_bytes).view(self.held).view(self.shape)

    def to_plain(self, cache: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of a layer's keys and values, each [num_blocks, kv_heads, block_size, head_dim]."""
        depth, dims = depth_of(self.dtype), (self.num_blocks, self.num_kv_heads)
        plain, num_values = (*dims, self.block_size, self.head_dim), self.block_size * self.head_dim
        keys, key_scales = cache[:, layer, 0].tensor_split([num_values], 2)
        values, value_scales = cache[:, layer, 1].tensor_split([num_values], 2)
        keys = keys.reshape(*dims, self.head_dim // depth, self.block_size, depth).permute(0, 1, 3, 2, 4).reshape(plain)
        values = values.reshape(*dims, -1, self.head_dim, depth).permute(0, 1, 2, 4, 3).reshape(plain)
        if self.stored is None:
            return keys, values
        factors = [scales.contiguous().view(torch.float32) for scales in (key_scales, value_scales)]
        return restore_heads(keys, factors[0], self.dtype), restore_heads(values, factors[1], self.dtype)

    def from_plain(self, cache: torch.Tensor, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Stores what `to_plain` gives."""
        depth, dims = depth_of(self.dtype), (self.num_blocks, self.num_kv_heads)
        num_values = self.block_size * self.head_dim
        if self.stored is not None:
            keys, key_scales = round_heads(keys, self.stored)
            values, value_scales = round_heads(values, self.stored)
            for part, scales in enumerate((key_scales, value_scales)):
                cache[:, layer, part, :, num_values:] = scales.view(torch.int8)
        split_keys = keys.reshape(*dims, self.block_size, self.head_dim // depth, depth)
        split_values = values.reshape(*dims, self.block_size // depth, depth, self.head_dim)
        cache[:, layer, 0, :, :num_values] = split_keys.permute(0, 1, 3, 2, 4).reshape(*dims, -1)
        cache[:, layer, 1, :, :num_values] = split_values.permute(0, 1, 2, 4, 3).reshape(*dims, -1)
