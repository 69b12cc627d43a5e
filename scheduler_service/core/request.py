"""A request and the sequences sampled for it."""

from collections.abc import Mapping
from collections.abc import Sequence as ReadOnlyList
from dataclasses import dataclass, field
from enum import Enum

from scheduler_service.core.prefix import KeyChain


class SequenceState(Enum):
    """Where a sequence stands."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    """It holds no blocks; it waits again once no answer is in flight."""
    FINISHED = "finished"


class FinishReason(Enum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Request:
    """What a client asked for, validated and complete.

    `sampling` and `trace` are carried to the worker untouched: the core never looks inside.
    `max_tokens` is the most output tokens of each sequence, the context's end included.
    `deadline` is on the scheduler's clock, in seconds. With `scores_prompt` the first sequence
    tells how likely each token of the prompt is. `max_draft_tokens` is the most that a step may
    verify of each sequence; 0 for no speculation. `priors` holds the output that an earlier call
    has brought, of those sequences that go on, by index; None for a request that begins with all
    of its `n` sequences.
    """

    request_id: str
    prompt_token_ids: ReadOnlyList[int]
    max_tokens: int
    n: int = 1
    priority: int = 0
    tenant: str = ""
    adapter: str = ""
    cache_salt: str = ""
    deadline: float | None = None
    priors: Mapping[int, ReadOnlyList[int]] | None = None
    sampling: object = None
    trace: str = ""
    scores_prompt: bool = False
    max_draft_tokens: int = 0


@dataclass(slots=True, eq=False)
class Sequence:
    """One continuation being sampled. Only the scheduler changes it.

    `token_ids` are the prompt and the applied output. `computed` counts tokens whose KV is
    written by the steps sent so far; `pending` counts tokens sampled by steps sent and not yet
    applied, which the worker already has and this process has not; `possible` counts those that
    drafts in these steps may bring on top. `kv_limit` counts the tokens whose KV is ever needed: all
    but the last one of output. `scored` counts the prompt tokens whose log-probability is known or
    not wanted; the first has none. `published` counts its blocks that
    were offered to the prefix cache, `target_blocks` those that its tokens at its start need.
    `last_step` is the last step that it is part of, `level` its effective priority while it waits,
    `ticket` its place in the queue.
    """

    sequence_id: int
    index: int
    request: Request
    arrival: float
    token_ids: list[int]
    kv_limit: int
    keys: KeyChain
    state: SequenceState = SequenceState.WAITING
    block_ids: list[int] = field(default_factory=list)
    computed: int = 0
    pending: int = 0
    possible: int = 0
    published: int = 0
    target_blocks: int = 0
    last_step: int = 0
    cached: int = 0
    num_preemptions: int = 0
    level: int = 0
    ticket: int = 0
    protected_until: int = 0
    finish_reason: FinishReason | None = None
    prompt_token_count: int = field(init=False)
    scored: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_token_count = len(self.request.prompt_token_ids)
        self.scored = 1 if self.request.scores_prompt and self.index == 0 else self.prompt_token_count

    @property
    def output_token_count(self) -> int:
        """Number of applied output tokens."""
        return len(self.token_ids) - self.prompt_token_count
