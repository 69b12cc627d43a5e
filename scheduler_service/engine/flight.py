"""The flight recorder: the last steps of a worker group, kept in memory.

Steps and answers are values that exist anyway, so keeping them costs an append a step. What the workers knew
when the first kept step was sent is worked out when somebody wants to see it.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scheduler_service.core.plan import StepPlan, StepResult
from scheduler_service.core.request import Sequence as SchedulerSequence
from scheduler_service.engine.ports import StepTimings

if TYPE_CHECKING:
    from scheduler_service.engine.adapters import AdapterInfo
    from scheduler_service.engine.start import StartedGroup, StartPlan


@dataclass(slots=True)
class FlightStep:
    """A step that was sent; times in nanoseconds since the Unix epoch, 0 for not yet."""

    plan: StepPlan
    sent_unix_ns: int
    result: StepResult | None = None
    timings: StepTimings | None = None
    answered_unix_ns: int = 0


@dataclass(frozen=True, slots=True)
class KnownSequence:
    """A sequence as the workers knew it before the first kept step."""

    sequence: SchedulerSequence
    sequence_id: int
    token_ids: list[int]
    num_computed: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class FlightFacts:
    """What of the served model a recording names; as in StartPlan, `num_blocks` and `max_model_len` as decided."""

    model_path: str = ""
    fingerprint: str = ""
    dtype: str = "auto"
    quantize: str = "auto"
    kv_cache_dtype: str = "auto"
    block_size: int = 0
    num_blocks: int = 0
    max_model_len: int = 0
    max_step_tokens: int = 0
    max_sequences: int = 0

    @classmethod
    def of(cls, plan: "StartPlan", started: "StartedGroup") -> "FlightFacts":
        """Of a model that was started."""
        return cls(
            model_path=plan.model_path,
            fingerprint=plan.fingerprint,
            dtype=plan.dtype,
            quantize=plan.quantize,
            kv_cache_dtype=plan.kv_cache_dtype,
            block_size=plan.block_size,
            num_blocks=started.num_blocks,
            max_model_len=started.max_model_len,
            max_step_tokens=plan.max_step_tokens,
            max_sequences=plan.max_sequences,
        )


class FlightRecorder:
    """Keeps the last `num_steps` steps of the epoch; 0 keeps none. For the event loop alone.

    `num_answered` counts all steps of the epoch that were answered. `adapters` and `grammars` tell what sequences
    name: the adapters that are loaded, and the texts of grammars by their keys, of those that are still known. Whoever
    owns these sets them.
    """

    def __init__(self, num_steps: int, facts: FlightFacts = FlightFacts()) -> None:
        self.facts = facts
        self._steps: deque[FlightStep] = deque(maxlen=num_steps)
        self._unanswered: deque[FlightStep] = deque()
        self._awaited: tuple[int, asyncio.Event] | None = None
        self.num_answered = 0
        self.adapters: Callable[[], Sequence[AdapterInfo]] = tuple
        self.grammars: Callable[[Set[bytes]], Mapping[bytes, str]] = lambda _keys: {}

    def begin_epoch(self) -> None:
        """Forgets the steps: another epoch begins."""
        self._steps.clear()
        self._unanswered.clear()
        self.num_answered = 0

    def sent(self, plan: StepPlan) -> None:
        """A step goes to the workers."""
        step = FlightStep(plan, time.time_ns())
        self._steps.append(step)
        self._unanswered.append(step)

    def answered(self, result: StepResult, timings: StepTimings) -> None:
        """The oldest step without an answer got one."""
        step = self._unanswered.popleft()
        step.result, step.timings, step.answered_unix_ns = result, timings, time.time_ns()
        self.num_answered += 1
        if self._awaited is not None and self.num_answered >= self._awaited[0]:
            self._awaited[1].set()

    async def wait_answered(self, num_steps: int) -> None:
        """Waits until so many steps of the epoch were answered. For one caller at a time."""
        if self.num_answered >= num_steps:
            return
        self._awaited = (num_steps, asyncio.Event())
        try:
            await self._awaited[1].wait()
        finally:
            self._awaited = None

    def steps(self) -> list[FlightStep]:
        """What is kept, the oldest step first."""
        return list(self._steps)


def known_sequences(steps: Sequence[FlightStep], block_size: int) -> list[KnownSequence]:
    """The sequences that the workers knew before the first of these steps, as far as the steps use them.

    One whose tokens are no longer known is left out: it was cancelled while an earlier step was in flight, or it
    speculates, so that an earlier step may have brought it any number.
    """
    met: set[int] = set()
    found = []
    for index, step in enumerate(steps):
        plan = step.plan
        met.update(new.sequence_id for new in plan.new_sequences)
        for place, sequence_id in enumerate(plan.sequence_ids):
            if sequence_id in met:
                continue
            met.add(sequence_id)
            if plan.sequences[place].request.max_draft_tokens:
                continue
            token_ids = _token_ids(plan.sequences[place], sequence_id, steps[index:])
            num_computed = plan.computed_token_counts[place]
            if token_ids is None or num_computed >= len(token_ids):
                continue
            num_held = num_computed + plan.scheduled_token_counts[place]
            num_blocks = -(-num_held // block_size) - plan.new_block_counts[place]
            found.append(KnownSequence(plan.sequences[place], sequence_id, token_ids, num_computed, num_blocks))
    return found


def _token_ids(sequence: SchedulerSequence, sequence_id: int, steps: Iterable[FlightStep]) -> list[int] | None:
    """What a sequence had before these steps: as many tokens as were computed when the next one was sampled.

    None when that is not known, or when workers skipped it, because it had ended and the scheduler did not know yet.
    """
    num_unsampled = 0
    for step in steps:
        if sequence_id in step.plan.preempted_sequence_ids or sequence_id in step.plan.finished_sequence_ids:
            break
        if step.result is None or sequence_id not in step.plan.sequence_ids:
            continue
        place = step.plan.sequence_ids.index(sequence_id)
        num_tokens = step.plan.computed_token_counts[place] + step.plan.scheduled_token_counts[place]
        if sequence_id in step.result.sequence_ids:
            return list(sequence.token_ids[:num_tokens]) if num_tokens <= len(sequence.token_ids) else None
        num_unsampled = num_tokens
    return list(sequence.token_ids) if num_unsampled < len(sequence.token_ids) else None
