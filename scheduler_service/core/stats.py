"""What the scheduler has counted."""

from dataclasses import dataclass

_SMOOTHING = 0.1


@dataclass(slots=True)
class SchedulerStats:
    """Counters since the start, and the rate at which tokens have lately been computed."""

    num_steps: int = 0
    num_step_tokens: int = 0
    num_preemptions: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    tokens_per_s: float = 0.0
    last_step_time: float | None = None

    def count_step(self, num_tokens: int, now: float) -> None:
        """Counts an applied step; steps within a second of each other set the rate."""
        self.num_steps += 1
        self.num_step_tokens += num_tokens
        if self.last_step_time is not None and 0 < now - self.last_step_time < 1:
            rate = num_tokens / (now - self.last_step_time)
            self.tokens_per_s += (rate - self.tokens_per_s) * (_SMOOTHING if self.tokens_per_s else 1)
        self.last_step_time = now

    def count_prefix(self, num_tokens: int, num_hit: int) -> None:
        """Counts a start: tokens looked up in the prefix cache, and found there."""
        self.prefix_query_tokens += num_tokens
        self.prefix_hit_tokens += num_hit

    def seconds_for(self, num_tokens: int) -> float:
        """How long so many tokens take at the measured rate; 1 s before anything was measured."""
        return max(0.1, num_tokens / self.tokens_per_s) if self.tokens_per_s else 1.0
