"""Drawing tokens from scores: temperature, top_k, top_p over what top_k left, min_p, typical_p over what these left,
and one point of [0, 1) a row.

A filter is the least score that it keeps, or for typical_p the greatest distance, so tokens that tie at the border
are kept together. What is kept is laid out in the order of token ids and the point picks from it. Nothing of this
depends on the other rows: which of the two ways below a row takes, it takes in any batch.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

IntArray = NDArray[np.int64]

# A draw over the whole vocabulary first finds a run of this many tokens, then the token in it: two short sums
# instead of a long one.
RUN = 256
# Most filters leave fewer tokens than this: then only they are looked at.
NEAR = 64
# How many of the highest scores are looked at next, before all are sorted.
FAR = 1024


@dataclass(frozen=True, slots=True)
class Filters:
    """By row: temperature above 0, top_k (0 for all), top_p, min_p, typical_p (1 for all)."""

    temperature: NDArray[np.float32]
    top_k: IntArray
    top_p: NDArray[np.float64]
    min_p: NDArray[np.float64]
    typical_p: NDArray[np.float64]

    def take(self, rows: IntArray) -> "Filters":
        """Those of some rows."""
        return Filters(
            self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows], self.typical_p[rows]
        )


@dataclass(frozen=True, slots=True)
class _OnDevice:
    """Filters as columns [rows, 1] beside the scores; `log_min_p` is -inf for none."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    log_min_p: torch.Tensor


def draw_tokens(scores: torch.Tensor, vocab_size: int, filters: Filters, points: NDArray[np.float64]) -> IntArray:
    """One token for each row of scores [rows, a multiple of RUN], -inf from vocab_size on, a finite maximum in each."""
    token_ids = np.zeros(len(scores), np.int64)
    left = np.arange(len(scores))
    peaks = scores.amax(-1, keepdim=True)
    is_near = np.where(filters.top_k > 0, filters.top_k <= NEAR, filters.top_p < 1.0)
    near = np.flatnonzero(is_near & (filters.typical_p >= 1.0))
    if len(near):
        found, sure = _draw_near(*_rows(scores, peaks, near), vocab_size, filters.take(near), points[near])
        token_ids[near[sure]] = found[sure]
        left = np.setdiff1d(left, near[sure], assume_unique=True)
    if len(left):
        token_ids[left] = _draw_far(*_rows(scores, peaks, left), vocab_size, filters.take(left), points[left])
    return token_ids


def _draw_near(
    scores: torch.Tensor, peaks: torch.Tensor, vocab_size: int, filters: Filters, points: NDArray[np.float64]
) -> tuple[IntArray, NDArray[np.bool_]]:
    """Tokens, and whether the NEAR highest scores were enough to tell."""
    columns = _columns(filters, scores.device)
    width = min(NEAR, vocab_size)
    highest, token_ids = scores.topk(width, -1)
    highest.sub_(peaks).div_(columns.temperature)
    weights = highest.double().exp_()
    bounded = columns.top_k > 0
    limits = highest.gather(1, columns.top_k.clamp(min=1, max=width) - 1).masked_fill_(~bounded, -torch.inf)
    # Scores that tie with the last one seen may go on beyond it.
    beyond = highest[:, -1:] if width < vocab_size else torch.full_like(peaks, -torch.inf)
    sure = ~bounded | (beyond < limits)
    weights.masked_fill_(highest < limits, 0.0)
    totals = weights.sum(-1, keepdim=True)
    endless = np.flatnonzero(filters.top_k == 0)
    if len(endless) and width < vocab_size:
        whole, whole_peaks = _rows(scores, peaks, endless)
        targets = torch.from_numpy(endless).to(scores.device)
        all_weights = (whole - whole_peaks).div_(columns.temperature[targets]).exp_()
        totals[targets] = all_weights.sum(-1, keepdim=True, dtype=torch.float64)
    place = (weights.cumsum(-1) < columns.top_p * totals).sum(-1, keepdim=True)
    sure &= bounded | (place < width) | (width >= vocab_size)
    nucleus = highest.gather(1, place.clamp_(max=width - 1)).masked_fill_(columns.top_p >= 1.0, -torch.inf)
    limits = torch.maximum(torch.maximum(limits, nucleus), columns.log_min_p)
    sure &= beyond < limits
    weights.masked_fill_(highest < limits, 0.0)
    token_ids, order = token_ids.sort(-1)
    upto = weights.gather(1, order).cumsum_(-1)
    place = _first_above(upto, torch.from_numpy(points).to(scores.device) * upto[:, -1])
    return token_ids.gather(1, place[:, None])[:, 0].cpu().numpy(), sure[:, 0].cpu().numpy()


