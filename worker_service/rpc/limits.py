"""The last check of a step's numbers before one of them can become a tensor index."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from stepwire.grammars import KEY_BYTES, MAX_GRAMMAR_BYTES, MAX_LIVE_GRAMMARS, grammar_key
from stepwire.rpc.errors import StepwireError
from worker_service.runtime.step import NewSequence, Sampling, StepInput

MAX_REQUEST_ID_LEN = 1024
MAX_STOP_TOKENS = 4096
MAX_LOGPROBS = 1024
MAX_ADAPTER_LEN = 64


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What a step may hold: the sizes this worker measured, allocated and warmed up for."""

    max_step_tokens: int
    max_sequences: int
    max_model_len: int
    num_blocks: int
    block_size: int
    vocab_size: int


def check_step(step: StepInput, limits: StepLimits) -> None:
    """Refuses a step with a number out of bounds or with columns that do not belong together.

    Raises StepwireError FIELD_OUT_OF_RANGE or FIELD_INVALID naming the field. What is wrong
    inside one new sequence (`sequence_problem`) is that sequence's error and not checked here.
    """
    _check_columns(step, limits)
    _check_drafts(step, limits)
    _check_blocks(step, limits)
    _check_new_sequences(step, limits)
    for field in ("finished_sequence_ids", "preempted_sequence_ids"):
        _check_range(field, getattr(step, field), 0, None)


def sequence_problem(new: NewSequence, limits: StepLimits) -> str | None:
    """What makes this sequence impossible to run, or None. It harms no other sequence of the step."""
    if not new.token_ids:
        return "it has no tokens"
    if min(new.token_ids) < 0 or max(new.token_ids) >= limits.vocab_size:
        bad = next(token for token in new.token_ids if not 0 <= token < limits.vocab_size)
        return f"token id {bad} is not below the vocabulary size {limits.vocab_size}"
    if len(new.token_ids) > limits.max_model_len:
        return f"it has {len(new.token_ids)} tokens; the longest context is {limits.max_model_len}"
    if not 1 <= new.prompt_token_count <= len(new.token_ids):
        return f"prompt_token_count {new.prompt_token_count} is not in 1..{len(new.token_ids)}"
    if new.token_limit and not len(new.token_ids) < new.token_limit <= limits.max_model_len:
        return f"token_limit {new.token_limit} is not in {len(new.token_ids) + 1}..{limits.max_model_len}"
    if len(new.adapter) > MAX_ADAPTER_LEN:
        return f"adapter has {len(new.adapter)} characters; a fingerprint has {MAX_ADAPTER_LEN}"
    if new.grammar_key and len(new.grammar_key) != KEY_BYTES:
        return f"grammar_key has {len(new.grammar_key)} bytes, not {KEY_BYTES}"
    if new.grammar_key and new.token_limit:
        return "it has a grammar and may speculate, and a grammar does not go on over drafts"
    return _sampling_problem(new.sampling, limits.vocab_size)


def check_grammar(key: bytes, grammar: str, live_keys: Sequence[bytes], revision: int) -> None:
    """Refuses a grammar that is too long or not the one that its key names.

    Raises StepwireError FIELD_OUT_OF_RANGE or FIELD_INVALID naming the field.
    """
    if not 1 <= len(grammar) <= MAX_GRAMMAR_BYTES or len(grammar.encode()) > MAX_GRAMMAR_BYTES:
        raise out_of_range("grammar", f"{len(grammar)} characters", f"1..{MAX_GRAMMAR_BYTES} bytes")
    if key != grammar_key(grammar):
        raise _invalid("grammar_key", "is not the SHA-256 of the grammar")
    if len(live_keys) > MAX_LIVE_GRAMMARS:
        raise out_of_range("live_grammar_keys", f"{len(live_keys)} entries", f"at most {MAX_LIVE_GRAMMARS}")
    if any(len(live) != KEY_BYTES for live in live_keys):
        raise _invalid("live_grammar_keys", f"must have {KEY_BYTES} bytes each")
    check_number("revision", revision, 1, 2**63 - 1)


