"""The scheduler's limits."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one model's scheduler.

    `max_running` caps sequences that hold blocks, `max_step_tokens` the tokens of one step,
    `max_queued_requests` the sequences that may wait, `max_queued_tokens` their prompt tokens.
    """

    num_blocks: int
    block_size: int
    max_running: int
    max_step_tokens: int
    prefix_caching: bool = True
    max_in_flight: int = 2
    max_queued_requests: int = 1024
    max_queued_tokens: int = 1_000_000

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if name != "prefix_caching" and getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.max_step_tokens < self.max_running:
            raise ValueError(
                f"max_step_tokens ({self.max_step_tokens}) must be at least max_running ({self.max_running}), "
                "or running sequences starve"
            )
