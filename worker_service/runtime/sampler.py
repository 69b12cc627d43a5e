"""From logits to tokens, for all sequences of a step at once.

The order is: biases, penalties, masks (allowed and banned tokens, stop tokens before min_tokens, the
grammar), then what runtime.draws says. What a sequence gets does not depend on who else is in the batch.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from worker_service.runtime.draws import RUN, Filters, draw_tokens
from worker_service.runtime.edits import TokenEdits
from worker_service.runtime.mask_scores import forbid, narrow
from worker_service.runtime.masks import Masks
from worker_service.runtime.penalties import Drafted, Penalties
from worker_service.runtime.rng import uniforms
from worker_service.runtime.sequences import SamplingColumns
from worker_service.runtime.step import Failure, Logprobs

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


@dataclass(slots=True)
class Sampled:
    """Tokens [rows]; of `failed` rows they mean nothing. `reasons` and `logprobs` by place in the batch.

    A row without a reason failed because it had no finite logit.
    """

    token_ids: IntArray
    failed: BoolArray
    logprobs: dict[int, Logprobs] = field(default_factory=dict)
    reasons: dict[int, Failure] = field(default_factory=dict)

    def at(self, places: IntArray) -> "Sampled":
        """What was sampled at some places of the batch."""
        logprobs = {i: self.logprobs[place] for i, place in enumerate(places.tolist()) if place in self.logprobs}
        return Sampled(self.token_ids[places], self.failed[places], logprobs)


class Sampler:
    """Draws tokens; keeps the penalties' state, and reads sampling parameters from the table's columns."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self.penalties = Penalties(vocab_size, device)
        self.edits = TokenEdits()

    def sample(
        self,
        logits: torch.Tensor,
        rows: IntArray,
        num_outputs: IntArray,
        sampling: SamplingColumns,
        drafted: Drafted | None = None,
        masks: Masks | None = None,
    ) -> Sampled:
        """One token for each of logits [rows, vocab_size], of the sequences at table rows `rows` that have
        `num_outputs` output tokens so far, those of `drafted` among them. Leaves logits as they are; records nothing.
        """
        masked = _is_masked(rows, num_outputs, sampling)
        random = sampling.temperature[rows] > 0
        special = masked | random | sampling.has_penalty[rows] | sampling.has_edits[rows]
        few: list[int] = []
        if masks is not None:
            # What looks at other tokens, or changes all scores, cannot do with few of them.
            whole = masked | sampling.has_penalty[rows] | sampling.has_edits[rows]
            few = [place for place in masks.few if not whole[place]]
            special[masks.places] = True
        if not special.any():
            sampled = _greedy(logits)
        else:
            sampled = Sampled(np.zeros(len(rows), np.int64), np.zeros(len(rows), np.bool_))
            plain = np.flatnonzero(~special)
            special[few] = False
            others = np.flatnonzero(special)
            if len(plain):
                _merge(sampled, plain, _greedy(logits[self._tensor(plain)]))
            if len(others):
                scores = self._scores(logits, others)
                ahead = None if drafted is None else drafted.among(others, len(rows))
                self._edit(scores, rows[others], masked[others], sampling, ahead)
                if masks is not None:
                    forbid(masks, scores, others)
                self._choose(sampled, scores, others, rows, num_outputs, sampling)
            if masks is not None:
                if few:
                    scores, token_ids = narrow(masks, logits, few)
                    self._choose(sampled, scores, np.array(few), rows, num_outputs, sampling)
                    sampled.token_ids[few] = token_ids[np.arange(len(few)), sampled.token_ids[few]]
                _tell_failures(sampled, masks, logits)
        self._add_logprobs(sampled, logits, rows, sampling)
        return sampled

    @staticmethod
    def is_greedy(rows: IntArray, num_outputs: IntArray, sampling: SamplingColumns) -> bool:
        """Whether all that these rows ask for is the likeliest token."""
        if sampling.is_greedy[rows].all():
            return True
        others = (sampling.temperature[rows] > 0) | sampling.has_penalty[rows] | sampling.has_edits[rows]
        return not (others | (sampling.num_logprobs[rows] >= 0) | _is_masked(rows, num_outputs, sampling)).any()

    def _scores(self, logits: torch.Tensor, which: IntArray) -> torch.Tensor:
        width = -(-self._vocab_size // RUN) * RUN
        scores = logits.new_empty(len(which), width, dtype=torch.float32)
        scores[:, self._vocab_size :] = -torch.inf
        scores[:, : self._vocab_size] = logits if len(which) == len(logits) else logits[self._tensor(which)]
        return scores

    def _edit(
        self,
        scores: torch.Tensor,
        rows: IntArray,
        masked: BoolArray,
        sampling: SamplingColumns,
        drafted: Drafted | None,
    ) -> None:
        edited = bool(sampling.has_edits[rows].any())
        if edited:
            self.edits.bias(scores, rows)
        penalised = np.flatnonzero(sampling.has_penalty[rows])
        if len(penalised):
            ahead = None if drafted is None else drafted.among(penalised, len(rows))
            self.penalties.apply(scores, penalised, rows[penalised], sampling, ahead)
        if edited:
            self.edits.mask(scores, rows)
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
        filters = Filters(
            sampling.temperature[rows],
            sampling.top_k[rows],
            sampling.top_p[rows],
            sampling.min_p[rows],
            sampling.typical_p[rows],
        )
        vocab_size = min(self._vocab_size, scores.shape[1])
        return Sampled(draw_tokens(scores, vocab_size, filters, points), failed[:, 0].cpu().numpy())

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


def _is_masked(rows: IntArray, num_outputs: IntArray, sampling: SamplingColumns) -> BoolArray:
    """Whether stop tokens are masked still."""
    masked: BoolArray = (sampling.min_tokens[rows] > num_outputs) & (sampling.num_stops[rows] > 0)
    return masked


def _tell_failures(sampled: Sampled, masks: Masks, logits: torch.Tensor) -> None:
    """Why sequences with a grammar get no token: it has none, or none that the other masks leave."""
    for place in masks.places[sampled.failed[masks.places]].tolist():
        if not bool(torch.isfinite(logits[place].max())):
            continue
        if masks.num_allowed(place):
            text = (
                "its grammar and what else it asks for leave no token: allowed_token_ids, banned_token_ids, logit_bias "
                "and min_tokens contradict the grammar here"
            )
        else:
            text = "its grammar has come to a dead end: no token may follow"
        sampled.reasons[place] = Failure(text, "GRAMMAR_INVALID")
    for place, reason in masks.errors.items():
        sampled.failed[place] = True
        sampled.reasons[place] = reason


def _greedy(scores: torch.Tensor) -> Sampled:
    peaks, token_ids = scores.max(-1)
    return Sampled(token_ids.cpu().numpy(), (~torch.isfinite(peaks)).cpu().numpy())


def _merge(target: Sampled, places: IntArray, part: Sampled) -> None:
    target.token_ids[places] = part.token_ids
    target.failed[places] = part.failed
