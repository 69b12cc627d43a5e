"""What a sampler is to do, written from the definition, one row at a time; and a test of frequencies."""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

from worker_service.runtime.sampler import Sampled, Sampler
from worker_service.runtime.sequences import SamplingColumns
from worker_service.runtime.step import Sampling

CPU = torch.device("cpu")
# A bin with fewer expected draws makes the statistic something else than chi-square.
_LEAST_EXPECTED = 8.0


class Rows:
    """Sequences for a sampler: row i is the i-th sampling."""

    def __init__(self, samplings: list[Sampling], vocab: int, history: list[tuple[list[int], list[int]]] | None = None):
        self.columns = SamplingColumns()
        self.columns.grow(len(samplings))
        self.sampler = Sampler(vocab, CPU)
        self.history = history or [([], [])] * len(samplings)
        for row, sampling in enumerate(samplings):
            self.columns.set(row, sampling, vocab)
            if self.columns.has_penalty[row]:
                prompt, output = (np.asarray(ids, np.int64) for ids in self.history[row])
                self.sampler.penalties.add(row, prompt, output)
            if self.columns.has_edits[row]:
                self.sampler.edits.add(row, sampling)

    def sample(self, logits: torch.Tensor, rows: list[int] | None = None) -> Sampled:
        chosen = np.asarray(rows if rows is not None else range(len(logits)), np.int64)
        num_outputs = np.asarray([len(self.history[row][1]) for row in chosen], np.int64)
        return self.sampler.sample(logits, chosen, num_outputs, self.columns)


def reference_scores(logits: list[float], sampling: Sampling, prompt: list[int], output: list[int]) -> list[float]:
    scores, counts = list(logits), Counter(output)
    for token, bias in zip(sampling.biased_token_ids, sampling.biases, strict=True):
        scores[token] += bias
    for token in {*prompt, *output}:
        factor = sampling.repetition_penalty
        scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
    for token, count in counts.items():
        scores[token] -= count * sampling.frequency_penalty + sampling.presence_penalty
    if len(output) < sampling.min_tokens:
        for token in sampling.stop_token_ids:
            scores[token] = -math.inf
    for token in range(len(scores)):
        if token in sampling.banned_token_ids or token not in (sampling.allowed_token_ids or (token,)):
            scores[token] = -math.inf
    return scores


def reference_weights(scores: list[float], sampling: Sampling) -> list[float]:
    """Unnormalised probabilities after temperature, top_k, top_p and min_p; ties at a border stay in."""
    peak = max(scores)
    weights = [math.exp((score - peak) / sampling.temperature) for score in scores]
    if sampling.top_k:
        least = sorted(weights, reverse=True)[: sampling.top_k][-1]
        weights = [weight if weight >= least else 0.0 for weight in weights]
    if sampling.top_p < 1.0:
        total, kept, least = sum(weights), 0.0, 0.0
        for least in sorted(weights, reverse=True):
            kept += least
            if kept >= sampling.top_p * total:
                break
        weights = [weight if weight >= least else 0.0 for weight in weights]
    weights = [weight if weight >= sampling.min_p else 0.0 for weight in weights]
    if sampling.typical_p < 1.0:
        total, kept, farthest = sum(weights), 0.0, 0.0
        shares = {token: weight / total for token, weight in enumerate(weights) if weight}
        entropy = -sum(share * math.log(share) for share in shares.values())
        distances = {token: abs(-math.log(share) - entropy) for token, share in shares.items()}
        for token in sorted(distances, key=distances.__getitem__):
            kept, farthest = kept + shares[token], distances[token]
            if kept >= sampling.typical_p:
                break
        weights = [
            weight if distances.get(token, math.inf) <= farthest else 0.0 for token, weight in enumerate(weights)
        ]
    return weights


def chi_square_excess(counts: Sequence[float], weights: Sequence[float]) -> float:
    """How far the chi-square statistic of draws lies above what true ones pass once in ten thousand times.

    Outcomes too rare to be judged alone are one. Below 0 when the draws may be of this distribution; infinite when an
    outcome came that cannot. The bound is Wilson and Hilferty's approximation.
    """
    num_draws, total = sum(counts), sum(weights)
    if any(count and not weight for count, weight in zip(counts, weights, strict=True)):
        return math.inf
    expected = [num_draws * weight / total for weight in weights]
    bins = [(have, want) for have, want in zip(counts, expected, strict=True) if want >= _LEAST_EXPECTED]
    rest = [(have, want) for have, want in zip(counts, expected, strict=True) if want < _LEAST_EXPECTED]
    if rest:
        have, want = map(sum, zip(*rest, strict=True))
        if want >= _LEAST_EXPECTED:
            bins.append((have, want))
        elif bins:
            first_have, first_want = bins[0]
            bins[0] = (first_have + have, first_want + want)
    statistic = sum((have - want) ** 2 / want for have, want in bins)
    freedom = max(1, len(bins) - 1)
    return statistic - freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3
