"""Paged attention in plain torch, one sequence after the other: slow, and plainly right."""

import itertools

import torch

from worker_service.kernels.kv_rounding import restore_heads, round_heads
from worker_service.kernels.paged.problem import PagedBatch, Pages, Rule


class ReferenceKernel:
    """See PagedKernel; it does ask the device for values. Computes in float32."""

    name = "reference"

    def attend(self, query: torch.Tensor, pages: Pages, batch: PagedBatch, rule: Rule) -> torch.Tensor:
        """See PagedKernel."""
        output = torch.empty_like(query)
        starts = batch.query_start.tolist()
        for i, (start, stop) in enumerate(itertools.pairwise(starts)):
            length, block_size = int(batch.lengths[i]), pages.keys.shape[2]
            blocks = batch.tables[i, : -(-length // block_size)].long()
            keys, values = (part[:, :length] for part in _gathered(pages, blocks))
            output[start:stop] = _attended(query[start:stop].float(), keys, values, rule).to(query.dtype)
        return output

    def store(self, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor, pages: Pages) -> None:
        """See PagedKernel."""
        block_size = pages.keys.shape[2]
        blocks, offsets = slots // block_size, slots % block_size
        for new, kept, scales in (
            (key, pages.keys, pages.key_scales),
            (value, pages.values, pages.value_scales),
        ):
            if scales is None:
                kept[blocks, :, offsets] = new
                continue
            codes, factors = round_heads(new, kept.dtype)
            kept.view(torch.uint8)[blocks, :, offsets] = codes.view(torch.uint8)
            scales[blocks, :, offsets] = factors


def _gathered(pages: Pages, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of these blocks in float32, each [kv_heads, positions, head_dim]."""
    parts = []
    for kept, scales in ((pages.keys, pages.key_scales), (pages.values, pages.value_scales)):
        if scales is None:
            whole = kept[blocks].float()
        else:
            whole = restore_heads(kept.view(torch.uint8)[blocks].view(kept.dtype), scales[blocks], torch.float32)
        parts.append(whole.transpose(0, 1).flatten(1, 2))
    return parts[0], parts[1]


def _attended(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rule: Rule) -> torch.Tensor:
    """query [num_new, heads, head_dim] of the last positions -> the same."""
    num_new, num_heads, _ = query.shape
    share = num_heads // keys.shape[0]
    scores = torch.einsum("qhd,hkd->hqk", query, keys.repeat_interleave(share, 0)) * rule.scores.scale
    if rule.scores.softcap is not None:
        scores = torch.tanh(scores / rule.scores.softcap) * rule.scores.softcap
    places = torch.arange(keys.shape[1], device=query.device)
    own = places[-num_new:, None]
    hidden = places > own
    if rule.window is not None:
        hidden |= places <= own - rule.window
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hqk,hkd->qhd", weights, values.repeat_interleave(share, 0))
