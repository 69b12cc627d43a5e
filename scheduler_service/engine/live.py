"""A request while it lives: what the step loop and the client's call share."""

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from scheduler_service.core.request import FinishReason, Request
from scheduler_service.engine.best_of import BestOf
from scheduler_service.engine.continuing import Continued
from scheduler_service.engine.grammars import GrammarHold
from scheduler_service.engine.output import OutputStream
from scheduler_service.engine.stop import StopStrings
from scheduler_service.engine.tracing import RequestTrace
from scheduler_service.engine.values import Finished

if TYPE_CHECKING:
    from scheduler_service.engine.loop import StepLoop


@dataclass(slots=True, eq=False)
class LiveRequest:
    """One accepted request. Times are monotonic seconds."""

    request: Request
    stops: StopStrings | None
    min_tokens: int
    trace: RequestTrace
    arrival: float
    best_of: BestOf | None = None
    stream: OutputStream = field(default_factory=OutputStream)
    loop: "StepLoop | None" = None
    """Where it lives; None before it is accepted."""
    num_moves: int = 0
    grammar: GrammarHold | None = None
    """What its replica's workers hold for the form of its output."""
    is_closed: bool = False
    num_live: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    first_step_at: float | None = None
    first_token_at: float | None = None
    awaits_token: bool = True
    """Whether its first token, or the first since it was resumed, is yet to come."""
    finish_reasons: dict[int, FinishReason] = field(default_factory=dict)
    continued: Continued = field(default_factory=Continued)

    @property
    def queue_s(self) -> float:
        """Time from arrival to the first step, in seconds; until now when there was none."""
        return (self.first_step_at or time.monotonic()) - self.arrival

    def leave_grammar(self) -> None:
        """Its replica's workers need not hold its grammar any more."""
        if self.grammar is not None:
            self.grammar.release()
            self.grammar = None

    @property
    def _num_delivered(self) -> int:
        return self.num_output_tokens if self.best_of is None else self.best_of.num_best_tokens

    def finished(self) -> Finished:
        """The last event."""
        return Finished(
            prompt_token_count=len(self.request.prompt_token_ids),
            output_token_count=self._num_delivered + self.continued.num_tokens,
            cached_token_count=self.num_cached_tokens,
            queue_s=self.queue_s,
        )
