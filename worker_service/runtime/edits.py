"""Tokens whose logits a sequence changes: biased, banned, or all but those allowed."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from worker_service.runtime.step import Sampling

IntArray = NDArray[np.int64]
T = TypeVar("T")


class TokenEdits:
    """The edits of the sequences that have some, by row of the table; applied to a whole batch at once."""

    def __init__(self) -> None:
        self._biases: dict[int, tuple[IntArray, NDArray[np.float32]]] = {}
        self._banned: dict[int, IntArray] = {}
        self._allowed: dict[int, IntArray] = {}

    def add(self, row: int, sampling: Sampling) -> None:
        """Takes in the sequence at a row, in place of whichever was there."""
        self.remove(row)
        if sampling.biases:
            tokens = np.asarray(sampling.biased_token_ids, np.int64)
            self._biases[row] = (tokens, np.asarray(sampling.biases, np.float32))
        if sampling.banned_token_ids:
            self._banned[row] = np.asarray(sampling.banned_token_ids, np.int64)
        if sampling.allowed_token_ids:
            self._allowed[row] = np.asarray(sampling.allowed_token_ids, np.int64)

    def remove(self, row: int) -> None:
        """Forgets the sequence at a row; nothing happens when it has no edits."""
        for edits in (self._biases, self._banned, self._allowed):
            edits.pop(row, None)

    def bias(self, scores: torch.Tensor, rows: IntArray) -> None:
        """Adds the biases to scores [rows, at least vocab_size], in place."""
        places, found = _present(rows, self._biases)
        if found:
            tokens = np.concatenate([tokens for tokens, _ in found])
            values = torch.from_numpy(np.concatenate([values for _, values in found])).to(scores.device)
            # Each token of a row is there once, so nothing is added twice.
            index = _index(scores, places, [len(ids) for ids, _ in found], tokens)
            scores.index_put_(index, values, accumulate=True)

    def mask(self, scores: torch.Tensor, rows: IntArray) -> None:
        """Makes what cannot be sampled -inf, in place."""
        places, allowed = _present(rows, self._allowed)
        if allowed:
            index = _index(scores, places, list(map(len, allowed)), np.concatenate(allowed))
            kept = scores[index]
            scores[torch.tensor(places, device=scores.device)] = -torch.inf
            scores[index] = kept
        places, banned = _present(rows, self._banned)
        if banned:
            scores[_index(scores, places, list(map(len, banned)), np.concatenate(banned))] = -torch.inf


def _present(rows: IntArray, edits: Mapping[int, T]) -> tuple[list[int], list[T]]:
    """The places of the rows that have edits, and those."""
    places = [place for place, row in enumerate(rows.tolist()) if row in edits]
    return places, [edits[int(rows[place])] for place in places]


def _index(
    scores: torch.Tensor, places: Sequence[int], counts: Sequence[int], tokens: IntArray
) -> tuple[torch.Tensor, torch.Tensor]:
    """The elements of `scores` at `tokens`, the first `counts[0]` of which are of row `places[0]`, and so on."""
    first = np.repeat(np.asarray(places, np.int64), counts)
    return torch.from_numpy(first).to(scores.device), torch.from_numpy(tokens).to(scores.device)
