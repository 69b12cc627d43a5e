"""Whether a step agrees with what the worker holds. Looks at everything and changes nothing."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from worker_service.runtime.sequences import SequenceTable
from worker_service.runtime.step import NewSequence, Sampling, StateMismatch, StepInput

IntArray = NDArray[np.int64]
# Of sequences that are known: their places in the step, and their rows in the table.
Places = tuple[IntArray, IntArray]
_MAX_LOGPROBS = 1000


@dataclass(frozen=True, slots=True)
class CheckedStep:
    """A step's columns as arrays, found to agree with the table. `new_blocks` by the ids of sequences that get any;
    `sequence_errors` are for new sequences that are wrong in themselves; the step goes on without them. `computed` is
    what is computed in truth, with accepted draft tokens that the scheduler had not heard of; `drafts` is how many may
    be verified, None when none may."""

    scheduled: IntArray
    computed: IntArray
    new_blocks: dict[int, IntArray]
    sequence_errors: dict[int, str]
    drafts: IntArray | None = None


def check_step(step: StepInput, table: SequenceTable) -> CheckedStep:
    """Raises StateMismatch, naming sequence, what is held and what was sent, when the step cannot be applied.

    Runs while the device waits: what is wrong is looked for at once, and named only when there is something.
    """
    ids = step.sequence_ids
    scheduled = _column(step.scheduled_token_counts, "scheduled_token_counts", step)
    computed = _column(step.computed_token_counts, "computed_token_counts", step)
    block_counts = _column(step.new_block_counts, "new_block_counts", step)
    _refuse_outside(step.scheduled_token_counts, 1, table.max_model_len, ids, "scheduled_token_count")
    _refuse_outside(step.computed_token_counts, 0, None, ids, "computed_token_count")
    _refuse_outside(step.new_block_counts, 0, None, ids, "new_block_count")
    drafts = _draft_counts(step)
    new = {sequence.sequence_id: sequence for sequence in step.new_sequences}
    _check_ids(step, table, new)
    new_blocks = _split_blocks(step, block_counts, table)
    fresh = {i: new[sequence_id] for i, sequence_id in enumerate(ids) if sequence_id in new} if new else {}
    known = np.delete(np.arange(len(ids)), list(fresh)) if fresh else np.arange(len(ids))
    rows = table.rows_of([sequence_id for sequence_id in ids if sequence_id not in new] if fresh else ids)
    computed = _true_counts(step, table, known, rows, computed)
    _check_known(step, table, (known, rows), scheduled, computed, block_counts)
    if drafts is not None:
        if fresh:
            planned, text = drafts[list(fresh)], "draft tokens are planned for a new sequence"
            _refuse_where(planned > 0, [ids[i] for i in fresh], text, planned)
        _check_drafts(step, table, (known, rows), scheduled + drafts, computed, block_counts)
    errors = {}
    for i, sequence in fresh.items():
        error = _check_new(sequence, table, int(scheduled[i]), int(computed[i]), int(block_counts[i]))
        if error is not None:
            errors[ids[i]] = error
    checked = CheckedStep(scheduled, computed, new_blocks, errors, drafts)
    _check_writes(step, checked, table, (known, rows), fresh)
    return checked


def _check_ids(step: StepInput, table: SequenceTable, new: dict[int, NewSequence]) -> None:
    ids = set(step.sequence_ids)
    if len(ids) != len(step.sequence_ids):
        raise StateMismatch(f"step {step.step_id}: a sequence is scheduled twice: {_first_repeated(step.sequence_ids)}")
    if len(new) != len(step.new_sequences):
        repeated = _first_repeated(sequence.sequence_id for sequence in step.new_sequences)
        raise StateMismatch(f"step {step.step_id}: a sequence is new twice: {repeated}")
    gone = {*step.finished_sequence_ids, *step.preempted_sequence_ids}
    for sequence_id in new:
        if sequence_id not in ids:
            raise StateMismatch(f"sequence {sequence_id} is new but not scheduled")
        if sequence_id in table.row_of and sequence_id not in gone:
            raise StateMismatch(f"sequence {sequence_id} is sent as new but is known already")
    for sequence_id in ids - new.keys():
        if sequence_id not in table.row_of:
            raise StateMismatch(f"sequence {sequence_id} is scheduled but not known")
        if sequence_id in gone:
            raise StateMismatch(f"sequence {sequence_id} is scheduled in the step that ends it")


def _split_blocks(step: StepInput, counts: IntArray, table: SequenceTable) -> dict[int, IntArray]:
    blocks = _integers(step.new_block_ids, "new_block_ids")
    num = sum(step.new_block_counts)
    if num != len(blocks):
        raise StateMismatch(f"step {step.step_id}: {len(blocks)} new blocks for new_block_counts of {num}")
    if not num:
        return {}
    _check_blocks(blocks, table, f"step {step.step_id}")
    ends = counts.cumsum().tolist()
    parts = zip(step.sequence_ids, [0, *ends], ends, strict=False)
    return {sequence_id: blocks[first:last] for sequence_id, first, last in parts if first < last}


def _check_known(
    step: StepInput, table: SequenceTable, places: Places, scheduled: IntArray, computed: IntArray, blocks: IntArray
) -> None:
    known, rows = places
    sent = computed[known]
    wanted = table.within_limit(rows, sent + scheduled[known])
    held_blocks = table.num_held_blocks[rows] + blocks[known]
    differs = sent != table.num_computed[rows]
    # A sequence that stopped or failed holds fewer tokens than its scheduler, which has not heard of it yet, counts.
    short = (wanted > table.num_tokens[rows]) & ~table.skipped[rows]
    too_long = wanted > table.max_model_len
    too_wide, too_narrow = held_blocks > table.max_blocks, held_blocks * table.block_size < wanted
    if not (differs | short | too_long | too_wide | too_narrow).any():
        return
    ids = [step.sequence_ids[i] for i in known]
    text = "computed_token_count differs from the worker's"
    _refuse_where(differs, ids, text, sent, table.num_computed[rows])
    _refuse_where(short, ids, "more tokens are scheduled than it has", wanted, table.num_tokens[rows])
    _refuse_where(too_long, ids, "its tokens exceed max_model_len", wanted)
    _refuse_where(too_wide, ids, "its block table exceeds max_model_len", held_blocks)
    _refuse_where(too_narrow, ids, "its block table is too short", held_blocks * table.block_size, wanted)


def _draft_counts(step: StepInput) -> IntArray | None:
    """How many draft tokens may be verified of each sequence; None when there are none."""
    if not step.draft_token_counts:
        return None
    drafts = _integers(step.draft_token_counts, "draft_token_counts")
    if len(drafts) != len(step.sequence_ids):
        raise StateMismatch(
            f"step {step.step_id}: draft_token_counts has {len(drafts)} entries for {len(step.sequence_ids)} sequences"
        )
    _refuse_outside(step.draft_token_counts, 0, None, step.sequence_ids, "draft_token_count")
    return drafts


def _true_counts(
    step: StepInput, table: SequenceTable, known: IntArray, rows: IntArray, computed: IntArray
) -> IntArray:
    """`computed`, of which the scheduler sends what it knows, with what steps since the applied one have added."""
    if not table.accepted:
        return computed
    true = computed.copy()
    true[known] += table.num_unapplied(rows, step.applied_step_id)
    return true


def _check_drafts(
    step: StepInput, table: SequenceTable, places: Places, most: IntArray, computed: IntArray, blocks: IntArray
) -> None:
    """`most` is how many tokens may be computed of each sequence, drafts among them."""
    known, rows = places
    drafting = np.asarray(step.draft_token_counts, np.int64)[known] > 0
    which, rows = known[drafting], rows[drafting]
    ids = [step.sequence_ids[i] for i in which]
    _refuse_where(table.token_limit[rows] == 0, ids, "draft tokens are planned, but it does not speculate", most[which])
    wanted = table.within_limit(rows, computed[which] + most[which])
    held = (table.num_held_blocks[rows] + blocks[which]) * table.block_size
    _refuse_where(held < wanted, ids, "its block table is too short for its draft tokens", held, wanted)
    unread = table.num_tokens[rows] - computed[which] > 1
    _refuse_where(unread & ~table.skipped[rows], ids, "draft tokens are planned before its last token", computed[which])


def _check_new(new: NewSequence, table: SequenceTable, scheduled: int, computed: int, blocks: int) -> str | None:
    """Raises StateMismatch for what concerns the shared state; answers what is wrong with the sequence alone."""
    name, count = f"new sequence {new.sequence_id}", len(new.token_ids)
    if blocks:
        raise StateMismatch(f"{name} brings its blocks, so its new_block_count must be 0, not {blocks}")
    if not 1 <= count <= table.max_model_len:
        raise StateMismatch(f"{name} has {count} tokens, outside 1 to max_model_len {table.max_model_len}")
    if computed + scheduled > count:
        raise StateMismatch(f"{name} has {count} tokens, but {computed} computed and {scheduled} scheduled")
    if not 1 <= new.prompt_token_count <= count:
        raise StateMismatch(f"{name} has {count} tokens, but a prompt_token_count of {new.prompt_token_count}")
    if new.token_limit and not count < new.token_limit <= table.max_model_len:
        return f"token_limit {new.token_limit} lies outside {count + 1} to max_model_len {table.max_model_len}"
    block_ids = _integers(new.block_ids, f"block_ids of {name}")
    if len(block_ids) > table.max_blocks or len(block_ids) * table.block_size < computed + scheduled:
        raise StateMismatch(f"{name} brings {len(block_ids)} blocks for {computed + scheduled} positions")
    if len(np.unique(block_ids)) != len(block_ids):
        # Also what makes a plain `+= 1` count its holders.
        raise StateMismatch(f"{name} holds a block twice")
    _check_blocks(block_ids, table, name)
    if new.sampling.prompt_logprobs is not None and not max(1, computed + 1) <= new.prompt_logprob_start <= count:
        return f"prompt_logprob_start {new.prompt_logprob_start} lies outside {computed + 1} to {count}"
    return _token_error(new.token_ids, table.vocab_size) or sampling_error(new.sampling, table.vocab_size)


def _check_writes(
    step: StepInput, checked: CheckedStep, table: SequenceTable, places: Places, new: Mapping[int, NewSequence]
) -> None:
    """Refuses a sequence that would write a block which another one holds, or gets too; `new` by place in the step."""
    holders = table.num_holders
    ended = [*step.finished_sequence_ids, *step.preempted_sequence_ids]
    gone = [table.row_of[sequence_id] for sequence_id in set(ended) if sequence_id in table.row_of] if ended else []
    if gone:
        holders = holders.copy()
        for row in gone:
            holders[table.held_blocks(row)] -= 1
    known, rows = places
    first = checked.computed[known] // table.block_size
    first = np.where(table.skipped[rows], table.num_held_blocks[rows], first)
    own = table.blocks_from(rows, first)
    _refuse_held(own, holders, 1, f"step {step.step_id}", "is written by one sequence and held by another")
    if not (new or step.new_block_ids):
        return
    fresh = list(checked.new_blocks.values())
    for place, sequence in new.items():
        begin = int(checked.computed[place]) // table.block_size
        fresh.append(np.asarray(sequence.block_ids, np.int64)[begin:])
    given = _joined(fresh)
    _refuse_held(given, holders, 0, f"step {step.step_id}", "is given to a sequence while it is held")
    unique, times = np.unique(given, return_counts=True)
    if (times > 1).any():
        raise StateMismatch(f"step {step.step_id}: block {unique[np.argmax(times)]} is given twice")


def _refuse_held(blocks: IntArray, holders: IntArray, most: int, where: str, text: str) -> None:
    """Raises when one of the blocks is in more than `most` block tables."""
    held = holders[blocks] > most
    if held.any():
        raise StateMismatch(f"{where}: block {blocks[held][0]} {text}")


def _joined(arrays: Sequence[IntArray]) -> IntArray:
    return np.concatenate(arrays) if arrays else np.zeros(0, np.int64)


def _token_error(token_ids: Sequence[int], vocab_size: int) -> str | None:
    try:
        tokens = np.asarray(token_ids, np.int64)
    except (OverflowError, ValueError, TypeError):
        return "its token ids are not integers of 64 bits"
    wrong = np.flatnonzero((tokens < 0) | (tokens >= vocab_size))
    if len(wrong):
        return f"token id {tokens[wrong[0]]} at position {wrong[0]} lies outside the vocabulary of {vocab_size}"
    return None


def sampling_error(sampling: Sampling, vocab_size: int) -> str | None:
    """What is out of range in the sampling parameters; None when nothing is. NaN is out of every range."""
    ranges = (
        ("temperature", sampling.temperature, 0.0, 1e6),
        ("top_k", sampling.top_k, 0, 2**31),
        ("min_p", sampling.min_p, 0.0, 1.0),
        ("number of biases", len(sampling.biases), len(sampling.biased_token_ids), len(sampling.biased_token_ids)),
        ("presence_penalty", sampling.presence_penalty, -1e6, 1e6),
        ("frequency_penalty", sampling.frequency_penalty, -1e6, 1e6),
        ("min_tokens", sampling.min_tokens, 0, 2**31),
        ("sequence_index", sampling.sequence_index, 0, 2**31),
        ("seed", sampling.seed, 0, 2**64 - 1),
        ("logprobs", sampling.logprobs or 0, 0, min(_MAX_LOGPROBS, vocab_size)),
        ("prompt_logprobs", sampling.prompt_logprobs or 0, 0, min(_MAX_LOGPROBS, vocab_size)),
    )
    for name, value, low, high in ranges:
        if not low <= value <= high:
            return f"{name} {value} lies outside {low} to {high}"
    for name, share in (("top_p", sampling.top_p), ("typical_p", sampling.typical_p)):
        if not 0.0 < share <= 1.0:
            return f"{name} {share} lies outside 0 (exclusive) to 1"
    if not all(map(math.isfinite, sampling.biases)):
        return "a bias is not a finite number"
    for listed in (sampling.biased_token_ids, sampling.allowed_token_ids, sampling.banned_token_ids):
        if listed and not 0 <= min(listed) <= max(listed) < vocab_size:
            return f"a listed token id lies outside the vocabulary of {vocab_size}"
    if not (sampling.repetition_penalty > 0.0 and math.isfinite(sampling.repetition_penalty)):
        return f"repetition_penalty {sampling.repetition_penalty} is not a number above 0"
    return None


def _check_blocks(block_ids: IntArray, table: SequenceTable, name: str) -> None:
    wrong = block_ids[(block_ids < 0) | (block_ids >= table.num_blocks)]
    if len(wrong):
        raise StateMismatch(f"{name}: block {wrong[0]} lies outside the cache of {table.num_blocks} blocks")


def _refuse_where(
    wrong: NDArray[np.bool_], ids: Sequence[int], text: str, sent: IntArray, held: IntArray | None = None
) -> None:
    if wrong.any():
        i = int(np.argmax(wrong))
        against = "" if held is None else f" against {held[i]}"
        raise StateMismatch(f"sequence {ids[i]}: {text} ({sent[i]}{against})")


def _refuse_outside(values: Sequence[int], low: int, high: int | None, ids: Sequence[int], name: str) -> None:
    if not values or (min(values) >= low and (high is None or max(values) <= high)):
        return
    for sequence_id, value in zip(ids, values, strict=True):
        if value < low:
            raise StateMismatch(f"sequence {sequence_id}: {name} is below {low} ({value})")
        if high is not None and value > high:
            raise StateMismatch(f"sequence {sequence_id}: {name} is beyond max_model_len {high} ({value})")


def _column(values: Sequence[int], name: str, step: StepInput) -> IntArray:
    column = _integers(values, name)
    if len(column) != len(step.sequence_ids):
        count = len(step.sequence_ids)
        raise StateMismatch(f"step {step.step_id}: {name} has {len(column)} entries for {count} sequences")
    return column


def _integers(values: Sequence[int], what: str) -> IntArray:
    try:
        return np.asarray(values, np.int64).reshape(-1)
    except (OverflowError, ValueError, TypeError) as error:
        raise StateMismatch(f"{what} holds something that is no integer of 64 bits") from error


def _first_repeated(values: Iterable[int]) -> int:
    seen: set[int] = set()
    for value in values:
        if value in seen:
            return value
        seen.add(value)
    raise ValueError("nothing is repeated")
