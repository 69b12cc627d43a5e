"""What the engine needs of a worker, whatever carries it."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from scheduler_service.core.plan import StepPlan, StepResult
from scheduler_service.engine.grammars import PreparedGrammar


class Phase(IntEnum):
    """Where a worker stands in its life; later is greater."""

    UNKNOWN = 0
    STARTING = 1
    INITIALISED = 2
    LOADED = 3
    CACHED = 4
    READY = 5


class SleepLevel(IntEnum):
    """What workers that sleep have given back; a greater one is deeper."""

    AWAKE = 0
    KEEP_WEIGHTS = 1
    DROP_WEIGHTS = 2


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """How a worker says it stands. `num_blocks`, `block_size` and `max_model_len` are its KV cache's, 0 without one."""

    phase: Phase
    epoch: int
    last_step_id: int
    fingerprint: str
    host: str
    process_id: int
    num_blocks: int = 0
    block_size: int = 0
    max_model_len: int = 0
    scheduler_id: str = ""


@dataclass(frozen=True, slots=True)
class Place:
    """A rank's place in its group."""

    tensor_rank: int
    tensor_parallel_size: int
    pipeline_rank: int
    pipeline_parallel_size: int

    @classmethod
    def of(cls, rank: int, tensor_parallel_size: int, pipeline_parallel_size: int) -> "Place":
        """The place of a rank: ranks count stage by stage."""
        stage, tensor_rank = divmod(rank, tensor_parallel_size)
        return cls(tensor_rank, tensor_parallel_size, stage, pipeline_parallel_size)

    @property
    def is_output(self) -> bool:
        """Whether this rank answers with tokens."""
        return self.tensor_rank == 0 and self.pipeline_rank == self.pipeline_parallel_size - 1


@dataclass(frozen=True, slots=True)
class Device:
    """A worker's device; sizes in bytes. `rendezvous` is where the ranks of its group meet, "" for a group of one.

    `device_id` is alike for all workers of a host that share the device, "" where nobody can; `memory_limit_bytes` is
    what the worker may use of it, 0 where it does not say.
    """

    device: str
    device_name: str
    total_memory_bytes: int
    free_memory_bytes: int
    rendezvous: str = ""
    device_id: str = ""
    memory_limit_bytes: int = 0


@dataclass(frozen=True, slots=True)
class LoadPhase:
    """A part of a load, in the order of time and without gaps."""

    name: str
    duration_s: float
    num_bytes: int


@dataclass(frozen=True, slots=True)
class LoadSummary:
    """What a rank has loaded. Of its weights, `mapped_bytes` are mapped from the restart store."""

    fingerprint: str
    architecture: str
    weight_bytes: int
    dtype: str
    kv_bytes_per_token: int
    vocab_size: int
    max_position_count: int
    already_loaded: bool
    duration_s: float
    phases: tuple[LoadPhase, ...] = ()
    mapped_bytes: int = 0
    num_adapter_slots: int = 0


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """How far the phase `stage` of a load is, in bytes; the last one of a load has the summary."""

    stage: str
    loaded_bytes: int
    total_bytes: int
    summary: LoadSummary | None


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """What the KV cache may use, in bytes."""

    available_bytes: int
    weight_bytes: int
    activation_bytes: int
    limit_bytes: int


@dataclass(frozen=True, slots=True)
class StepTimings:
    """Where a step's time went in the worker. `answered_unix_ns` is 0 from one that does not tell it."""

    start_unix_ns: int
    queue_ns: int
    prepare_ns: int
    forward_ns: int
    sample_ns: int
    answered_unix_ns: int = 0
    total_forward_ns: int = 0

    @property
    def busy_ns(self) -> int:
        """From its start to its last token."""
        return self.prepare_ns + self.forward_ns + self.sample_ns


@dataclass(frozen=True, slots=True)
class ProfileRow:
    """What one operator took itself in one part of all profiled steps; see ProfileRow in worker.proto."""

    part: str
    operator: str
    num_calls: int
    cpu_ns: int
    device_ns: int


