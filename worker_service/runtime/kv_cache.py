"""The KV cache of one rank: one tensor, cut into blocks."""

from dataclasses import dataclass

import numpy as np
import torch

from worker_service.runtime.errors import RuntimeFailure


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What one rank stores: keys and values of its own layers and heads."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token position needs, over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class KvCache:
    """Keys and values in blocks of `block_size` positions, written by slot and read by block.

    Held as [num_blocks, layers, 2, kv_heads, block_size, head_dim]. One head's part of a block is
    contiguous, so gathering block by block gives the [heads, positions, head_dim] that batched
    products want, without another copy. A whole block is contiguous too, so that clearing one, and
    touching its memory for the first time, is one short run. A *slot* is a position's place in the
    cache, block id x block_size + offset.

    Every block must be cleared before its first use by a sequence. Positions past a sequence's end
    are multiplied by weights of zero, and zero times what a broken sequence left (NaN) is not zero.
    """

    def __init__(self, shape: CacheShape, num_blocks: int, block_size: int, device: torch.device) -> None:
        """Allocates the tensor. Raises RuntimeFailure "out_of_memory"."""
        self.shape = shape
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_bytes = num_blocks * block_size * shape.bytes_per_token
        dims = (num_blocks, shape.num_layers, 2, shape.num_kv_heads, block_size, shape.head_dim)
        try:
            self._data = _zeros(dims, shape.dtype, device)
        except (MemoryError, RuntimeError) as error:
            raise no_room_for_cache(self.num_bytes, num_blocks, block_size, device) from error
        # The same row numbers serve every layer, keys and values: each has a view that starts at its own first row.
        self._rows_per_block = shape.num_layers * 2 * shape.num_kv_heads
        rows = self._data.view(-1, block_size * shape.head_dim)
        starts = [part * shape.num_kv_heads for part in range(shape.num_layers * 2)]
        by_block = [rows[start:] for start in starts]
        by_slot = [part.view(-1, shape.head_dim) for part in by_block]
        self._by_block = list(zip(by_block[::2], by_block[1::2], strict=True))
        self._by_slot = list(zip(by_slot[::2], by_slot[1::2], strict=True))
        self._heads = torch.arange(shape.num_kv_heads, device=device)

    def clear(self, block_ids: torch.Tensor) -> None:
        """Zeroes whole blocks [num_blocks] in all layers."""
        self._data.index_fill_(0, block_ids, 0)

    def block_rows(self, tables: torch.Tensor) -> torch.Tensor:
        """Rows for `gather` of block tables [sequences, blocks]: [sequences * kv_heads * blocks]."""
        rows = tables[:, None, :] * self._rows_per_block + self._heads[None, :, None]
        return rows.flatten()

    def slot_rows(self, slots: torch.Tensor) -> torch.Tensor:
        """Rows for `write` of slots [num_tokens]: [num_tokens * kv_heads]."""
        blocks, offsets = slots // self.block_size, slots % self.block_size
        rows = (blocks[:, None] * self._rows_per_block + self._heads) * self.block_size + offsets[:, None]
        return rows.flatten()

    def write(self, layer: int, rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Stores key and value [num_tokens, kv_heads, head_dim] at `slot_rows`."""
        keys, values = self._by_slot[layer]
        keys.index_copy_(0, rows, key.reshape(-1, self.shape.head_dim))
        values.index_copy_(0, rows, value.reshape(-1, self.shape.head_dim))

    def gather(self, layer: int, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values at `block_rows`, each [rows, block_size * head_dim]."""
        keys, values = self._by_block[layer]
        return keys.index_select(0, rows), values.index_select(0, rows)


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