def without_sequences(step: StepInput, refused: frozenset[int] | set[int]) -> StepInput:
    """The step without any mention of the `refused` sequences."""
    kept = [i for i, sequence_id in enumerate(step.sequence_ids) if sequence_id not in refused]
    block_ids: list[int] = []
    start = 0
    for sequence_id, count in zip(step.sequence_ids, step.new_block_counts, strict=True):
        if sequence_id not in refused:
            block_ids.extend(step.new_block_ids[start : start + count])
        start += count
    return replace(
        step,
        new_sequences=[new for new in step.new_sequences if new.sequence_id not in refused],
        sequence_ids=[step.sequence_ids[i] for i in kept],
        scheduled_token_counts=[step.scheduled_token_counts[i] for i in kept],
        computed_token_counts=[step.computed_token_counts[i] for i in kept],
        new_block_counts=[step.new_block_counts[i] for i in kept],
        new_block_ids=block_ids,
        finished_sequence_ids=[i for i in step.finished_sequence_ids if i not in refused],
        preempted_sequence_ids=[i for i in step.preempted_sequence_ids if i not in refused],
        draft_token_counts=[step.draft_token_counts[i] for i in kept] if step.draft_token_counts else (),
    )


def _check_columns(step: StepInput, limits: StepLimits) -> None:
    num_sequences = len(step.sequence_ids)
    if num_sequences > limits.max_sequences:
        raise out_of_range("sequence_ids", f"{num_sequences} entries", f"at most {limits.max_sequences}")
    for field in ("scheduled_token_counts", "computed_token_counts", "new_block_counts"):
        if len(getattr(step, field)) != num_sequences:
            raise _invalid(field, f"has {len(getattr(step, field))} entries for {num_sequences} sequences")
    _check_range("sequence_ids", step.sequence_ids, 0, None)
    if len(set(step.sequence_ids)) != num_sequences:
        raise _invalid("sequence_ids", "names a sequence twice")
    _check_range("scheduled_token_counts", step.scheduled_token_counts, 1, limits.max_step_tokens)
    _check_range("computed_token_counts", step.computed_token_counts, 0, limits.max_model_len - 1)
    if sum(step.scheduled_token_counts) > limits.max_step_tokens:
        raise out_of_range(
            "scheduled_token_counts",
            f"sum {sum(step.scheduled_token_counts)}",
            f"a sum of at most {limits.max_step_tokens}",
        )
    for computed, scheduled in zip(step.computed_token_counts, step.scheduled_token_counts, strict=True):
        if computed + scheduled > limits.max_model_len:
            raise out_of_range(
                "computed_token_counts",
                f"{computed} with {scheduled} scheduled",
                f"together at most max_model_len {limits.max_model_len}",
            )


def _check_drafts(step: StepInput, limits: StepLimits) -> None:
    _check_range("applied_step_id", [step.applied_step_id], 0, step.step_id - 1)
    drafts = step.draft_token_counts
    if not drafts:
        return
    if len(drafts) != len(step.sequence_ids):
        raise _invalid("draft_token_counts", f"has {len(drafts)} entries for {len(step.sequence_ids)} sequences")
    _check_range("draft_token_counts", drafts, 0, limits.max_sequences)
    for what, most, num in (
        ("sequences", limits.max_sequences, len(step.sequence_ids)),
        ("scheduled tokens", limits.max_step_tokens, sum(step.scheduled_token_counts)),
    ):
        if num + sum(drafts) > most:
            raise out_of_range("draft_token_counts", f"sum {sum(drafts)} beside {num} {what}", f"at most {most} in all")


def _check_blocks(step: StepInput, limits: StepLimits) -> None:
    _check_range("new_block_counts", step.new_block_counts, 0, limits.num_blocks)
    if sum(step.new_block_counts) != len(step.new_block_ids):
        raise _invalid(
            "new_block_ids", f"has {len(step.new_block_ids)} entries; new_block_counts sum {sum(step.new_block_counts)}"
        )
    _check_range("new_block_ids", step.new_block_ids, 0, limits.num_blocks - 1)


