"""Paged attention by the Triton kernels, on a CUDA device."""

import torch

from worker_service.kernels.kv_rounding import LARGEST
from worker_service.kernels.paged import triton_kernels
from worker_service.kernels.paged.problem import PagedBatch, Pages, Rule

# Rows of a tile of new tokens and query heads together, and the fewest that a product takes.
_PREFILL_ROWS, _LEAST_ROWS = 64, 16
# Parts that the positions of a decode are split into, each worked on at the same time, and the fewest positions that
# are worth a part. A sequence's parts depend on its own length alone.
_MOST_SPLITS, _SPLIT_POSITIONS = 16, 256
# A window that nothing is older than.
_EVERYTHING = 1 << 30


class TritonKernel:
    """See PagedKernel."""

    name = "triton"

    def attend(self, query: torch.Tensor, pages: Pages, batch: PagedBatch, rule: Rule) -> torch.Tensor:
        """See PagedKernel."""
        num_tokens, num_heads, head_dim = query.shape
        num_kv_heads, block_size = pages.keys.shape[1:3]
        share = num_heads // num_kv_heads
        is_decode = batch.most_new == 1
        tokens = 1 if is_decode else max(1, _PREFILL_ROWS // share)
        splits = num_splits(batch.longest) if is_decode else 1
        dims = max(_LEAST_ROWS, _power_of_two(head_dim))
        output = query.new_empty(num_tokens, num_heads, head_dim)
        sums, stats = output, output
        if splits > 1:
            sums = query.new_empty(num_tokens, num_heads, splits, head_dim, dtype=torch.float32)
            stats = query.new_empty(num_tokens, num_heads, splits, 2, dtype=torch.float32)
        scales = (pages.keys, pages.values) if pages.key_scales is None else (pages.key_scales, pages.value_scales)
        grid = (-(-batch.most_new // tokens) * splits, len(batch.lengths), num_kv_heads)
        triton_kernels.attend[grid](
            query,
            pages.keys,
            pages.values,
            *scales,
            batch.tables,
            batch.query_start,
            batch.lengths,
            output,
            sums,
            stats,
            rule.scores.scale,
            rule.scores.softcap or 1.0,
            *query.stride()[:2],
            *pages.keys.stride()[:2],
            *_scale_strides(pages),
            batch.tables.stride(0),
            _EVERYTHING if rule.window is None else rule.window,
            HAS_SOFTCAP=rule.scores.softcap is not None,
            IS_ROUNDED=pages.key_scales is not None,
            SHARE=share,
            NUM_HEADS=num_heads,
            TOKENS=tokens,
            ROWS=max(_LEAST_ROWS, _power_of_two(tokens * share)),
            KEYS=64 if dims * query.element_size() <= 256 else 32,
            BLOCK_SIZE=block_size,
            HEAD_DIM=head_dim,
            DIMS=dims,
            SPLITS=splits,
        )
        if splits > 1:
            triton_kernels.combine[(num_tokens * num_heads,)](
                sums, stats, output, HEAD_DIM=head_dim, DIMS=dims, SPLITS=splits
            )
        return output

    def store(self, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor, pages: Pages) -> None:
        """See PagedKernel."""
        num_tokens, num_kv_heads, head_dim = key.shape
        scales = (pages.keys, pages.values) if pages.key_scales is None else (pages.key_scales, pages.value_scales)
        triton_kernels.store[(num_tokens, num_kv_heads)](
            key,
            value,
            slots,
            pages.keys,
            pages.values,
            *scales,
            *key.stride()[:2],
            *value.stride()[:2],
            *pages.keys.stride()[:2],
            *_scale_strides(pages),
            LARGEST=LARGEST.get(pages.keys.dtype, 0.0),
            IS_INTEGER=pages.keys.dtype == torch.int8,
            BLOCK_SIZE=pages.keys.shape[2],
            HEAD_DIM=head_dim,
            DIMS=_power_of_two(head_dim),
            num_warps=1,
        )


def num_splits(longest: int) -> int:
    """Parts of a decode over up to `longest` positions, a power of two."""
    return min(_MOST_SPLITS, _power_of_two(-(-longest // _SPLIT_POSITIONS)))


def _scale_strides(pages: Pages) -> tuple[int, int]:
    if pages.key_scales is None:
        return 0, 0
    block, head, _ = pages.key_scales.stride()
    return block, head


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
