"""Paged attention against one softmax at a time."""

import itertools
import random

import numpy as np
import pytest
import torch

from worker_service.models.scores import Scores
from worker_service.runtime import attention
from worker_service.runtime.attention import AttentionPlanner, PagedAttention, split_decodes
from worker_service.runtime.kv_cache import CacheShape, KvCache

CPU = torch.device("cpu")
HEADS, KV_HEADS, HEAD_DIM, BLOCK = 6, 2, 16, 4


def reference(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, how: Scores) -> torch.Tensor:
    """query [heads, head_dim] of the last position, keys and values [positions, kv_heads, head_dim]."""
    group = HEADS // KV_HEADS
    rows = []
    for head in range(HEADS):
        scores = keys[:, head // group] @ query[head] * how.scale
        if how.softcap is not None:
            scores = how.softcap * torch.tanh(scores / how.softcap)
        rows.append(scores.softmax(0) @ values[:, head // group])
    return torch.cat(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fused_tokens", [0, 1024])
@pytest.mark.parametrize("window", [None, 1, 9, 1000])
@pytest.mark.parametrize("how", [Scores(HEAD_DIM**-0.5), Scores(0.4), Scores(0.3, 0.7)])
@pytest.mark.parametrize("seed", range(3))
def test_every_token_sees_its_own_past_only(
    seed: int, how: Scores, window: int | None, fused_tokens: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "FUSED_TOKENS", fused_tokens)
    monkeypatch.setattr(attention, "TILE", 8)
    monkeypatch.setattr(attention, "FREE_PADDING_TOKENS", 5)
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    decodes = sorted((rng.randrange(1, 60) for _ in range(rng.randrange(6))), reverse=True)
    computed = [length - 1 for length in decodes] + [rng.choice((0, 1, 4, 13, 30)) for _ in range(rng.randrange(1, 4))]
    counts = [1] * len(decodes) + [rng.randrange(2, 30) for _ in computed[len(decodes) :]]
    lengths = [a + b for a, b in zip(computed, counts, strict=True)]
    blocks = rng.sample(range(200), 200)
    width = max(-(-length // BLOCK) for length in lengths)
    tables = np.zeros((len(lengths), width), np.int64)
    cache = KvCache(CacheShape(2, KV_HEADS, HEAD_DIM, dtype), 200, BLOCK, CPU)
    past, slots = [], []
    for i, length in enumerate(lengths):
        held = -(-length // BLOCK)
        tables[i, :held] = [blocks.pop() for _ in range(held)]
        position = np.arange(length)
        sequence_slots = tables[i, position // BLOCK] * BLOCK + position % BLOCK
        keys, values = torch.randn(2, length, KV_HEADS, HEAD_DIM, generator=generator).to(dtype)
        rows = cache.slot_rows(torch.from_numpy(sequence_slots[: computed[i]]))
        cache.write(1, rows, keys[: computed[i]], values[: computed[i]])
        past.append((keys, values))
        slots.append(sequence_slots[computed[i] :])
    query = torch.randn(sum(counts), HEADS, HEAD_DIM, generator=generator).to(dtype)
    new_keys = torch.cat([keys[start:] for (keys, _), start in zip(past, computed, strict=True)])
    new_values = torch.cat([values[start:] for (_, values), start in zip(past, computed, strict=True)])
    scores = () if how.scale == HEAD_DIM**-0.5 else (Scores(1.0), how)
    planner = AttentionPlanner(cache, CPU, () if window is None else (None, window), scores)
    plan = planner.plan(np.concatenate(slots), np.array(counts), np.array(computed), tables)
    got = PagedAttention(cache, planner, plan)(1, query, new_keys, new_values)
    assert got.dtype == dtype
    row = 0
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    for (keys, values), start, count in zip(past, computed, counts, strict=True):
        for position in range(start, start + count):
            seen = slice(max(0, position + 1 - (window or 1000)), position + 1)
            expected = reference(query[row].float(), keys[seen].float(), values[seen].float(), how)
            torch.testing.assert_close(got[row].float(), expected, rtol=tolerance, atol=tolerance)
            row += 1
    assert not bool(cache._data[:, 0].any())


@pytest.mark.parametrize("seed", range(20))
def test_groups_cover_all_decodes_with_little_padding(seed: int) -> None:
    rng = random.Random(seed)
    lengths = np.array(sorted((int(rng.paretovariate(0.7) * 50) for _ in range(rng.randrange(1, 200))), reverse=True))
    groups = split_decodes(lengths, 50_000)
    assert [first for first, _ in groups] == [0, *(last for _, last in groups[:-1])]
    assert groups[-1][1] == len(lengths)
    for first, last in groups:
        assert first < last
        read = int(lengths[first]) * (last - first)
        padding = read - int(lengths[first:last].sum())
        assert padding <= max(attention.MAX_PADDING * read, attention.FREE_PADDING_TOKENS)
        assert last - first == 1 or read <= 50_000
    for (first, last), (_, after) in itertools.pairwise(groups):
        longer = lengths[first : min(last + 1, after)]
        assert len(split_decodes(longer, 50_000)) > 1, "two groups that could have been one"


def test_no_decodes_make_no_groups() -> None:
    assert split_decodes(np.zeros(0, np.int64), 100) == []


@pytest.mark.parametrize("window", [None, 1, 6, 200])
def test_the_causal_mask_is_right_at_every_size(window: int | None) -> None:
    cache = KvCache(CacheShape(1, 1, 8, torch.float32), 2, 4, CPU)
    planner = AttentionPlanner(cache, CPU)
    for num_queries, num_keys in ((1, 1), (3, 3), (2, 700), (128, 128), (128, 2000), (5, 9)):
        mask = planner.causal_mask(num_queries, num_keys, torch.float32, window)
        visible = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)
        if window is not None:
            visible = visible.triu(num_keys - num_queries - window + 1)
        assert torch.equal(mask == 0.0, visible)
        assert bool((mask[~visible] == -torch.inf).all())