def _check_new_sequences(step: StepInput, limits: StepLimits) -> None:
    if not step.new_sequences:
        return
    index_of = {sequence_id: i for i, sequence_id in enumerate(step.sequence_ids)}
    seen: set[int] = set()
    max_blocks = -(-limits.max_model_len // limits.block_size)
    for new in step.new_sequences:
        index = index_of.get(new.sequence_id)
        if index is None or new.sequence_id in seen:
            raise _invalid("new_sequences", f"sequence {new.sequence_id} must be named once, and in sequence_ids")
        seen.add(new.sequence_id)
        if step.new_block_counts[index] != 0:
            raise _invalid("new_block_counts", f"must be 0 for new sequence {new.sequence_id}, which brings its blocks")
        if len(new.block_ids) > max_blocks:
            raise out_of_range("new_sequences.block_ids", f"{len(new.block_ids)} entries", f"at most {max_blocks}")
        _check_range("new_sequences.block_ids", new.block_ids, 0, limits.num_blocks - 1)
        if len(new.request_id) > MAX_REQUEST_ID_LEN:
            raise out_of_range(
                "new_sequences.request_id", f"{len(new.request_id)} characters", f"at most {MAX_REQUEST_ID_LEN}"
            )


def _sampling_problem(sampling: Sampling, vocab_size: int) -> str | None:
    numbers = (
        sampling.temperature,
        sampling.top_p,
        sampling.min_p,
        sampling.repetition_penalty,
        sampling.presence_penalty,
        sampling.frequency_penalty,
        sampling.typical_p,
        *sampling.biases,
    )
    if not all(map(math.isfinite, numbers)):
        return "a sampling parameter is not a finite number"
    checks = (
        ("temperature", sampling.temperature, sampling.temperature >= 0),
        ("top_k", sampling.top_k, sampling.top_k >= 0),
        ("top_p", sampling.top_p, 0 < sampling.top_p <= 1),
        ("min_p", sampling.min_p, 0 <= sampling.min_p <= 1),
        ("typical_p", sampling.typical_p, 0 < sampling.typical_p <= 1),
        ("biases", len(sampling.biases), len(sampling.biases) == len(sampling.biased_token_ids)),
        ("repetition_penalty", sampling.repetition_penalty, sampling.repetition_penalty > 0),
        ("min_tokens", sampling.min_tokens, sampling.min_tokens >= 0),
        ("sequence_index", sampling.sequence_index, sampling.sequence_index >= 0),
        ("logprobs", sampling.logprobs, sampling.logprobs is None or 0 <= sampling.logprobs <= MAX_LOGPROBS),
        (
            "prompt_logprobs",
            sampling.prompt_logprobs,
            sampling.prompt_logprobs is None or 0 <= sampling.prompt_logprobs <= min(MAX_LOGPROBS, vocab_size),
        ),
        ("stop_token_ids", len(sampling.stop_token_ids), len(sampling.stop_token_ids) <= MAX_STOP_TOKENS),
    )
    for name, value, holds in checks:
        if not holds:
            return f"{name} {value} is out of range"
    for name in ("stop_token_ids", "biased_token_ids", "allowed_token_ids", "banned_token_ids"):
        token_ids = getattr(sampling, name)
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
            return f"{name} holds a token id that is not below the vocabulary size {vocab_size}"
    if len(set(sampling.biased_token_ids)) != len(sampling.biased_token_ids):
        return "biased_token_ids holds a token id twice"
    return None


def _check_range(field: str, values: Sequence[int], least: int, most: int | None) -> None:
    if not values:
        return
    lowest, highest = min(values), max(values)
    if lowest < least or (most is not None and highest > most):
        bound = f"at least {least}" if most is None else f"{least}..{most}"
        raise out_of_range(field, str(lowest if lowest < least else highest), bound)


def check_number(field: str, value: int, least: int, most: int) -> None:
    """Raises StepwireError FIELD_OUT_OF_RANGE unless `value` lies within the bounds."""
    if not least <= value <= most:
        raise out_of_range(field, str(value), f"{least}..{most}")


def out_of_range(field: str, found: str, expected: str) -> StepwireError:
    """The error of a field whose value is outside its range."""
    return StepwireError(
        "FIELD_OUT_OF_RANGE",
        f"{field} is {found}; expected {expected}",
        {"field": field, "found": found, "expected": expected},
    )


def _invalid(field: str, problem: str) -> StepwireError:
    return StepwireError("FIELD_INVALID", f"{field} {problem}", {"field": field})
