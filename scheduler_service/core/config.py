"""The scheduler's limits."""

from collections.abc import Mapping
from dataclasses import dataclass, field

_COUNTS = (
    "num_blocks",
    "block_size",
    "max_running",
    "max_step_tokens",
    "max_in_flight",
    "num_stages",
    "max_queued_requests",
)


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one model's scheduler.

    `max_running` caps sequences that hold blocks, `max_step_tokens` the tokens of one step,
    `max_queued_requests` the sequences that may wait, `max_queued_tokens` their prompt tokens.
    With more than one pipeline stage, `num_stages`, a sequence has at most one step in flight.
    A waiting sequence gains one of effective priority every `ageing_s` seconds. `tenant_weights`
    are shares of the device; a tenant that is not named has 1. Running sequences have at most
    `max_running_adapters` different adapters; None for any number.
    """

    num_blocks: int
    block_size: int
    max_running: int
    max_step_tokens: int
    prefix_caching: bool = True
    max_in_flight: int = 2
    num_stages: int = 1
    max_queued_requests: int = 1024
    max_queued_tokens: int = 1_000_000
    ageing_s: float = 30.0
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    max_running_adapters: int | None = None

    def __post_init__(self) -> None:
        for name in (*_COUNTS, "max_queued_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.ageing_s <= 0:
            raise ValueError(f"ageing_s must be above 0, not {self.ageing_s}")
        for tenant, weight in self.tenant_weights.items():
            if not 0 < weight < float("inf"):
                raise ValueError(f"the weight of tenant {tenant!r} must be above 0, not {weight}")
        if self.max_step_tokens < self.max_running:
            raise ValueError(
                f"max_step_tokens ({self.max_step_tokens}) must be at least max_running ({self.max_running}), "
                "or running sequences starve"
            )
