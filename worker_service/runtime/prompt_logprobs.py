"""How likely a model finds the tokens of a prompt.

Logits of every position are as many rows as the prompt has tokens, each as wide as the vocabulary. They are
made in slices of MAX_ROWS rows, over all prompts of a step, and what is reported is taken out of one slice
before the next is made; the dummy step of the memory profile makes one of full size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from worker_service.runtime.batch import StepBatch
from worker_service.runtime.sequences import SequenceTable
from worker_service.runtime.step import MAX_PROMPT_POSITIONS, PromptLogprobs

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]

MAX_ROWS = 64


class Head(Protocol):
    """The part of an executor that makes logits."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class ScoredPart:
    """The prompt positions of one sequence that a step tells of, from `position` on.

    `place` is its place in the batch, `row` its row of the table. `tokens` are the batch rows whose states
    foretell the tokens `targets` [positions]; `num_top` most likely tokens are wanted at each.
    """

    place: int
    row: int
    position: int
    tokens: IntArray
    targets: IntArray
    num_top: int


def scored_parts(batch: StepBatch, table: SequenceTable) -> list[ScoredPart]:
    """What this batch tells of prompts, sequence by sequence."""
    starts = np.cumsum(batch.counts) - batch.counts
    parts = []
    for place, row in enumerate(batch.rows.tolist()):
        if row not in table.scored:
            continue
        computed, num_top = int(batch.computed[place]), table.scored[row].num_top
        positions = table.take_scored(row, computed, int(batch.counts[place]))
        if positions is None:
            continue
        first, last = positions
        tokens = int(starts[place]) - computed - 1 + np.arange(first, last)
        targets = table.token_ids[row, first:last].astype(np.int64)
        parts.append(ScoredPart(place, row, first, tokens, targets, num_top))
    return parts


def score_prompts(
    head: Head, hidden: torch.Tensor, places: IntArray, parts: Sequence[ScoredPart]
) -> Iterator[tuple[ScoredPart, list[PromptLogprobs] | None]]:
    """What to report of each part; None for one with a position that has no finite logit.

    `places` are the rows of `hidden` of all parts, one after the other.
    """
    targets = np.concatenate([part.targets for part in parts])
    num_top = max(part.num_top for part in parts)
    own, finite = np.empty(len(places), np.float32), np.empty(len(places), np.bool_)
    top_ids, top = np.empty((len(places), num_top), np.int64), np.empty((len(places), num_top), np.float32)
    for begin in range(0, len(places), MAX_ROWS):
        rows = slice(begin, begin + MAX_ROWS)
        logits = head.logits(hidden.index_select(0, _tensor(places[rows], hidden)))
        finite[rows] = torch.isfinite(logits.amax(-1)).cpu().numpy()
        logprobs = functional.log_softmax(logits.float(), -1)
        own[rows] = logprobs.gather(1, _tensor(targets[rows], hidden)[:, None])[:, 0].cpu().numpy()
        if num_top:
            values, ids = logprobs.topk(num_top, -1)
            top[rows], top_ids[rows] = values.cpu().numpy(), ids.cpu().numpy()
    begin = 0
    for part in parts:
        end = begin + len(part.tokens)
        if finite[begin:end].all():
            num = part.num_top
            yield part, _columns(part, own[begin:end], top_ids[begin:end, :num], top[begin:end, :num])
        else:
            yield part, None
        begin = end


def _columns(part: ScoredPart, own: FloatArray, top_ids: IntArray, top: FloatArray) -> list[PromptLogprobs]:
    pieces = []
    for begin in range(0, len(own), MAX_PROMPT_POSITIONS):
        rows = slice(begin, begin + MAX_PROMPT_POSITIONS)
        pieces.append(
            PromptLogprobs(
                part.position + begin,
                part.targets[rows].tolist(),
                own[rows].tolist(),
                top_ids[rows].ravel().tolist(),
                top[rows].ravel().tolist(),
            )
        )
    return pieces


def _tensor(array: IntArray, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(like.device)
