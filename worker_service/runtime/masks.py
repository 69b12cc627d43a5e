"""Which tokens the grammars of a step's sequences allow, and how that becomes part of their scores."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from worker_service.runtime.grammars import GrammarStore
from worker_service.runtime.mask_threads import FEW, GrammarState, MaskBatch, MaskJob
from worker_service.runtime.sequences import SequenceTable

IntArray = NDArray[np.int64]
Words = NDArray[np.uint32]


class GrammarMissing(Exception):
    """A sequence names a grammar that this worker does not hold."""


class GrammarMasks:
    """The grammar states of the sequences that have one, by row of the table.

    A state is a function of the grammar and of the output so far: what was not consumed yet is, when the next mask is
    computed. Used by one thread.
    """

    def __init__(self, vocab_size: int, grammars: GrammarStore | None) -> None:
        self._num_words = -(-vocab_size // 32)
        self._vocab_size = vocab_size
        self._grammars = grammars
        self._states: dict[int, GrammarState] = {}
        self._ends = np.zeros(self._num_words, np.uint32)
        for token_id in () if grammars is None else grammars.eos_token_ids:
            self._ends[token_id // 32] |= np.uint32(1 << token_id % 32)

    @property
    def are_used(self) -> bool:
        """Whether any sequence has a grammar."""
        return bool(self._states)

    def take(self, row: int, key: bytes) -> None:
        """Takes in the sequence at a row, at the start of its output. Raises GrammarMissing."""
        prototype = None if self._grammars is None else self._grammars.matcher(key)
        if prototype is None:
            text = f"its grammar {key.hex()[:12]} is not known here: it was not prepared, or was forgotten"
            raise GrammarMissing(text)
        self._states[row] = GrammarState(prototype)

    def remove(self, row: int) -> None:
        """Forgets the sequence at a row; nothing happens when it has no grammar."""
        self._states.pop(row, None)

    def begin(self, rows: IntArray, table: SequenceTable) -> "PendingMasks | None":
        """Begins to compute what may come next in each of these rows; None when none of them has a grammar."""
        masked = [row for row in rows.tolist() if row in self._states]
        if not masked or self._grammars is None:
            return None
        words = np.zeros((len(masked), self._num_words), np.uint32)
        jobs = [self._job(row, table, words[i]) for i, row in enumerate(masked)]
        return PendingMasks(np.array(masked), words, self._grammars.threads.begin(jobs), self._vocab_size)

    def _job(self, row: int, table: SequenceTable, words: Words) -> MaskJob:
        state = self._states[row]
        first = int(table.prompt_token_count[row]) + state.num_consumed
        token_ids = table.token_ids[row, first : table.num_tokens[row]].tolist()
        state.num_consumed += len(token_ids)
        return MaskJob(state, token_ids, words, self._ends)


@dataclass(frozen=True, slots=True)
class PendingMasks:
    """Masks on their way, of the sequences at `rows` of the table."""

    rows: IntArray
    words: Words
    batch: MaskBatch
    vocab_size: int

    def wait(self, rows: IntArray) -> "Masks":
        """The masks of those that are sampled after all, at `rows`; once all are there, or known not to come."""
        self.batch.wait()
        jobs = dict(zip(self.rows.tolist(), self.batch.jobs, strict=True))
        places = [place for place, row in enumerate(rows.tolist()) if row in jobs]
        errors = {place: error for place in places if (error := jobs[int(rows[place])].error) is not None}
        # Copied where some are left out, and where one was abandoned, which is still being written to.
        words = self.words[np.isin(self.rows, rows)] if errors or len(places) < len(jobs) else self.words
        few = {place: ids for place in places if (ids := jobs[int(rows[place])].few) is not None}
        return Masks(np.array(places, np.int64), words, self.vocab_size, few, errors)


@dataclass(frozen=True, slots=True)
class Masks:
    """What may come next: a row of `words` [*, vocab_size / 32] for each of `places`, a bit for a token id, lowest
    first. `few`, by place, are the token ids of those that allow few, rising; `errors` by place."""

    places: IntArray
    words: Words
    vocab_size: int
    few: Mapping[int, IntArray]
    errors: Mapping[int, str]

    def narrow(self, logits: torch.Tensor, places: Sequence[int]) -> tuple[torch.Tensor, IntArray]:
        """Of places that allow few tokens the scores of these alone, [places, FEW], -inf behind them; and their ids."""
        token_ids = np.zeros((len(places), FEW), np.int64)
        counts = np.zeros(len(places), np.int64)
        for i, place in enumerate(places):
            ids = self.few[place]
            token_ids[i, : len(ids)], counts[i] = ids, len(ids)
        device = logits.device
        rows = torch.tensor(places, device=device)[:, None]
        scores = logits[rows, torch.from_numpy(token_ids).to(device)].float()
        return scores.masked_fill_(
            torch.from_numpy(np.arange(FEW) >= counts[:, None]).to(device), -torch.inf
        ), token_ids

    def apply(self, scores: torch.Tensor, which: IntArray) -> None:
        """Makes what is not allowed -inf in scores [*, at least vocab_size] of the rows `which`, in place.

        `which` rises; places that are not among them are left out.
        """
        present = np.isin(self.places, which)
        if not present.any():
            return
        forbidden = self._forbidden(self.words[present], scores.device)
        targets = np.searchsorted(which, self.places[present]).tolist()
        for target, row in zip(targets, forbidden, strict=True):
            scores[target, : self.vocab_size].masked_fill_(row, -torch.inf)

    def num_allowed(self, place: int) -> int:
        """How many tokens the grammar of one of `places` allows."""
        row = self.words[np.searchsorted(self.places, place)]
        return int(np.bitwise_count(row).sum())

    def _forbidden(self, words: Words, device: torch.device) -> torch.Tensor:
        """[places, vocab_size], on a device; bits travel, and become booleans there."""
        octets = np.ascontiguousarray(words).astype("<u4", copy=False).view(np.uint8)
        unset = unset_on_cpu(octets) if device.type == "cpu" else unset_bits(torch.from_numpy(octets).to(device))
        return unset[:, : self.vocab_size]


def unset_bits(octets: torch.Tensor) -> torch.Tensor:
    """Which bits of octets [rows, n] are not set, [rows, 8 n], the lowest of each first."""
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=octets.device)
    return ((octets[:, :, None] & weights) == 0).flatten(1)


def unset_on_cpu(octets: NDArray[np.uint8]) -> torch.Tensor:
    """What `unset_bits` answers, several times as fast as torch does it on a CPU."""
    return torch.from_numpy(np.unpackbits(~octets, axis=1, bitorder="little").view(np.bool_))
