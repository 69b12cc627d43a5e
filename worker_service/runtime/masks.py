"""Which tokens the grammars of a step's sequences allow. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from worker_service.runtime.grammars import GrammarStore
from worker_service.runtime.mask_threads import GrammarState, MaskBatch, MaskJob, set_bits
from worker_service.runtime.sequences import SequenceTable
from worker_service.runtime.step import Failure

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
    errors: Mapping[int, Failure]

    def num_allowed(self, place: int) -> int:
        """How many tokens the grammar of one of `places` allows."""
        return int(np.bitwise_count(self._row(place)).sum())

    def allowed(self, place: int) -> IntArray:
        """The ids of the tokens that the grammar of one of `places` allows, rising."""
        few = self.few.get(place)
        return set_bits(self._row(place)) if few is None else few

    def _row(self, place: int) -> Words:
        row: Words = self.words[np.searchsorted(self.places, place)]
        return row