def _draw_far(
    scores: torch.Tensor, peaks: torch.Tensor, vocab_size: int, filters: Filters, points: NDArray[np.float64]
) -> IntArray:
    columns = _columns(filters, scores.device)
    scores = (scores - peaks).div_(columns.temperature)
    weights = scores.exp()
    narrowed = np.flatnonzero((filters.top_k > 0) | (filters.top_p < 1.0))
    if len(narrowed) or filters.min_p.any():
        limits = columns.log_min_p.clone()
        for width in (FAR, vocab_size):
            ready = narrowed[(filters.top_k[narrowed] <= width) | (width >= vocab_size)]
            if not len(ready):
                continue
            targets = torch.from_numpy(ready).to(scores.device)
            found, sure = nucleus_limits(
                *_rows(scores, weights, ready),
                top_k=columns.top_k[targets],
                top_p=columns.top_p[targets],
                width=min(width, vocab_size),
                is_all=width >= vocab_size,
            )
            limits[targets] = torch.where(sure, torch.maximum(limits[targets], found), limits[targets])
            narrowed = np.setdiff1d(narrowed, ready[sure[:, 0].cpu().numpy()], assume_unique=True)
        weights.masked_fill_(scores < limits, 0.0)
    typical = np.flatnonzero(filters.typical_p < 1.0)
    if len(typical):
        targets = torch.from_numpy(typical).to(scores.device)
        shares = torch.from_numpy(filters.typical_p[typical]).to(scores.device)
        weights[targets] = typical_weights(weights[targets], shares[:, None])
    return pick(weights, torch.from_numpy(points).to(scores.device)).cpu().numpy()


def nucleus_limits(
    scores: torch.Tensor,
    weights: torch.Tensor,
    *,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    width: int,
    is_all: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The least score [rows, 1] of the top_k highest and, of those, of the fewest that hold top_p of their weight.

    `weights` are exp(scores), [rows, vocab]; `top_k` (0 for all, at most width) and `top_p` [rows, 1]. Only the
    `width` highest scores are sorted; the second result says for which rows that was enough.
    """
    highest = _sorted(scores, width) if is_all else scores.topk(width, -1).values
    bounded = top_k > 0
    limits = highest.gather(1, top_k.clamp(min=1) - 1).masked_fill_(~bounded, -torch.inf)
    totals = weights.masked_fill(scores < limits, 0.0).sum(-1, keepdim=True, dtype=torch.float64)
    kept = highest.double().exp_().masked_fill_(highest < limits, 0.0).cumsum_(-1)
    # The place of the token whose weight completes top_p.
    place = (kept < top_p * totals).sum(-1, keepdim=True)
    sure = (place < width) | bounded | (top_p >= 1.0) | is_all
    nucleus = highest.gather(1, place.clamp_(max=width - 1)).masked_fill_(top_p >= 1.0, -torch.inf)
    return torch.maximum(limits, nucleus), sure


def typical_weights(weights: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """Weights [rows, vocab] with only those left whose information is nearest to its mean and that together hold the
    shares [rows, 1] of the whole.

    Locally typical sampling (Meister et al. 2022, arXiv:2202.00666): the distance of a token of probability p is
    |-log p - H|, with H the entropy.
    """
    probabilities = weights.double() / weights.sum(-1, keepdim=True, dtype=torch.float64)
    information = -probabilities.log()
    entropy = torch.where(probabilities > 0, probabilities * information, 0.0).sum(-1, keepdim=True)
    distances, order = (information - entropy).abs_().sort(-1)
    upto = probabilities.gather(1, order).cumsum_(-1)
    place = (upto < shares).sum(-1, keepdim=True).clamp_(max=weights.shape[1] - 1)
    limits = distances.gather(1, place)
    return weights.masked_fill((information - entropy).abs_() > limits, 0.0)


def pick(weights: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """Inverse of the cumulated weights: for each row of [rows, vocab], a multiple of RUN wide and with a positive
    sum, the first token whose cumulated weight exceeds points [rows] x total. Never a token of weight zero."""
    runs = weights.view(weights.shape[0], -1, RUN)
    upto = runs.sum(-1).double().cumsum_(-1)
    goal = points * upto[:, -1]
    run = _first_above(upto, goal)
    before = torch.where(run > 0, upto.gather(1, (run - 1).clamp(min=0)[:, None])[:, 0], 0.0)
    inner = runs.gather(1, run[:, None, None].expand(-1, 1, RUN))[:, 0].double().cumsum_(-1)
    return run * RUN + _first_above(inner, goal - before)


def _first_above(cumulated: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
    # Rounding can put the goal at or above the last sum; the last entry that added something is meant then.
    last = (cumulated < cumulated[:, -1:]).sum(-1)
    return torch.minimum((cumulated <= goal[:, None]).sum(-1), last)


def _sorted(scores: torch.Tensor, width: int) -> torch.Tensor:
    if scores.device.type != "cpu":
        return scores.sort(-1, descending=True).values[:, :width]
    # numpy sorts with vector instructions, several times as fast as torch.
    ascending = np.sort(scores.numpy(), -1)
    return torch.from_numpy(np.ascontiguousarray(ascending[:, ::-1][:, :width]))


def _rows(first: torch.Tensor, second: torch.Tensor, rows: IntArray) -> tuple[torch.Tensor, torch.Tensor]:
    """These rows of two tensors; the tensors themselves when they are all."""
    if len(rows) == len(first):
        return first, second
    index = torch.from_numpy(rows).to(first.device)
    return first[index], second[index]


def _columns(filters: Filters, device: torch.device) -> _OnDevice:
    with np.errstate(divide="ignore"):
        log_min_p = np.log(filters.min_p).astype(np.float32)
    arrays = (filters.temperature, filters.top_k, filters.top_p, log_min_p)
    return _OnDevice(*(torch.from_numpy(array).to(device)[:, None] for array in arrays))
