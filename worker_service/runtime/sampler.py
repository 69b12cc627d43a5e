"""From logits to tokens, for all sequences of a step at once.

The order is: penalties, stop tokens masked before min_tokens, temperature, top_k, top_p over what
top_k left, min_p, draw. Filters are thresholds on the score, so tokens that tie at the border
are kept together, and what a sequence draws does not depend on who else is in the batch.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from worker_service.runtime.penalties import Penalties
from worker_service.runtime.rng import uniforms
from worker_service.runtime.sequences import SamplingColumns
from worker_service.runtime.step import Logprobs

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

# The draw first finds a run of this many tokens, then the token in it: two short sums instead of a long one.
RUN = 256
# How many of the highest scores are looked at to find a sequence's threshold, before all are sorted.
WIDTHS = (64, 1024)


@dataclass(slots=True)
class Sampled:
    """Tokens [rows]; `failed` rows had no finite logit, their token means nothing. `logprobs` by place in the batch."""

    token_ids: IntArray
    failed: BoolArray
    logprobs: dict[int, Logprobs] = field(default_factory=dict)


class Sampler:
    """Draws tokens; keeps the penalties' state, and reads sampling parameters from the table's columns."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self.penalties = Penalties(vocab_size, device)

    def sample(self, logits: torch.Tensor, rows: IntArray, num_outputs: IntArray, sampling: SamplingColumns) -> Sampled:
        """One token for each of logits [rows, vocab_size], of the sequences at table rows `rows` that have
        `num_outputs` output tokens so far. Leaves logits as they are; records nothing."""
        masked = (sampling.min_tokens[rows] > num_outputs) & (sampling.num_stops[rows] > 0)
        random = sampling.temperature[rows] > 0
        special = masked | random | sampling.has_penalty[rows]
        if not special.any():
            sampled = _greedy(logits)
        else:
            sampled = Sampled(np.zeros(len(rows), np.int64), np.zeros(len(rows), np.bool_))
            plain, others = np.flatnonzero(~special), np.flatnonzero(special)
            if len(plain):
                _merge(sampled, plain, _greedy(logits[self._tensor(plain)]))
            scores = self._scores(logits, others)
            self._edit(scores, rows[others], masked[others], sampling)
            self._choose(sampled, scores, others, rows, num_outputs, sampling)
        self._add_logprobs(sampled, logits, rows, sampling)
        return sampled

    def _scores(self, logits: torch.Tensor, which: IntArray) -> torch.Tensor:
        width = -(-self._vocab_size // RUN) * RUN
        scores = logits.new_empty(len(which), width, dtype=torch.float32)
        scores[:, self._vocab_size :] = -torch.inf
        scores[:, : self._vocab_size] = logits if len(which) == len(logits) else logits[self._tensor(which)]
        return scores

    def _edit(self, scores: torch.Tensor, rows: IntArray, masked: BoolArray, sampling: SamplingColumns) -> None:
        penalised = np.flatnonzero(sampling.has_penalty[rows])
        if len(penalised):
            self.penalties.apply(scores, penalised, rows[penalised], sampling)
        places, columns = np.nonzero((sampling.stops[rows] >= 0) & masked[:, None])
        if len(places):
            tokens = sampling.stops[rows[places], columns]
            scores[self._tensor(places), self._tensor(tokens)] = -torch.inf

    def _choose(
        self,
        sampled: Sampled,
        scores: torch.Tensor,
        others: IntArray,
        rows: IntArray,
        num_outputs: IntArray,
        sampling: SamplingColumns,
    ) -> None:
        random = sampling.temperature[rows[others]] > 0
        if not random.all():
            greedy = np.flatnonzero(~random)
            _merge(sampled, others[greedy], _greedy(scores[self._tensor(greedy)]))
        if random.any():
            drawn = others[random]
            part = scores if random.all() else scores[self._tensor(np.flatnonzero(random))]
            points = uniforms(sampling.seed[rows[drawn]], sampling.sequence_index[rows[drawn]], num_outputs[drawn])
            _merge(sampled, drawn, self._draw(part, rows[drawn], points, sampling))

    def _draw(
        self, scores: torch.Tensor, rows: IntArray, points: NDArray[np.float64], sampling: SamplingColumns
    ) -> Sampled:
        peaks = scores.amax(-1, keepdim=True)
        failed = ~torch.isfinite(peaks)
        if bool(failed.any()):
            scores.masked_fill_(failed, 0.0)
            peaks = peaks.masked_fill(failed, 0.0)
        scores.sub_(peaks).div_(torch.from_numpy(sampling.temperature[rows])[:, None].to(self._device))
        weights = scores.exp()
        limits = self._limits(scores, weights, rows, sampling)
        if limits is not None:
            weights.masked_fill_(scores < limits[:, None], 0.0)
        token_ids = draw(weights, torch.from_numpy(points).to(self._device))
        return Sampled(token_ids.cpu().numpy(), failed[:, 0].cpu().numpy())

    def _limits(
        self, scores: torch.Tensor, weights: torch.Tensor, rows: IntArray, sampling: SamplingColumns
    ) -> torch.Tensor | None:
        """The least score that each row keeps [rows]; None when none filters."""
        top_k, top_p, min_p = sampling.top_k[rows], sampling.top_p[rows], sampling.min_p[rows]
        narrowed = np.flatnonzero((top_k > 0) | (top_p < 1.0))
        if not len(narrowed) and not min_p.any():
            return None
        with np.errstate(divide="ignore"):
            limits = torch.from_numpy(np.log(min_p).astype(np.float32)).to(self._device)
        keep = np.where(top_k > 0, top_k, self._vocab_size)
        for width in (*WIDTHS, self._vocab_size):
            ready = narrowed if width >= self._vocab_size else narrowed[(top_k[narrowed] <= width)]
            if len(ready):
                targets = self._tensor(ready)
                whole = len(ready) == len(scores)
                found, sure = nucleus_limits(
                    scores if whole else scores[targets],
                    weights if whole else weights[targets],
                    keep=torch.from_numpy(keep[ready]).to(self._device),
                    top_p=torch.from_numpy(top_p[ready]).to(self._device),
                    width=min(width, self._vocab_size),
                )
                sure |= width >= self._vocab_size
                limits[targets] = torch.where(sure, torch.maximum(limits[targets], found), limits[targets])
                narrowed = np.setdiff1d(narrowed, ready[sure.cpu().numpy()], assume_unique=True)
            if not len(narrowed):
                break
        return limits

    def _add_logprobs(self, sampled: Sampled, logits: torch.Tensor, rows: IntArray, sampling: SamplingColumns) -> None:
        wanted = np.flatnonzero((sampling.num_logprobs[rows] >= 0) & ~sampled.failed)
        if not len(wanted):
            return
        logprobs = functional.log_softmax(logits[self._tensor(wanted)].float(), -1)
        chosen = logprobs.gather(1, self._tensor(sampled.token_ids[wanted])[:, None])[:, 0].tolist()
        counts = sampling.num_logprobs[rows[wanted]]
        values, ids = logprobs.topk(int(counts.max()), -1)
        for place, value, count, top_values, top_ids in zip(
            wanted.tolist(), chosen, counts.tolist(), values.tolist(), ids.tolist(), strict=True
        ):
            top = list(zip(top_ids[:count], top_values[:count], strict=True))
            sampled.logprobs[place] = Logprobs(int(sampled.token_ids[place]), value, top)

    def _tensor(self, array: IntArray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)


def nucleus_limits(
    scores: torch.Tensor, weights: torch.Tensor, *, keep: torch.Tensor, top_p: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The least score among the `keep` highest and, of those, the fewest that hold `top_p` of their weight.

    `weights` are exp(scores), [rows, vocab]; `keep` and `top_p` [rows]. Only the `width` highest scores are
    sorted; the second result says for which rows they were enough. `keep` beyond width means all.
    """
    highest = scores.topk(width, -1).values
    bounded = keep <= width
    smallest = highest.gather(1, (keep.clamp(max=width) - 1)[:, None])
    limits = torch.where(bounded[:, None], smallest, -torch.inf)
    total = weights.masked_fill(scores < limits, 0.0).sum(-1, dtype=torch.float64)
    kept = highest.double().exp_().masked_fill_(highest < limits, 0.0).cumsum(-1)
    # The place of the token whose weight completes top_p.
    place = (kept < (top_p * total)[:, None]).sum(-1)
    sure = (place < width) | bounded | (top_p >= 1.0)
    nucleus = highest.gather(1, place.clamp(max=width - 1)[:, None])
    nucleus = nucleus.masked_fill_((top_p >= 1.0)[:, None], -torch.inf)
    return torch.maximum(limits, nucleus)[:, 0], sure


def draw(weights: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
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


def _greedy(scores: torch.Tensor) -> Sampled:
    peaks, token_ids = scores.max(-1)
    return Sampled(token_ids.cpu().numpy(), (~torch.isfinite(peaks)).cpu().numpy())


def _merge(target: Sampled, places: IntArray, part: Sampled) -> None:
    target.token_ids[places] = part.token_ids
    target.failed[places] = part.failed
