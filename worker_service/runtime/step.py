"""What goes into a step and what comes out of it: plain values between rpc/ and the model runner."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

# Of one message, so that its size is bounded whatever the size of a step.
MAX_PROMPT_POSITIONS = 4096


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the tokens of one sequence are drawn; every value in force. See worker.proto, SequenceSampling."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    seed: int = 0
    sequence_index: int = 0
    logprobs: int | None = None
    typical_p: float = 1.0
    biased_token_ids: tuple[int, ...] = ()
    biases: tuple[float, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    banned_token_ids: tuple[int, ...] = ()
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class NewSequence:
    """All there is to know of a sequence; a worker's state of it is a pure function of this."""

    sequence_id: int
    request_id: str
    token_ids: Sequence[int]
    prompt_token_count: int
    sampling: Sampling
    block_ids: Sequence[int]
    traceparent: str = ""
    prompt_logprob_start: int = 1
    adapter: str = ""
    token_limit: int = 0
    grammar_key: bytes = b""


@dataclass(frozen=True, slots=True)
class StepInput:
    """One step, in columns; entry i of each column belongs to sequence_ids[i]. See worker.proto, Step."""

    step_id: int
    new_sequences: Sequence[NewSequence]
    sequence_ids: Sequence[int]
    scheduled_token_counts: Sequence[int]
    computed_token_counts: Sequence[int]
    new_block_counts: Sequence[int]
    new_block_ids: Sequence[int]
    finished_sequence_ids: Sequence[int]
    preempted_sequence_ids: Sequence[int]
    draft_token_counts: Sequence[int] = ()
    applied_step_id: int = 0
    is_traced: bool = False


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural logarithms at one output position: of the sampled token, and (id, value) of the most likely, falling."""

    token_id: int
    logprob: float
    top: Sequence[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """A part of a prompt, in columns; see PromptLogprobs in common.proto."""

    position: int
    token_ids: list[int]
    logprobs: list[float]
    top_token_ids: list[int]
    top_logprobs: list[float]


class Failure(NamedTuple):
    """Why a sequence gets no token. `reason` is an ErrorReason where its request is to blame."""

    message: str
    reason: str | None = None


@dataclass(slots=True)
class StepOutput:
    """The result of one step. See worker.proto, StepResult.

    `error_reasons` are those of sequences among `errors` whose requests are to blame.
    `accepted` holds, by sequence id, the draft tokens that come before the one in `token_ids`, and
    `accepted_logprobs` theirs.
    """

    step_id: int
    sequence_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    stopped_sequence_ids: list[int] = field(default_factory=list)
    logprobs: dict[int, Logprobs] = field(default_factory=dict)
    prompt_logprobs: list[tuple[int, PromptLogprobs]] = field(default_factory=list)
    errors: dict[int, str] = field(default_factory=dict)
    error_reasons: dict[int, str] = field(default_factory=dict)
    accepted: dict[int, list[int]] = field(default_factory=dict)
    accepted_logprobs: dict[int, list[Logprobs]] = field(default_factory=dict)
    num_draft_tokens: int = 0
    start_unix_ns: int = 0
    prepare_ns: int = 0
    forward_ns: int = 0
    sample_ns: int = 0

    def fail(self, sequence_id: int, failure: Failure) -> None:
        """A sequence gets no token in this step."""
        self.errors[sequence_id] = failure.message
        if failure.reason is not None:
            self.error_reasons[sequence_id] = failure.reason


class StateMismatch(Exception):
    """A step disagrees with what this worker holds; the step was refused and nothing changed."""


def nobody_waits() -> None:
    """What is called when a step is on the device, where nobody cares."""
