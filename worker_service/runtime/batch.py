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

    By token: `token_ids`, `positions`, `slots` [num_tokens]. By sequence: `rows` of the table, `counts`
    of new tokens, `computed` before, block `tables`. Of the sequences to sample: `sampled_tokens`, the
    batch row of each one's last token, and `sampled`, its place among the sequences. `hidden_tokens`
    are the batch rows whose hidden states are wanted, ascending: those, unless prompts are scored too.
    `adapters` are in rising order; tokens in none of them have no adapter.
    A sequence with draft tokens is sampled at its last token and at each draft: it is in both columns
    as often, and `offsets` says how many of its drafts lie before; None when nobody drafts.
    """

    token_ids: IntArray
    positions: IntArray
    slots: IntArray
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
    all_ids = np.asarray(step.sequence_ids, np.int64).reshape(-1)
    all_rows = np.fromiter((table.row_of[i] for i in step.sequence_ids), np.int64, len(all_ids))
    scheduled = checked.scheduled if drafts is None else checked.scheduled + drafts
    # The longest first, so that neighbours are of like length.
    order = np.lexsort((-checked.computed, scheduled != 1)) if decodes_first else np.arange(len(all_rows))
    order = order[~table.skipped[all_rows[order]]]
    if adapters and not decodes_first:
        # Sequences that share blocks have the same adapter, so whoever reads stays behind whoever fills.
        order = order[np.argsort(_adapter_order(all_rows[order], adapters), kind="stable")]
    rows, counts, computed = all_rows[order], scheduled[order], checked.computed[order]
    starts = np.cumsum(counts) - counts
    token_rows = np.repeat(rows, counts)
    positions = np.arange(int(counts.sum())) + np.repeat(computed - starts, counts)
    blocks = table.tables[token_rows, positions // table.block_size]
    slots = blocks * table.block_size + positions % table.block_size
    sampled = np.flatnonzero(computed + counts >= table.num_tokens[rows])
    sampled_tokens, offsets = (starts + counts - 1)[sampled], None
    if drafts is not None:
        repeats = 1 + drafts[order][sampled]
        offsets = np.arange(int(repeats.sum())) - np.repeat(np.cumsum(repeats) - repeats, repeats)
        sampled_tokens = np.repeat(sampled_tokens - repeats + 1, repeats) + offsets
        sampled = np.repeat(sampled, repeats)
    longest = int((computed + counts).max(initial=0))
    return StepBatch(
        token_ids=table.token_ids[token_rows, positions].astype(np.int64),
        positions=positions,
        slots=slots,
        rows=rows,
        sequence_ids=all_ids[order],
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
