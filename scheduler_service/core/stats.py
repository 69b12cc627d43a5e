"""What the scheduler has counted and measured."""

from dataclasses import dataclass, field

_DECAY = 0.9


@dataclass(slots=True)
class _Pace:
    """Steps, tokens and seconds, summed with less weight on older steps.

    Sums, not a mean of rates: when two answers are taken at once, the second looks like a step that took no time.
    """

    num_steps: float = 0.0
    num_tokens: float = 0.0
    seconds: float = 0.0

    def add(self, num_tokens: int, seconds: float) -> None:
        self.num_steps = self.num_steps * _DECAY + 1
        self.num_tokens = self.num_tokens * _DECAY + num_tokens
        self.seconds = self.seconds * _DECAY + seconds


@dataclass(slots=True)
class SchedulerStats:
    """Counters since the start, and how fast steps have been.

    `tokens_per_s` is the smoothed rate of lately applied steps, `best_tokens_per_s` the highest that it
    has been over steps at least half full, `best_step_s` the shortest that a step has taken, smoothed too;
    each is 0 before any such step. `num_hopeless` counts requests ended because their deadline could not be met,
    `num_draft_tokens` the tokens that were drafted and verified, `num_accepted_tokens` those of them that were right.
    """

    num_steps: int = 0
    num_step_tokens: int = 0
    num_preemptions: int = 0
    num_hopeless: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    tokens_per_s: float = 0.0
    best_tokens_per_s: float = 0.0
    best_step_s: float = 0.0
    _all: _Pace = field(default_factory=_Pace)
    _full: _Pace = field(default_factory=_Pace)

    def count_step(self, num_tokens: int, duration_s: float, *, is_full: bool) -> None:
        """Counts an applied step that kept the device busy for so long; `is_full` when at least half full."""
        self.num_steps += 1
        self.num_step_tokens += num_tokens
        if num_tokens == 0:
            return
        self._all.add(num_tokens, duration_s)
        if self._all.seconds > 0:
            self.tokens_per_s = self._all.num_tokens / self._all.seconds
            step_s = self._all.seconds / self._all.num_steps
            self.best_step_s = min(self.best_step_s or step_s, step_s)
        if is_full:
            self._full.add(num_tokens, duration_s)
            if self._full.seconds > 0:
                self.best_tokens_per_s = max(self.best_tokens_per_s, self._full.num_tokens / self._full.seconds)

    def count_prefix(self, num_tokens: int, num_hit: int) -> None:
        """Counts a start: tokens looked up in the prefix cache, and found there."""
        self.prefix_query_tokens += num_tokens
        self.prefix_hit_tokens += num_hit

    def seconds_for(self, num_tokens: int) -> float:
        """How long so many tokens take at the measured rate; 1 s before anything was measured."""
        return max(0.1, num_tokens / self.tokens_per_s) if self.tokens_per_s else 1.0

    def least_seconds_to_first_token(self, num_tokens: int) -> float:
        """How long prefill and one step take at the best that was ever measured.

        Only full steps say how fast a prompt can go: one of a few tokens takes nearly as long as one of
        hundreds. Before any, the prefill counts for nothing.
        """
        prefill_s = num_tokens / self.best_tokens_per_s if self.best_tokens_per_s else 0.0
        return prefill_s + self.best_step_s
