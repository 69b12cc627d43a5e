"""The sequences that a worker knows: one row of persistent arrays each."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from worker_service.runtime.step import NewSequence, Sampling

IntArray = NDArray[np.int64]
_FIRST_ROWS = 64


class SamplingColumns:
    """Sampling parameters by row."""

    def __init__(self) -> None:
        self.temperature = np.zeros(0, np.float32)
        self.top_k = np.zeros(0, np.int64)
        self.top_p = np.zeros(0, np.float64)
        self.min_p = np.zeros(0, np.float64)
        self.repetition_penalty = np.zeros(0, np.float32)
        self.presence_penalty = np.zeros(0, np.float32)
        self.frequency_penalty = np.zeros(0, np.float32)
        self.has_penalty = np.zeros(0, np.bool_)
        self.has_edits = np.zeros(0, np.bool_)
        """Whether tokens are biased, banned, or all but some."""
        self.is_greedy = np.zeros(0, np.bool_)
        """Whether nothing is asked for, at any token, but the likeliest."""
        self.typical_p = np.zeros(0, np.float64)
        self.min_tokens = np.zeros(0, np.int64)
        self.seed = np.zeros(0, np.uint64)
        self.sequence_index = np.zeros(0, np.int64)
        self.num_logprobs = np.zeros(0, np.int64)
        """-1 where none are asked for."""
        self.num_stops = np.zeros(0, np.int64)
        self.stops = np.zeros((0, 4), np.int64)
        """Stop token ids, padded with -1."""

    def grow(self, num_rows: int) -> None:
        """Makes room for `num_rows` rows."""
        for name, column in vars(self).items():
            setattr(self, name, _grown(column, num_rows))

    def set(self, row: int, sampling: Sampling, vocab_size: int) -> None:
        """Fills a row. Stop tokens that the model cannot produce are left out."""
        self.temperature[row] = sampling.temperature
        self.top_k[row] = sampling.top_k if sampling.top_k < vocab_size else 0
        self.top_p[row] = sampling.top_p
        self.min_p[row] = sampling.min_p
        self.repetition_penalty[row] = sampling.repetition_penalty
        self.presence_penalty[row] = sampling.presence_penalty
        self.frequency_penalty[row] = sampling.frequency_penalty
        self.has_penalty[row] = (
            sampling.repetition_penalty != 1.0 or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
        )
        self.has_edits[row] = bool(sampling.biases or sampling.allowed_token_ids or sampling.banned_token_ids)
        self.is_greedy[row] = (
            sampling.temperature == 0
            and sampling.logprobs is None
            and not (sampling.min_tokens or self.has_penalty[row] or self.has_edits[row])
        )
        self.typical_p[row] = sampling.typical_p
        self.min_tokens[row] = sampling.min_tokens
        self.seed[row] = np.uint64(sampling.seed)
        self.sequence_index[row] = sampling.sequence_index
        self.num_logprobs[row] = -1 if sampling.logprobs is None else sampling.logprobs
        stops = sorted({token for token in sampling.stop_token_ids if 0 <= token < vocab_size})
        if len(stops) > self.stops.shape[1]:
            wider = np.full((len(self.stops), len(stops)), -1, np.int64)
            wider[:, : self.stops.shape[1]] = self.stops
            self.stops = wider
        self.num_stops[row] = len(stops)
        self.stops[row] = -1
        self.stops[row, : len(stops)] = stops

    def is_stop(self, rows: IntArray, token_ids: IntArray) -> NDArray[np.bool_]:
        """Whether each row's token is one of its stop tokens."""
        result: NDArray[np.bool_] = (self.stops[rows] == token_ids[:, None]).any(1)
        return result


class PromptWish(NamedTuple):
    """Log-probabilities from prompt position `start` on, and of so many most likely tokens at each."""

    start: int
    num_top: int


