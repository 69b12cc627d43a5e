"""What the scheduler has counted and measured."""

from dataclasses import dataclass

_SMOOTHING = 0.1


@dataclass(slots=True)
class SchedulerStats:
    """Counters since the start, and how fast steps have been.

    `tokens_per_s` is the smoothed rate of lately applied steps, `best_tokens_per_s` the highest it
    has been, `best_step_s` the shortest that a step has taken, smoothed too; 0 before any step.
    """

    num_steps: int = 0
    num_step_tokens: int = 0
    num_preemptions: int = 0
    num_hopeless: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    tokens_per_s: float = 0.0
    best_tokens_per_s: float = 0.0
    best_step_s: float = 0.0
    _step_s: float = 0.0

    def count_step(self, num_tokens: int, duration_s: float) -> None:
        """Counts an applied step that kept the device busy for so long."""
        self.num_steps += 1
        self.num_step_tokens += num_tokens
        if num_tokens == 0 or duration_s <= 0:
            return
        self.tokens_per_s = _smooth(self.tokens_per_s, num_tokens / duration_s)
        self._step_s = _smooth(self._step_s, duration_s)
        self.best_tokens_per_s = max(self.best_tokens_per_s, self.tokens_per_s)
        self.best_step_s = min(self.best_step_s or self._step_s, self._step_s)

    def count_prefix(self, num_tokens: int, num_hit: int) -> None:
        """Counts a start: tokens looked up in the prefix cache, and found there."""
        self.prefix_query_tokens += num_tokens
        self.prefix_hit_tokens += num_hit

    def seconds_for(self, num_tokens: int) -> float:
        """How long so many tokens take at the measured rate; 1 s before anything was measured."""
        return max(0.1, num_tokens / self.tokens_per_s) if self.tokens_per_s else 1.0

    def least_seconds_to_first_token(self, num_tokens: int) -> float:
        """How long prefill and one step take at the best that was ever measured; 0 before anything was."""
        return num_tokens / self.best_tokens_per_s + self.best_step_s if self.best_tokens_per_s else 0.0


def _smooth(old: float, new: float) -> float:
    return old + (new - old) * _SMOOTHING if old else new
