"""A worker's runtime without a device: deterministic, torch-free, and told by its test when to wait or to fail."""

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loader.errors import LoadCancelled
from worker_service.runtime.adapters import AdapterTable, HostAdapter, PackedAdapter
from worker_service.runtime.grammars import Preparation
from worker_service.runtime.report import (
    AllocatorReport,
    CollectiveCost,
    DeviceInfo,
    LoadPhase,
    LoadSummary,
    Meeting,
    MemoryReport,
    Phase,
    Profile,
    ProfileRow,
    SleepLevel,
)
from worker_service.runtime.step import Logprobs, NewSequence, StateMismatch, StepInput, StepOutput, nobody_waits

VOCAB_SIZE = 1000
KV_BYTES_PER_TOKEN = 64
LOAD_PHASES = (LoadPhase("map", 1_000_000, 0), LoadPhase("read", 4_000_000, 1000), LoadPhase("map", 2_000_000, 1024))
LOAD_BEGIN_UNIX_NS = 1_800_000_000_000_000_000


@dataclass
class FakeSequence:
    """What the fake knows of a sequence."""

    new: NewSequence
    tokens: list[int]
    block_ids: list[int]
    num_computed: int = 0
    stopped: bool = False


class FakeAdapters:
    """Adapters of a fake runtime: any path holds one whose content is its name. `read_adapter` can wait and fail."""

    def __init__(self, runtime: "FakeRuntime") -> None:
        self._runtime = runtime
        self.table = AdapterTable(lambda packed: packed.weights, num_slots=2, max_bytes=30)

    def reader(self) -> "FakeAdapters":
        self._runtime._begin("adapter_reader")
        return self

    def read(self, path: Path) -> HostAdapter:
        self._runtime._begin("read_adapter")
        return HostAdapter(adapter_fingerprint(path.name), str(path), 4, PackedAdapter(path.name, 10))


def adapter_fingerprint(content: str) -> str:
    """As hex SHA-256."""
    return hashlib.sha256(content.encode()).hexdigest()


