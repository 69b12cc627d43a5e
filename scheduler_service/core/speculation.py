"""Speculative decoding as the scheduler sees it: how many tokens a step may bring, and how many it brought.

A sequence's tokens are on its worker first, so the worker drafts, between two steps. A plan says only how
many draft tokens it may verify, and nothing waits for them: until the step is applied, `computed` and
`pending` of a sequence count what is certain, `possible` what may come on top, and blocks are held for all
of it. What drafts leave unused of those blocks the sequence's next tokens fill.
"""

from collections.abc import Iterable, Mapping

from scheduler_service.core.kv_blocks import BlockManager
from scheduler_service.core.plan import StepPlan, StepResult, TokenEvent
from scheduler_service.core.request import Sequence, SequenceState


def draft_share(max_running: int, num_live: int, num_speculating: int) -> int:
    """Most draft tokens of each speculating sequence: they take the places of sequences that do not run.

    So no step samples at more positions than workers were measured for, and where many run or wait nobody drafts.
    """
    return max(0, max_running - num_live) // num_speculating if num_speculating else 0


def num_drafts_for(sequence: Sequence, blocks: BlockManager, most: int) -> int:
    """How many draft tokens, at most `most`, the next step may verify behind the sequence's last token.

    Only blocks that nobody needs are held for them: 0 when those are too few.
    """
    known = len(sequence.token_ids) + sequence.pending
    most = min(most, sequence.request.max_draft_tokens, sequence.kv_limit - known)
    if sequence.computed + 1 != known or most <= 0:
        return 0
    missing = blocks.num_missing(sequence, 1 + most)
    return most if missing <= max(0, blocks.num_free - blocks.num_promised) else 0


def check_accepted(plan: StepPlan, result: StepResult, live: Mapping[int, Sequence]) -> None:
    """Raises ValueError when an answer holds more accepted tokens than its plan, or a sequence's length, allows."""
    answered = set(result.sequence_ids)
    for sequence_id, accepted in result.accepted.items():
        most, sequence = plan.draft_counts.get(sequence_id, 0), live.get(sequence_id)
        if sequence is not None:
            most = min(most, sequence.kv_limit - len(sequence.token_ids))
        if len(accepted) > most or sequence_id not in answered:
            raise ValueError(
                f"step {plan.step_id} accepted {len(accepted)} draft tokens of sequence {sequence_id}; at most {most}, "
                "and one token more, can be right"
            )


def take_accepted(
    plan: StepPlan, result: StepResult, live: Mapping[int, Sequence], blocks: BlockManager
) -> list[TokenEvent]:
    """Appends the accepted draft tokens of an answer; the token sampled after them is the caller's.

    None of them ends its sequence.
    """
    events = []
    for sequence_id, most in plan.draft_counts.items():
        sequence = live.get(sequence_id)
        if sequence is None:
            continue
        sequence.possible -= most
        accepted = result.accepted.get(sequence_id)
        if not accepted:
            continue
        for position, (token_id, logprobs) in enumerate(accepted, sequence.output_token_count):
            sequence.token_ids.append(token_id)
            events.append(TokenEvent(sequence, token_id, position, logprobs, None))
        if sequence.state is SequenceState.RUNNING:
            blocks.advance(sequence, len(accepted))
    return events


def check_possible(in_flight: Iterable[StepPlan], sequences: Iterable[Sequence]) -> None:
    """Raises RuntimeError unless `possible` of each sequence is what the steps in flight may bring of drafts."""
    plans = list(in_flight)
    for sequence in sequences:
        if sequence.possible != sum(plan.draft_counts.get(sequence.sequence_id, 0) for plan in plans):
            raise RuntimeError(f"draft tokens of sequence {sequence.sequence_id} are counted wrong")
