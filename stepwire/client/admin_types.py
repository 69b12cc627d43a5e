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
    replica: int = 0


@dataclass(frozen=True, slots=True)
class ServerState:
    """How a scheduler stands with one of its `models`. `epoch` is 0, and `workers` are none, before those are ready."""

    model: Model
    epoch: int
    workers: tuple[WorkerState, ...]
    num_calls: int
    uptime_s: float
    models: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ProfileRow:
    """What one operator took itself in one part of all profiled steps; times in seconds."""

    part: str
    operator: str
    num_calls: int
    cpu_s: float
    device_s: float


@dataclass(frozen=True, slots=True)
class RankProfile:
    """What one rank's `num_steps` steps went to, the longest first."""

    num_steps: int
    rows: tuple[ProfileRow, ...]


@dataclass(frozen=True, slots=True)
class Profile:
    """A profile of every rank, and a timeline of all services: gzip-compressed JSON in Chrome's trace format."""

    ranks: tuple[RankProfile, ...]
    timeline: bytes


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter. `fingerprint` names its content; `num_bytes` over all workers; one that `is_leaving` is gone once
    its `num_requests` have ended."""

    name: str
    fingerprint: str
    path: str
    rank: int
    num_bytes: int
    num_requests: int
    is_leaving: bool
