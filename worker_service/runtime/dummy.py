"""Steps that mean nothing: to measure what the largest one needs, and to warm up."""

from collections.abc import Sequence

from worker_service.runtime.prompt_logprobs import MAX_ROWS
from worker_service.runtime.step import NewSequence, Sampling, StepInput


def largest_lengths(max_step_tokens: int, max_sequences: int, max_model_len: int) -> list[int]:
    """Prompt lengths of a step with as many tokens and as many sequences as a step may have."""
    num_sequences = max(1, min(max_sequences, max_step_tokens))
    lengths = [1] * num_sequences
    spare = max_step_tokens - num_sequences
    for i in range(num_sequences):
        grown = min(spare, max_model_len - 1)
        lengths[i] += grown
        spare -= grown
    return lengths


def num_blocks_of(lengths: Sequence[int], block_size: int, num_decodes: int = 0) -> int:
    """Blocks that `prefill_step` of these lengths takes, with room to decode after it."""
    return sum(-(-(length + num_decodes) // block_size) for length in lengths)


def prefill_step(lengths: Sequence[int], block_size: int, sampling: Sampling, num_decodes: int = 0) -> StepInput:
    """A first step: one new sequence of each length, with room to decode `num_decodes` tokens.

    Where `sampling` asks for prompt log-probabilities, each tells of its last MAX_ROWS positions at most.
    """
    new, next_block = [], 0
    for sequence_id, length in enumerate(lengths, 1):
        num_blocks = num_blocks_of([length], block_size, num_decodes)
        blocks = range(next_block, next_block + num_blocks)
        next_block += num_blocks
        start = max(1, length - MAX_ROWS)
        new.append(
            NewSequence(sequence_id, "dummy", [0] * length, length, sampling, blocks, prompt_logprob_start=start)
        )
    ids, zeros = [sequence.sequence_id for sequence in new], [0] * len(new)
    return StepInput(1, new, ids, list(lengths), zeros, zeros, [], [], [])


def decode_step(lengths: Sequence[int], num_before: int) -> StepInput:
    """The step after `num_before` decodes that followed `prefill_step` of the same lengths."""
    ids = list(range(1, len(lengths) + 1))
    computed = [length + num_before for length in lengths]
    return StepInput(2 + num_before, [], ids, [1] * len(ids), computed, [0] * len(ids), [], [], [])