class SequenceTable:
    """Token ids, block table, counts and sampling parameters of every known sequence, by row.

    Checks nothing: runtime.checks does that before a step is applied. Rows are reused.
    """

    def __init__(self, *, vocab_size: int, max_model_len: int, num_blocks: int, block_size: int) -> None:
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_blocks = -(-max_model_len // block_size)
        self.row_of: dict[int, int] = {}
        self.sampling = SamplingColumns()
        # One place more than the longest context: the token sampled at its end is stored, never computed.
        self.token_ids = np.zeros((0, max_model_len + 1), np.int32)
        self.tables = np.zeros((0, self.max_blocks), np.int64)
        self.num_held_blocks = np.zeros(0, np.int64)
        self.num_tokens = np.zeros(0, np.int64)
        self.num_computed = np.zeros(0, np.int64)
        self.prompt_token_count = np.zeros(0, np.int64)
        self.token_limit = np.zeros(0, np.int64)
        """Most tokens of a sequence that speculates, which may reach them before its scheduler knows; else 0."""
        self.num_speculating = 0
        self.accepted: dict[int, list[tuple[int, int]]] = {}
        """By row, (step, draft tokens accepted in it) of steps whose answers the scheduler may not have yet."""
        self.skipped = np.zeros(0, np.bool_)
        """Sequences that stopped, failed or are at their limit: neither computed nor answered until the scheduler ends
        them."""
        self.num_holders = np.zeros(num_blocks, np.int64)
        """How many block tables each block is in."""
        self.scored: dict[int, PromptWish] = {}
        """The rows whose prompts are scored, and not yet to the end."""
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self.row_of)

    def add(self, new: NewSequence, computed: int, *, failed: bool) -> int:
        """Takes a sequence in and answers its row. A failed one keeps its counts and blocks, but no tokens."""
        if not self._free:
            self._grow()
        row = self._free.pop()
        self.row_of[new.sequence_id] = row
        count = len(new.token_ids)
        self.num_tokens[row] = count
        self.num_computed[row] = computed
        self.prompt_token_count[row] = new.prompt_token_count
        self.token_limit[row] = new.token_limit
        self.num_speculating += bool(new.token_limit)
        self.skipped[row] = failed
        self.num_held_blocks[row] = 0
        self.append_blocks(row, new.block_ids)
        if not failed:
            self.token_ids[row, :count] = new.token_ids
            self.sampling.set(row, new.sampling, self.vocab_size)
            if new.sampling.prompt_logprobs is not None and new.prompt_logprob_start < new.prompt_token_count:
                self.scored[row] = PromptWish(new.prompt_logprob_start, new.sampling.prompt_logprobs)
        return row

    def append_blocks(self, row: int, block_ids: Sequence[int] | IntArray) -> None:
        """Appends to a block table."""
        held = self.num_held_blocks[row]
        self.tables[row, held : held + len(block_ids)] = block_ids
        self.num_holders[self.tables[row, held : held + len(block_ids)]] += 1
        self.num_held_blocks[row] = held + len(block_ids)

    def append_tokens(self, rows: IntArray, token_ids: IntArray) -> None:
        """Appends one token to each row."""
        self.token_ids[rows, self.num_tokens[rows]] = token_ids
        self.num_tokens[rows] += 1

    def within_limit(self, rows: IntArray, num_tokens: IntArray) -> IntArray:
        """Of so many tokens of each row those whose KV may be computed: one that speculates may be at its limit."""
        if not self.num_speculating:
            return num_tokens
        limits = self.token_limit[rows]
        return np.where(limits > 0, np.minimum(num_tokens, limits - 1), num_tokens)

    def accept(self, row: int, step_id: int, num_tokens: int) -> None:
        """Takes in draft tokens that lie behind a row's tokens: they are computed, beyond what was scheduled."""
        self.num_tokens[row] += num_tokens
        self.num_computed[row] += num_tokens
        self.accepted.setdefault(row, []).append((step_id, num_tokens))

    def forget_accepted(self, applied_step_id: int) -> None:
        """Forgets what the scheduler knows, as it has the answers up to this step."""
        for row, steps in list(self.accepted.items()):
            self.accepted[row] = later = [step for step in steps if step[0] > applied_step_id]
            if not later:
                del self.accepted[row]

    def num_unapplied(self, rows: IntArray, applied_step_id: int) -> IntArray:
        """Accepted draft tokens of each row that a scheduler cannot count which has the answers up to this step."""
        accepted = self.accepted
        return np.array(
            [sum(num for step, num in accepted.get(row, ()) if step > applied_step_id) for row in rows.tolist()],
            np.int64,
        )

    def remove(self, sequence_id: int) -> int | None:
        """Forgets a sequence and answers its row; None when it is not known."""
        row = self.row_of.pop(sequence_id, None)
        if row is not None:
            self.num_holders[self.held_blocks(row)] -= 1
            self.accepted.pop(row, None)
            self.num_speculating -= bool(self.token_limit[row])
            self._free.append(row)
            self.scored.pop(row, None)
        return row

    def take_scored(self, row: int, computed: int, count: int) -> tuple[int, int] | None:
        """The prompt positions [first, last) to tell of when `count` tokens after `computed` are; None for none.

        Forgets the row's wish, which it must have, when that is fulfilled.
        """
        wish, num_prompt = self.scored[row], int(self.prompt_token_count[row])
        first, last = max(wish.start, computed + 1), min(computed + count + 1, num_prompt)
        if last == num_prompt:
            del self.scored[row]
        return (first, last) if first < last else None

    def rows_of(self, sequence_ids: Sequence[int]) -> IntArray:
        """The rows of known sequences."""
        return np.fromiter(map(self.row_of.__getitem__, sequence_ids), np.int64, len(sequence_ids))

    def blocks_from(self, rows: IntArray, first: IntArray) -> IntArray:
        """All blocks in the tables of these rows, each from a place on, one row after the other."""
        counts = np.maximum(self.num_held_blocks[rows] - first, 0)
        if counts.max(initial=0) <= 1:
            has_one = counts > 0
            rows, places = rows[has_one], first[has_one]
        else:
            places = np.arange(int(counts.sum())) + np.repeat(first - counts.cumsum() + counts, counts)
            rows = np.repeat(rows, counts)
        blocks: IntArray = self.tables[rows, places]
        return blocks

    def held_blocks(self, row: int) -> IntArray:
        """The block table of a row."""
        return self.tables[row, : self.num_held_blocks[row]]

    def _grow(self) -> None:
        have = len(self.num_tokens)
        want = max(_FIRST_ROWS, 2 * have)
        for name, column in vars(self).items():
            if isinstance(column, np.ndarray) and column is not self.num_holders:
                setattr(self, name, _grown(column, want))
        self.sampling.grow(want)
        self._free.extend(range(want - 1, have - 1, -1))


def _grown(column: NDArray[np.generic], num_rows: int) -> NDArray[np.generic]:
    grown = np.zeros((num_rows, *column.shape[1:]), column.dtype)
    grown[: len(column)] = column
    return grown
