"""From a step and the sequences held to the arrays that the model runs on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from worker_service.runtime.adapters import ResidentAdapter
from worker_service.runtime.checks import CheckedStep
from worker_service.runtime.sequences import SequenceTable
from worker_service.runtime.step import StepInput

IntArray = NDArray[np.int64]
_NO_ADAPTERS: Mapping[int, ResidentAdapter] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """Tokens [first, first + count) of a batch have this adapter."""

    adapter: ResidentAdapter
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class StepBatch:
    """A packed batch, its sequences as they are in the step, or as `build_batch` was asked to order them.

    By token: `token_ids`, `positions` [num_tokens]. By sequence: `rows` of the table, `counts` of new
    tokens, `computed` before, block `tables`. Of the sequences to sample: `sampled_tokens`, the
    batch row of each one's last token, and `sampled`, its place among the sequences. `hidden_tokens`
    are the batch rows whose hidden states are wanted, ascending: those, unless prompts are scored too.
    `adapters` are in rising order; tokens in none of them have no adapter.
    A sequence with draft tokens is sampled at its last token and at each draft: it is in both columns
    as often, and `offsets` says how many of its drafts lie before; None when nobody drafts.
    """

    token_ids: IntArray
    positions: IntArray
    rows: IntArray
    sequence_ids: IntArray
    counts: IntArray
    computed: IntArray
    tables: IntArray
    sampled: IntArray
    sampled_tokens: IntArray
    hidden_tokens: IntArray
    adapters: Sequence[AdapterRows] = ()
    offsets: IntArray | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def slots(self, block_size: int) -> IntArray:
        """Where the keys and values of each token go: block times `block_size` and place in it, [num_tokens]."""
        owners = np.repeat(np.arange(len(self)), self.counts)
        return self.tables[owners, self.positions // block_size] * block_size + self.positions % block_size

    def sampled_at(self, chosen: NDArray[np.bool_]) -> "StepBatch":
        """The same batch, sampled at the chosen ones of its places alone."""
        offsets = None if self.offsets is None else self.offsets[chosen]
        return replace(self, sampled=self.sampled[chosen], sampled_tokens=self.sampled_tokens[chosen], offsets=offsets)


def build_batch(
    step: StepInput,
    checked: CheckedStep,
    table: SequenceTable,
    adapters: Mapping[int, ResidentAdapter] = _NO_ADAPTERS,
    *,
    drafts: IntArray | None = None,
    decodes_first: bool,
) -> StepBatch:
    """The batch of a checked step; `table` must hold its sequences and blocks already, and as many draft tokens of
    each sequence of the step behind its tokens as `drafts` says. Changes nothing.

    With `decodes_first` sequences of one new token come first, the longest at the head, then prefill chunks. Otherwise
    those of one adapter come together.
    """
    ids, rows = np.asarray(step.sequence_ids, np.int64).reshape(-1), table.rows_of(step.sequence_ids)
    counts = checked.scheduled if drafts is None else checked.scheduled + drafts
    computed = checked.computed
    skipped, order = table.skipped[rows], None
    if decodes_first:
        # The longest first, so that neighbours are of like length.
        order = np.lexsort((-computed, counts != 1))
    if skipped.any():
        order = np.flatnonzero(~skipped) if order is None else order[~skipped[order]]
    if adapters and not decodes_first:
        order = np.arange(len(rows)) if order is None else order
        # Sequences that share blocks have the same adapter, so whoever reads stays behind whoever fills.
        order = order[np.argsort(_adapter_order(rows[order], adapters), kind="stable")]
    if order is not None:
        ids, rows, counts, computed = ids[order], rows[order], counts[order], computed[order]
        drafts = None if drafts is None else drafts[order]
    lengths, ends = computed + counts, counts.cumsum()
    token_rows, positions = rows, computed
    if len(ends) and ends[-1] != len(rows):
        token_rows = np.repeat(rows, counts)
        positions = np.arange(int(ends[-1])) + np.repeat(lengths - ends, counts)
    sampled = np.flatnonzero(lengths >= table.num_tokens[rows])
    sampled_tokens, offsets = ends[sampled] - 1, None
    if drafts is not None:
        repeats = 1 + drafts[sampled]
        offsets = np.arange(int(repeats.sum())) - np.repeat(np.cumsum(repeats) - repeats, repeats)
        sampled_tokens = np.repeat(sampled_tokens - repeats + 1, repeats) + offsets
        sampled = np.repeat(sampled, repeats)
    longest = int(lengths.max(initial=0))
    return StepBatch(
        token_ids=table.token_ids[token_rows, positions].astype(np.int64),
        positions=positions,
        rows=rows,
        sequence_ids=ids,
        counts=counts,
        computed=computed,
        tables=table.tables[rows, : -(-longest // table.block_size)],
        sampled=sampled,
        sampled_tokens=sampled_tokens,
        hidden_tokens=sampled_tokens,
        adapters=_adapter_rows(rows, counts, adapters) if adapters else (),
        offsets=offsets,
    )


def _adapter_order(rows: IntArray, adapters: Mapping[int, ResidentAdapter]) -> IntArray:
    """A number for each row's adapter, 0 for none: the same on all ranks, which exchange states row by row."""
    names = [adapters[row].fingerprint if row in adapters else "" for row in rows.tolist()]
    numbers = {name: number for number, name in enumerate(sorted({"", *names}))}
    return np.array([numbers[name] for name in names], np.int64)


def _adapter_rows(rows: IntArray, counts: IntArray, adapters: Mapping[int, ResidentAdapter]) -> list[AdapterRows]:
    found: list[AdapterRows] = []
    first = 0
    for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
        adapter = adapters.get(row)
        last = found[-1] if found else None
        if adapter is not None and last is not None and last.adapter is adapter and last.first + last.count == first:
            found[-1] = AdapterRows(adapter, last.first, last.count + count)
        elif adapter is not None:
            found.append(AdapterRows(adapter, first, count))
        first += count
    return found