@dataclass(frozen=True, slots=True)
class RankProfile:
    """A rank's profile; `trace` is gzip-compressed JSON in Chrome's trace format."""

    num_steps: int
    rows: tuple[ProfileRow, ...]
    trace: bytes


class StepStream(Protocol):
    """The stream of steps to one worker. Every method raises StepwireError when the stream is broken."""

    async def send(self, step: bytes) -> None:
        """Sends a step, as the worker encodes it; waits while the worker's side of the connection is full."""

    async def receive(self) -> tuple[StepResult, StepTimings]:
        """The next result, in the order of the steps. A rank that is not the output of its group says now and then
        which step it has executed, and nothing else."""

    def cancel(self) -> None:
        """Ends the stream."""


@dataclass(frozen=True, slots=True)
class HeldAdapter:
    """An adapter that a worker holds; `num_bytes` of its own part."""

    fingerprint: str
    path: str
    rank: int
    num_bytes: int


class AdapterPort(Protocol):
    """The adapters of one worker. Every method raises StepwireError when the call fails."""

    async def add(self, epoch: int, path: str, fingerprint: str) -> HeldAdapter:
        """Has it hold an adapter, which must have that fingerprint unless it is empty."""

    async def remove(self, epoch: int, fingerprint: str) -> None:
        """Has it forget an adapter, if it holds it."""

    async def list(self) -> list[HeldAdapter]:
        """Those that it holds."""


class WorkerPort(Protocol):
    """One worker. Every method raises StepwireError when the call fails."""

    @property
    def address(self) -> str:
        """Where it is now, host:port."""

    @property
    def adapters(self) -> AdapterPort:
        """Its adapters."""

    async def move(self, address: str) -> None:
        """From now on it is found elsewhere. No call may be under way."""

    async def get_status(self, *, timeout_s: float) -> WorkerStatus:
        """How it stands."""

    async def init_device(self, epoch: int, scheduler_id: str, place: Place, rendezvous: str) -> Device:
        """Takes it into an epoch, on a device. The ranks of a group meet at `rendezvous`; rank 0 says where when it is
        called with ""."""

    def load_model(
        self, epoch: int, path: str, dtype: str, quantize: str, kv_cache_dtype: str
    ) -> AsyncIterator[LoadProgress]:
        """Loads its shard of the model; `quantize` says what becomes of its weights, and its cache is to hold values
        of `kv_cache_dtype`, of the model's own type where that is "auto"."""

    async def determine_available_memory(self, epoch: int, max_step_tokens: int, max_sequences: int) -> MemoryReport:
        """Measures what the KV cache may use."""

    async def initialize_cache(self, epoch: int, num_blocks: int, block_size: int, max_model_len: int) -> int:
        """Allocates the KV tensors; answers their bytes."""

    def warm_up(
        self, epoch: int, max_step_tokens: int, max_sequences: int, *, skip: bool
    ) -> AsyncIterator[tuple[int, int]]:
        """Runs what would make the first requests slow, unless they cannot wait; yields (parts done, parts in all)."""

    async def sleep(self, epoch: int, level: SleepLevel) -> None:
        """Gives its device's memory back; no sequence may be known, and no step in flight."""

    async def wake_up(self, epoch: int) -> None:
        """Takes the memory again."""

    async def reset(self, epoch: int, scheduler_id: str, phase: Phase) -> Phase:
        """Takes it back to an earlier phase and into a new epoch."""

    async def start_profile(self, epoch: int, max_steps: int) -> None:
        """Profiles the steps to come, at most so many."""

    async def stop_profile(self, epoch: int) -> RankProfile:
        """Ends the profile and answers it."""

    async def prepare_grammar(self, epoch: int, prepared: PreparedGrammar) -> None:
        """Makes a grammar known, for sequences of later steps; answers when they may come."""

    def encode_step(self, plan: StepPlan, epoch: int) -> bytes:
        """A step as it goes over the wire: the same for all workers of an epoch."""

    async def open_stream(self, epoch: int) -> StepStream:
        """Opens the step stream of an epoch in which no step was sent."""

    async def close(self) -> None:
        """Closes the connection."""