@dataclass
class FakeRuntime:
    """Implements worker_service.rpc.ports.Runtime.

    `gates[name]` holds up the call of that name until it is set; `failures[name]` is raised by it,
    once. `entered[name]` is set when the call begins. `calls` are the names of all calls, in order.
    """

    gates: dict[str, threading.Event] = field(default_factory=dict)
    failures: dict[str, BaseException] = field(default_factory=dict)
    entered: dict[str, threading.Event] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    executed: list[int] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)
    sequences: dict[int, FakeSequence] = field(default_factory=dict)
    grammars: dict[bytes, str] = field(default_factory=dict)
    total_bytes: int = 1000
    place: Any = None
    meetings: list[Meeting] = field(default_factory=list)
    num_left: int = 0
    others_are_warm: bool = True
    collective_cost: CollectiveCost = field(default_factory=CollectiveCost)
    allocator: AllocatorReport = field(default_factory=lambda: AllocatorReport(400, 300))
    profiled: int = 0
    slept: list[SleepLevel] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._adapters = FakeAdapters(self)

    def adapters(self) -> FakeAdapters:
        return self._adapters

    @property
    def num_sequences(self) -> int:
        return len(self.sequences)

    def init_device(self, place: Any, meeting: Meeting) -> DeviceInfo:
        self._begin("init_device")
        self.place = place
        is_group = place.tensor_parallel_size * place.pipeline_parallel_size > 1
        self.meetings.append(meeting)
        rendezvous = (meeting.address or "fake:1") if is_group else ""
        return DeviceInfo("fake", "no device", 1 << 30, 1 << 29, rendezvous, "GPU-1", 1 << 28)

    def leave_group(self) -> None:
        self.num_left += 1

    def on_all_ranks(self, is_so: bool) -> bool:
        return is_so and self.others_are_warm

    def load_model(
        self,
        path: Path,
        dtype: str,
        progress: Callable[[str, int, int], None],
        cancelled: Callable[[], bool],
        quantize: str = "none",
        kv_cache_dtype: str = "auto",
    ) -> LoadSummary:
        progress("read", 0, self.total_bytes)
        self.calls.append("load_model")
        self.threads.add(threading.get_ident())
        progress("read", self.total_bytes // 2, self.total_bytes)
        if (entered := self.entered.get("load_model")) is not None:
            entered.set()
        gate = self.gates.get("load_model")
        while gate is not None and not gate.wait(0.005):
            if cancelled():
                raise LoadCancelled
        self._fail("load_model")
        progress("attach", self.total_bytes, self.total_bytes)
        resolved = "float32" if dtype == "auto" else dtype
        return LoadSummary(
            fingerprint=fingerprint_of(path),
            architecture="FakeForCausalLM",
            weight_bytes=4096,
            dtype=resolved,
            kv_bytes_per_token=KV_BYTES_PER_TOKEN,
            vocab_size=VOCAB_SIZE,
            max_position_count=512,
            already_loaded=False,
            duration_ns=7_000_000,
            phases=LOAD_PHASES,
            mapped_bytes=1024,
            begin_unix_ns=LOAD_BEGIN_UNIX_NS,
        )

    def determine_available_memory(self, max_step_tokens: int, max_sequences: int) -> MemoryReport:
        self._begin("determine_available_memory")
        return MemoryReport(1 << 20, 4096, max_step_tokens * 8, 1 << 21)

    def initialize_cache(self, num_blocks: int, block_size: int, max_model_len: int) -> int:
        self._begin("initialize_cache")
        return num_blocks * block_size * KV_BYTES_PER_TOKEN

    def warm_up(self, max_step_tokens: int, max_sequences: int, progress: Callable[[int, int], None]) -> None:
        progress(1, 3)
        self._begin("warm_up")
        progress(3, 3)

    def start_profile(self, max_steps: int) -> None:
        self._begin("start_profile")
        self.profiled = max_steps

    def stop_profile(self) -> Profile:
        self._begin("stop_profile")
        return Profile(2, (ProfileRow("layer 0", "aten::mm", 4, 1000, 2000),), b"t" * (1 << 20) + b"race")

    def sleep(self, level: SleepLevel) -> None:
        self._begin("sleep")
        self.slept.append(level)

    def wake_up(self, cancelled: Callable[[], bool]) -> None:
        self.calls.append("wake_up")
        gate = self.gates.get("wake_up")
        while gate is not None and not gate.wait(0.005):
            if cancelled():
                raise LoadCancelled
        self._fail("wake_up")

    def reset(self, phase: Phase) -> None:
        self._begin("reset")
        self.sequences.clear()

    def close(self) -> None:
        self._begin("close")

    def prepare_grammar(self, key: bytes, grammar: str, live_keys: Sequence[bytes], revision: int) -> Preparation:
        self._begin("prepare_grammar")
        already_held = key in self.grammars
        self.grammars[key] = grammar
        return Preparation(already_held, 1000)

    def execute(self, step: StepInput, on_launch: Callable[[], None] = nobody_waits) -> StepOutput:
        self._begin("execute")
        on_launch()
        output = StepOutput(step.step_id, start_unix_ns=time.time_ns(), prepare_ns=1000, forward_ns=2000, sample_ns=500)
        for sequence_id in (*step.finished_sequence_ids, *step.preempted_sequence_ids):
            if sequence_id not in self.sequences:
                raise StateMismatch(f"sequence {sequence_id} is not known")
        for sequence_id in (*step.finished_sequence_ids, *step.preempted_sequence_ids):
            del self.sequences[sequence_id]
        for new in step.new_sequences:
            self.sequences[new.sequence_id] = FakeSequence(new, list(new.token_ids), list(new.block_ids))
        for index, sequence_id in enumerate(step.sequence_ids):
            self._advance(step, index, sequence_id, output)
        self.executed.append(step.step_id)
        return output

    def _advance(self, step: StepInput, index: int, sequence_id: int, output: StepOutput) -> None:
        sequence = self.sequences.get(sequence_id)
        if sequence is None:
            raise StateMismatch(f"sequence {sequence_id} is not known")
        if any(new.sequence_id == sequence_id for new in step.new_sequences):
            sequence.num_computed = step.computed_token_counts[index]
        if sequence.stopped:
            return
        if sequence.num_computed != step.computed_token_counts[index]:
            raise StateMismatch(
                f"sequence {sequence_id} has {sequence.num_computed} computed tokens, not "
                f"{step.computed_token_counts[index]}"
            )
        sequence.num_computed += step.scheduled_token_counts[index]
        if sequence.num_computed < len(sequence.tokens):
            return
        token = next_token(sequence.tokens)
        sequence.tokens.append(token)
        output.sequence_ids.append(sequence_id)
        output.token_ids.append(token)
        sampling = sequence.new.sampling
        if sampling.logprobs is not None:
            top = [((token + i) % VOCAB_SIZE, -1.0 - i) for i in range(sampling.logprobs)]
            output.logprobs[sequence_id] = Logprobs(token, -1.0, top)
        if token in sampling.stop_token_ids:
            sequence.stopped = True
            output.stopped_sequence_ids.append(sequence_id)

    def _begin(self, name: str) -> None:
        self.calls.append(name)
        self.threads.add(threading.get_ident())
        if (entered := self.entered.get(name)) is not None:
            entered.set()
        if (gate := self.gates.get(name)) is not None and not gate.wait(30):
            raise TimeoutError(f"the gate of {name} was never opened")
        self._fail(name)

    def _fail(self, name: str) -> None:
        if (failure := self.failures.pop(name, None)) is not None:
            raise failure


def fingerprint_of(path: Path) -> str:
    """The fake's fingerprint: of the file's name alone."""
    return f"fingerprint of {path.name}"


def next_token(tokens: list[int]) -> int:
    """The token that follows, as a pure function of those before."""
    return (sum(tokens) * 31 + len(tokens) * 7) % VOCAB_SIZE
