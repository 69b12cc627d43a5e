"""What the runtime reports of itself: plain values between rpc/ and the runtime."""

from dataclasses import dataclass
from enum import IntEnum


class Phase(IntEnum):
    """Where a worker stands; the numbers are those of worker.proto."""

    STARTING = 1
    INITIALISED = 2
    LOADED = 3
    CACHED = 4
    READY = 5


@dataclass(frozen=True, slots=True)
class Meeting:
    """The epoch in which the ranks of a group meet, and where: host:port as rank 0 says, "" where it is to say so."""

    epoch: int = 0
    address: str = ""


@dataclass(frozen=True, slots=True)
class AllocatorReport:
    """Bytes that an allocator has taken from the system, and those of them that are in use: the rest is cached, or
    lies in pieces between what is used. Both 0 where nothing tells."""

    reserved_bytes: int = 0
    used_bytes: int = 0


@dataclass(slots=True)
class CollectiveCost:
    """What a rank has put into collectives, and how long it was in them, waiting for others included."""

    num_calls: int = 0
    num_bytes: int = 0
    duration_ns: int = 0


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """The device. On a CPU the memory is what this process's control group allows. Bytes.

    `rendezvous` is where the ranks of the group meet; "" for a group of one. `device_id` is alike for all who share the
    device, "" where nobody can; `memory_limit_bytes` is what this process may use of it.
    """

    device: str
    device_name: str
    total_memory_bytes: int
    free_memory_bytes: int
    rendezvous: str = ""
    device_id: str = ""
    memory_limit_bytes: int = 0


class SleepLevel(IntEnum):
    """What a worker that sleeps has given back; the numbers are those of worker.proto."""

    AWAKE = 0
    KEEP_WEIGHTS = 1
    DROP_WEIGHTS = 2


@dataclass(frozen=True, slots=True)
class LoadPhase:
    """A part of a load; see LoadPhase in worker.proto."""

    name: str
    duration_ns: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class LoadSummary:
    """What was loaded; see LoadSummary in worker.proto. `begin_unix_ns` is when the load began; 0 for none."""

    fingerprint: str
    architecture: str
    weight_bytes: int
    dtype: str
    kv_bytes_per_token: int
    vocab_size: int
    max_position_count: int
    already_loaded: bool
    duration_ns: int
    phases: tuple[LoadPhase, ...] = ()
    mapped_bytes: int = 0
    begin_unix_ns: int = 0
    num_adapter_slots: int = 0


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """What the KV cache may use; see DetermineAvailableMemoryResponse in worker.proto. Bytes."""

    available_bytes: int
    weight_bytes: int
    activation_bytes: int
    limit_bytes: int


@dataclass(frozen=True, slots=True)
class ProfileRow:
    """What one operator took in one part of all profiled steps: on the CPU, and on the device. See worker.proto."""

    part: str
    operator: str
    num_calls: int
    cpu_ns: int
    device_ns: int


@dataclass(frozen=True, slots=True)
class Profile:
    """A profile of `num_steps` steps; `trace` is gzip-compressed JSON in Chrome's trace format."""

    num_steps: int
    rows: tuple[ProfileRow, ...]
    trace: bytes
