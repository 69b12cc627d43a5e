"""The values that operators give and get. None of them is a wire type."""

from dataclasses import dataclass

from stepwire.client.types import Model


@dataclass(frozen=True, slots=True)
class WorkerState:
    """One worker, as the scheduler knows it; `silent_s`: seconds since it was last heard of."""

    rank: int
    address: str
    host: str
    process_id: int
    silent_s: float


@dataclass(frozen=True, slots=True)
class ServerState:
    """How a scheduler stands. `epoch` is 0, and `workers` are none, before the workers are ready."""

    model: Model
    epoch: int
    workers: tuple[WorkerState, ...]
    num_calls: int
    uptime_s: float
