"""Paged attention of one step: decode rows batched over sequences, prefill chunks one sequence at a time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from worker_service.models.scores import Scores
from worker_service.runtime.kv_cache import CacheShape, KvCache

IntArray = NDArray[np.int64]

# Most bytes of keys (and again of values) that one decode group gathers, so that a step's memory does
# not grow with batch times longest context.
GATHER_BYTES = 64 * 2**20
# A group is split where padding it to its longest sequence would waste more than this part of it, and
# more tokens than another group costs.
MAX_PADDING = 0.25
FREE_PADDING_TOKENS = 1024
# Where a group has no more positions than this, calling one fused operator costs less than calling five; where it
# has more, batched products are up to three times as fast.
FUSED_TOKENS = 1024
# Queries of a prefill chunk that are computed together; each such tile reads only the keys it may see.
TILE = 128


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decode rows `start` to `stop`, padded to the same number of blocks."""

    start: int
    stop: int
    rows: torch.Tensor
    """KvCache.block_rows of their tables, padded."""
    masks: Mapping[int | None, torch.Tensor]
    """By window: [sequences, 1, positions], 0 or -inf, float32."""


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Batch rows `start` to `stop`: the next tokens of one sequence, after `num_computed` earlier ones."""

    start: int
    stop: int
    num_computed: int
    rows: torch.Tensor
    """KvCache.block_rows of its blocks; unused when num_computed is 0."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """All that attention needs to know of a step, the same for every layer."""

    slot_rows: torch.Tensor
    decode: Sequence[DecodeGroup]
    prefill: Sequence[PrefillChunk]


class AttentionPlanner:
    """Turns a batch's lengths and block tables into a plan. Keeps what does not change between steps."""

    def __init__(
        self,
        cache: KvCache,
        device: torch.device,
        windows: Sequence[int | None] = (),
        scores: Sequence[Scores] = (),
    ) -> None:
        """`windows` tells of each layer how many positions, its own among them, a token sees; None for all.

        Without any, all layers see everything; without `scores`, all take products over sqrt(head_dim).
        A window saves no memory, for block tables stay whole, and little time: only prefill reads less, a decode
        gathers all blocks of its sequence and masks what lies before the window.
        """
        self._cache = cache
        self._device = device
        self.windows = tuple(windows) or (None,) * cache.shape.num_layers
        self.scores = tuple(scores) or (Scores(cache.shape.head_dim**-0.5),) * cache.shape.num_layers
        self._distinct_windows = tuple(set(self.windows))
        shape = cache.shape
        self._max_group_tokens = max(1, GATHER_BYTES // (shape.num_kv_heads * shape.head_dim * shape.gathered_bytes))
        self._causal: dict[int | None, torch.Tensor] = {}

    def plan(self, slots: IntArray, counts: IntArray, computed: IntArray, tables: IntArray) -> AttentionPlan:
        """The plan of a batch whose sequences come as decodes (one new token), longest first, then prefill chunks.

        `counts` new tokens and `computed` earlier ones of each sequence; `tables` [sequences, blocks]
        hold every block of positions below counts + computed.
        """
        num_decodes = int(np.count_nonzero(np.cumsum(counts != 1) == 0))
        lengths = computed + counts
        decode = [
            self._group(first, last, lengths[first:last], tables[first:last])
            for first, last in split_decodes(lengths[:num_decodes], self._max_group_tokens)
        ]
        stops = np.cumsum(counts)
        prefill = [
            self._chunk(int(stops[i] - counts[i]), int(stops[i]), int(computed[i]), tables[i])
            for i in range(num_decodes, len(counts))
        ]
        slot_rows = self._cache.slot_rows(self._tensor(slots))
        return AttentionPlan(slot_rows, decode, prefill)

    def causal_mask(
        self, num_queries: int, num_keys: int, dtype: torch.dtype, window: int | None = None
    ) -> torch.Tensor:
        """[num_queries, num_keys] of 0 and -inf: the last query sees the last key, each one before it one key less.

        All see every key before that, or the last `window` ones. `num_queries` is at most TILE.
        """
        mask = self._causal.get(window)
        if mask is None or mask.shape[-1] < num_keys or mask.dtype != dtype:
            width = max(num_keys, 2 * mask.shape[-1] if mask is not None else 0, 4 * TILE)
            hidden = torch.full((TILE, width), -torch.inf, dtype=dtype, device=self._device)
            mask = hidden.triu(width - TILE + 1)
            if window is not None:
                mask += hidden.tril_(width - TILE - window)
            self._causal[window] = mask
        return mask[TILE - num_queries :, mask.shape[1] - num_keys :]

    def _group(self, first: int, last: int, lengths: IntArray, tables: IntArray) -> DecodeGroup:
        block_size = self._cache.block_size
        num_blocks = -(-int(lengths[0]) // block_size)
        held = -(-lengths // block_size)
        # Padding reads the sequence's own first block, which is cleared and written like any other of its own.
        padded = np.where(np.arange(num_blocks) < held[:, None], tables[:, :num_blocks], tables[:, :1])
        masks = {
            window: self._decode_mask(num_blocks * block_size, lengths, window) for window in self._distinct_windows
        }
        return DecodeGroup(first, last, self._cache.block_rows(self._tensor(padded)), masks)

    def _decode_mask(self, num_positions: int, lengths: IntArray, window: int | None) -> torch.Tensor:
        positions = np.arange(num_positions)
        hidden = positions >= lengths[:, None]
        if window is not None:
            hidden |= positions < lengths[:, None] - window
        mask = np.where(hidden, np.float32(-np.inf), np.float32(0.0))
        return torch.from_numpy(mask)[:, None].to(self._device)

    def _chunk(self, start: int, stop: int, num_computed: int, table: IntArray) -> PrefillChunk:
        if num_computed == 0:
            return PrefillChunk(start, stop, 0, torch.empty(0, dtype=torch.int64))
        num_blocks = -(-(num_computed + stop - start) // self._cache.block_size)
        rows = self._cache.block_rows(self._tensor(table[None, :num_blocks]))
        return PrefillChunk(start, stop, num_computed, rows)

    def _tensor(self, array: IntArray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device, non_blocking=True)


class PagedAttention:
    """One step's attention: the port that models call. See models.decoder.Attention."""

    def __init__(self, cache: KvCache, planner: AttentionPlanner, plan: AttentionPlan) -> None:
        self._cache = cache
        self._planner = planner
        self._plan = plan

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Writes key and value to the cache, then attends. See models.decoder.Attention for the shapes."""
        plan = self._plan
        key, value = self._cache.write(layer, plan.slot_rows, key, value)
        if not plan.prefill and len(plan.decode) == 1:
            return self._decode(layer, plan.decode[0], query)
        output = query.new_empty(query.shape[0], query.shape[1] * query.shape[2])
        for group in plan.decode:
            output[group.start : group.stop] = self._decode(layer, group, query[group.start : group.stop])
        for chunk in plan.prefill:
            part = slice(chunk.start, chunk.stop)
            self._prefill(layer, chunk, query[part], key[part], value[part], output[part])
        return output

    def _decode(self, layer: int, group: DecodeGroup, query: torch.Tensor) -> torch.Tensor:
        num_rows, num_heads, head_dim = query.shape
        num_kv_heads = self._cache.shape.num_kv_heads
        mask = group.masks[self._planner.windows[layer]]
        keys, values = self._cache.gather(layer, group.rows)
        keys = keys.view(num_rows * num_kv_heads, -1, head_dim)
        values = values.view(num_rows * num_kv_heads, -1, head_dim)
        # The query heads that share a key-value head are folded into the query's length.
        folded = query.reshape(num_rows * num_kv_heads, num_heads // num_kv_heads, head_dim)
        how = self._planner.scores[layer]
        if num_rows * keys.shape[1] <= FUSED_TOKENS and how.softcap is None:
            heads = (num_rows, num_kv_heads, -1, head_dim)
            fused = functional.scaled_dot_product_attention(
                folded.view(heads),
                keys.view(heads),
                values.view(heads),
                attn_mask=mask[:, None],
                scale=how.scale,
            )
            return fused.view(num_rows, -1)
        scores = torch.bmm(folded, keys.transpose(1, 2)).view(num_rows, num_heads, -1)
        if how.softcap is None:
            masked = torch.add(mask, scores, alpha=how.scale)
        else:
            masked = capped(scores, how.scale, how.softcap) + mask
        weights = masked.softmax(-1).to(query.dtype)
        return torch.bmm(weights.view(folded.shape[0], folded.shape[1], -1), values).view(num_rows, -1)

    def _prefill(
        self,
        layer: int,
        chunk: PrefillChunk,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        num_tokens, num_heads, head_dim = query.shape
        num_kv_heads = key.shape[1]
        if chunk.num_computed:
            keys, values = self._cache.gather(layer, chunk.rows)
            keys, values = keys.view(num_kv_heads, -1, head_dim), values.view(num_kv_heads, -1, head_dim)
        else:
            keys, values = key.transpose(0, 1), value.transpose(0, 1)
        grouped = query.view(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim).permute(1, 2, 0, 3)
        target = output.view(num_tokens, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
        group_size = grouped.shape[1]
        window, how = self._planner.windows[layer], self._planner.scores[layer]
        for first in range(0, num_tokens, TILE):
            last = min(first + TILE, num_tokens)
            visible = chunk.num_computed + last
            start = 0 if window is None else max(0, chunk.num_computed + first + 1 - window)
            mask = self._planner.causal_mask(last - first, visible - start, query.dtype, window)
            if how.softcap is not None:
                tile = grouped[:, :, first:last]
                scores = capped(tile @ keys[:, None, start:visible].transpose(2, 3), how.scale, how.softcap)
                target[:, :, first:last] = (scores + mask).softmax(-1).to(query.dtype) @ values[:, None, start:visible]
                continue
            target[:, :, first:last] = functional.scaled_dot_product_attention(
                grouped[:, :, first:last],
                keys[:, None, start:visible].expand(-1, group_size, -1, -1),
                values[:, None, start:visible].expand(-1, group_size, -1, -1),
                attn_mask=mask,
                scale=how.scale,
            )


def capped(products: torch.Tensor, scale: float, softcap: float) -> torch.Tensor:
    """Scores of products under a softcap, in float32: SDPA has none."""
    return torch.tanh(products.float() * (scale / softcap)) * softcap


def gather_bytes(shape: CacheShape, num_tokens: int) -> int:
    """Most bytes that gathering keys, or values, takes when contexts are up to `num_tokens` long."""
    return max(GATHER_BYTES, num_tokens * shape.num_kv_heads * shape.head_dim * shape.gathered_bytes)


def split_decodes(lengths: IntArray, max_tokens: int) -> list[tuple[int, int]]:
    """Cuts falling lengths into runs, each to be padded to its first: little padding, and a bound on the tokens
    of a run of more than one sequence."""
    groups: list[tuple[int, int]] = []
    first = 0
    while first < len(lengths):
        longest = int(lengths[first])
        rest = lengths[first : first + max(1, max_tokens // longest)]
        # What a run that ends after each sequence reads, and how much of it is padding.
        read = longest * np.arange(1, len(rest) + 1)
        fits = read - np.cumsum(rest) <= np.maximum(MAX_PADDING * read, FREE_PADDING_TOKENS)
        last = first + (len(rest) if fits.all() else int(np.argmin(fits)))
        groups.append((first, last))
        first = last
    return groups
