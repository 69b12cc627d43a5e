"""The KV cache of one rank: one tensor, cut into blocks."""

from dataclasses import dataclass

import numpy as np
import torch

from loader.needs import KV_SCALE_BYTES
from worker_service.kernels.kv_rounding import restore_heads, round_heads
from worker_service.kernels.paged.problem import Pages
from worker_service.runtime.errors import RuntimeFailure


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What one rank stores: keys and values of its own layers and heads, of type `dtype`; rounded to `stored`, one of
    KV_DTYPES, where that is given."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    stored: torch.dtype | None = None

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token position needs, over all layers."""
        head_bytes = self.head_dim * self.dtype.itemsize if self.stored is None else self.head_dim + KV_SCALE_BYTES
        return 2 * self.num_layers * self.num_kv_heads * head_bytes

    @property
    def gathered_bytes(self) -> int:
        """Bytes that one value takes while it is gathered: with codes come their floats."""
        return self.dtype.itemsize + (0 if self.stored is None else 1 + torch.float32.itemsize)


class KvCache:
    """Keys and values in blocks of `block_size` positions, written by slot and read by block.

    Held as [num_blocks, layers, 2, kv_heads, block_size, head_dim]. One head's part of a block is
    contiguous, so gathering block by block gives the [heads, positions, head_dim] that batched
    products want, without another copy. A whole block is contiguous too, so that clearing one, and
    touching its memory for the first time, is one short run. A *slot* is a position's place in the
    cache, block id x block_size + offset. Codes of eight bits have their scales in a tensor of the
    same order, [num_blocks, layers, 2, kv_heads, block_size].

    Every block must be cleared before its first use by a sequence. Positions past a sequence's end
    are multiplied by weights of zero, and zero times what a broken sequence left (NaN) is not zero.
    """

    def __init__(
        self, shape: CacheShape, num_blocks: int, block_size: int, device: torch.device, *, num_spare: int = 0
    ) -> None:
        """Allocates the tensors. `num_spare` blocks come on top, from id `num_blocks` on: no sequence has them.

        Raises RuntimeFailure "out_of_memory".
        """
        self.shape = shape
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_bytes = (num_blocks + num_spare) * block_size * shape.bytes_per_token
        slots = (num_blocks + num_spare, shape.num_layers, 2, shape.num_kv_heads, block_size)
        self._scales: torch.Tensor | None = None
        try:
            # Codes are held as integers always: torch moves floats of eight bits in few of its operators.
            self._data = _zeros((*slots, shape.head_dim), shape.dtype if shape.stored is None else torch.int8, device)
            if shape.stored is not None:
                self._scales = _zeros(slots, torch.float32, device)
        except (MemoryError, RuntimeError) as error:
            raise no_room_for_cache(self.num_bytes, num_blocks, block_size, device) from error
        # The same row numbers serve every layer, keys and values: each has a view that starts at its own first row.
        self._rows_per_block = shape.num_layers * 2 * shape.num_kv_heads
        rows = self._data.view(-1, block_size * shape.head_dim)
        starts = [part * shape.num_kv_heads for part in range(shape.num_layers * 2)]
        self._by_block = [rows[start:] for start in starts]
        self._by_slot = [part.view(-1, shape.head_dim) for part in self._by_block]
        self._heads = torch.arange(shape.num_kv_heads, device=device)
        self._scale_rows: list[torch.Tensor] = []
        if self._scales is not None:
            scale_rows = self._scales.view(-1, block_size)
            self._scale_rows = [scale_rows[start:] for start in starts]

    def clear(self, block_ids: torch.Tensor) -> None:
        """Zeroes whole blocks [num_blocks] in all layers."""
        self._data.index_fill_(0, block_ids, 0)
        if self._scales is not None:
            self._scales.index_fill_(0, block_ids, 0)

    def pages(self, layer: int) -> Pages:
        """A layer's keys and values where they lie, for kernels that read and write them there."""
        data = self._data if self.shape.stored is None else self._data.view(self.shape.stored)
        if self._scales is None:
            return Pages(data[:, layer, 0], data[:, layer, 1])
        return Pages(data[:, layer, 0], data[:, layer, 1], self._scales[:, layer, 0], self._scales[:, layer, 1])

    def block_rows(self, tables: torch.Tensor) -> torch.Tensor:
        """Rows for `gather` of block tables [sequences, blocks]: [sequences * kv_heads * blocks]."""
        rows = tables[:, None, :] * self._rows_per_block + self._heads[None, :, None]
        return rows.flatten()

    def slot_rows(self, slots: torch.Tensor) -> torch.Tensor:
        """Rows for `write` of slots [num_tokens]: [num_tokens * kv_heads]."""
        blocks, offsets = slots // self.block_size, slots % self.block_size
        rows = (blocks[:, None] * self._rows_per_block + self._heads) * self.block_size + offsets[:, None]
        return rows.flatten()

    def write(
        self, layer: int, rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores key and value [num_tokens, kv_heads, head_dim] at `slot_rows`; answers both as they will be read."""
        return self._write(2 * layer, rows, key), self._write(2 * layer + 1, rows, value)

    def gather(self, layer: int, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values at `block_rows`, each [rows, block_size * head_dim]."""
        return self._gather(2 * layer, rows), self._gather(2 * layer + 1, rows)

    def _write(self, part: int, rows: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        by_slot = self._by_slot[part]
        heads = new.reshape(-1, self.shape.head_dim)
        if self.shape.stored is None:
            by_slot.index_copy_(0, rows, heads)
            return new
        codes, scales = round_heads(heads, self.shape.stored)
        by_slot.index_copy_(0, rows, codes.view(torch.int8))
        self._scale_rows[part].view(-1).index_copy_(0, rows, scales)
        return restore_heads(codes, scales, self.shape.dtype).view(new.shape)

    def _gather(self, part: int, rows: torch.Tensor) -> torch.Tensor:
        blocks = self._by_block[part].index_select(0, rows)
        if self.shape.stored is None:
            return blocks
        codes = blocks.view(self.shape.stored).view(len(rows), self.block_size, self.shape.head_dim)
        return restore_heads(codes, self._scale_rows[part].index_select(0, rows), self.shape.dtype).flatten(1)


def no_room_for_cache(num_bytes: int, num_blocks: int, block_size: int, device: torch.device) -> RuntimeFailure:
    """The error for a KV cache whose memory the device did not give."""
    return RuntimeFailure(
        "out_of_memory",
        f"the KV cache needs {num_bytes} bytes ({num_blocks} blocks of {block_size} tokens), which {device} does not "
        "have; lower num_kv_blocks or kv_cache_bytes",
        {"needed_bytes": str(num_bytes), "num_blocks": str(num_blocks), "device": str(device)},
    )


def _zeros(dims: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(dims, dtype=dtype, device=device)
    # numpy leaves the pages to the operating system, which zeroes each on first use; torch would write
    # gigabytes at start-up and occupy them at once.
    count = int(np.prod(dims, dtype=np.int64)) * dtype.itemsize
    return torch.from_numpy(np.zeros(count, np.uint8)).view(dtype).view(dims)
