"""What goes into the engine and what comes out of it: plain values between rpc/ and the engine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from scheduler_service.core.plan import PromptLogprobs
from scheduler_service.core.request import FinishReason


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Text, tokenized with the tokenizer's own special tokens added."""

    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids, taken as they stand."""

    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages, rendered with the checkpoint's own chat template."""

    messages: tuple[ChatMessage, ...]


Prompt = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """The form that output must have. `kind` is the field of StructuredOutput in inference.proto that says it."""

    kind: Literal["json_schema", "json_object", "regex", "choices", "grammar"]
    text: str = ""
    choices: Sequence[str] = ()

    def question(self) -> dict[str, object]:
        """What a process of engine/grammar_process.py is asked."""
        return {"kind": self.kind, "text": self.text, "choices": list(self.choices)}


@dataclass(frozen=True, slots=True)
class SamplingInput:
    """How tokens are to be drawn, as the client said it: unchecked, None where it said nothing."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    n: int | None = None
    logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] = ()
    banned_token_ids: Sequence[int] = ()
    typical_p: float | None = None
    best_of: int | None = None
    prompt_logprobs: int | None = None
    structured_output: StructuredOutput | None = None


@dataclass(frozen=True, slots=True)
class GenerateInput:
    """One call of Generate, unchecked. `deadline_s` is the time the client still waits, in seconds; `max_draft_tokens`
    and `stream_interval` are None where the client said nothing of them."""

    prompt: Prompt | None
    sampling: SamplingInput = SamplingInput()
    model: str = ""
    request_id: str = ""
    tenant: str = ""
    priority: int = 0
    priors: Sequence[Sequence[int]] = ()
    adapter: str = ""
    deadline_s: float | None = None
    max_draft_tokens: int | None = None
    stream_interval: int | None = None


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the tokens of a request are drawn; every value in force. Goes to the worker with each sequence."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    stop_token_ids: tuple[int, ...]
    min_tokens: int
    seed: int
    logprobs: int | None
    typical_p: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    banned_token_ids: tuple[int, ...] = ()
    prompt_logprobs: int | None = None
    grammar_key: bytes = b""


@dataclass(frozen=True, slots=True)
class Started:
    """The request was accepted."""

    request_id: str
    seed: int
    model: str
    prompt_token_count: int


@dataclass(slots=True)
class Output:
    """One or more tokens of one sequence, from output position `position` on.

    `logprobs` holds what the worker sent, untouched: one entry for each token, or none.
    """

    sequence_index: int
    position: int
    token_ids: list[int]
    text: str
    logprobs: list[object] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop: str | None = None
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """All sequences have ended. `queue_s` is the time from arrival to the first step, in seconds."""

    prompt_token_count: int
    output_token_count: int
    cached_token_count: int
    queue_s: float


Event = Started | PromptLogprobs | Output | Finished


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model and how it stands. `state` is one of "starting", "ready", "recovering", "draining", "failed"."""

    name: str
    state: str
    architecture: str = ""
    vocab_size: int = 0
    max_model_len: int = 0
    dtype: str = ""
    eos_token_ids: tuple[int, ...] = ()
    has_chat_template: bool = False
    block_size: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_running: int = 0
    num_waiting: int = 0
