"""A step's plan, as sent, and its result, as applied; in columns, like the wire."""

from collections.abc import Mapping
from collections.abc import Sequence as ReadOnlyList
from dataclasses import dataclass, field
from typing import NamedTuple

from scheduler_service.core.request import FinishReason, Sequence


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence as its first step of an epoch, or its first after a preemption, carries it."""

    sequence: Sequence
    sequence_id: int
    token_ids: list[int]
    block_ids: list[int]


@dataclass(slots=True)
class StepPlan:
    """What a step is to do. Entry i of each column belongs to `sequences[i]`.

    `draft_counts` is how many draft tokens may be verified beside, by sequence id, of those that
    speculate; `applied_step_id` the last step applied before. Of the workers' concern is neither
    `sent_at`, on the scheduler's clock, nor `leaders`, which have had their last shared prompt
    block planned.
    """

    step_id: int
    sent_at: float = 0.0
    new_sequences: list[NewSequence] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)
    sequence_ids: list[int] = field(default_factory=list)
    scheduled_token_counts: list[int] = field(default_factory=list)
    computed_token_counts: list[int] = field(default_factory=list)
    new_block_counts: list[int] = field(default_factory=list)
    new_block_ids: list[int] = field(default_factory=list)
    leaders: list[Sequence] = field(default_factory=list)
    finished_sequence_ids: list[int] = field(default_factory=list)
    preempted_sequence_ids: list[int] = field(default_factory=list)
    draft_counts: dict[int, int] = field(default_factory=dict)
    applied_step_id: int = 0
    is_traced: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes, drafts not counted."""
        return sum(self.scheduled_token_counts)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing in it to send."""
        return not (self.sequences or self.finished_sequence_ids or self.preempted_sequence_ids)


class PromptLogprobs(NamedTuple):
    """Log-probabilities of `num` prompt tokens from `position` on. `values` are carried through untouched."""

    position: int
    num: int
    values: object


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a worker answered to a step. `logprobs` values are carried through untouched.

    `error_reasons` are those of sequences among `errors` whose requests are to blame.
    `prompt_logprobs` are parts of prompts by sequence id, those of one sequence in order.
    `accepted` holds the tokens, with their log-probabilities, that come before the one in
    `token_ids` of sequences whose drafts were right; `num_draft_tokens` is how many were tried.
    """

    step_id: int
    sequence_ids: list[int]
    token_ids: list[int]
    stopped_sequence_ids: frozenset[int] = frozenset()
    logprobs: Mapping[int, object] = field(default_factory=dict)
    errors: Mapping[int, str] = field(default_factory=dict)
    prompt_logprobs: ReadOnlyList[tuple[int, PromptLogprobs]] = ()
    accepted: Mapping[int, ReadOnlyList[tuple[int, object]]] = field(default_factory=dict)
    num_draft_tokens: int = 0
    error_reasons: Mapping[int, str] = field(default_factory=dict)


class TokenEvent(NamedTuple):
    """One token to deliver, in order. `finish_reason` is set with the sequence's last one."""

    sequence: Sequence
    token_id: int
    position: int
    logprobs: object
    finish_reason: FinishReason | None


class PromptEvent(NamedTuple):
    """A part of a prompt was scored."""

    sequence: Sequence
    logprobs: PromptLogprobs


class EndEvent(NamedTuple):
    """A sequence ended without a token: cancelled, past its deadline, or failed on the worker. `error_reason` is set
    where its request is to blame for the latter."""

    sequence: Sequence
    finish_reason: FinishReason
    message: str
    error_reason: str | None = None
