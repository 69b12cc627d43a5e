"""What the RPC layer needs of a worker's runtime."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from loader.shares import RankPlace
from worker_service.runtime.adapters import AdapterTable, HostAdapter
from worker_service.runtime.grammars import Preparation
from worker_service.runtime.report import (
    AllocatorReport,
    CollectiveCost,
    DeviceInfo,
    LoadSummary,
    Meeting,
    MemoryReport,
    Phase,
    Profile,
    SleepLevel,
)
from worker_service.runtime.step import StepInput, StepOutput


class AdapterReader(Protocol):
    """Reads adapters for one model; any thread may use it."""

    def read(self, path: Path) -> HostAdapter:
        """Blocks for as long as the storage takes. Raises CheckpointError, RuntimeFailure "limit"."""
        ...


class RuntimeAdapters(Protocol):
    """The adapters of one loaded model. Used on the device thread."""

    @property
    def table(self) -> AdapterTable: ...

    def reader(self) -> AdapterReader:
        """Raises RuntimeFailure "unsupported" where none are taken."""
        ...


class Runtime(Protocol):
    """A device with what it holds. Every call blocks and is made on the device thread; errors are typed:
    RuntimeFailure, CheckpointError, LoadCancelled, StateMismatch."""

    def init_device(self, place: RankPlace, meeting: Meeting) -> DeviceInfo:
        """Selects the device and this rank's place, and meets the other ranks or, as rank 0, says where."""
        ...

    def leave_group(self) -> None:
        """Ends what connects this rank with others, so that those that wait for it fail. Keeps everything else."""
        ...

    def on_all_ranks(self, is_so: bool) -> bool:
        """Whether it is so on every rank of the group; all of them must ask."""
        ...

    def load_model(
        self,
        path: Path,
        dtype: str,
        progress: Callable[[str, int, int], None],
        cancelled: Callable[[], bool],
        quantize: str = "auto",
        kv_cache_dtype: str = "auto",
    ) -> LoadSummary:
        """Loads this rank's shard. `progress(phase, done_bytes, total_bytes)` may be called very often."""
        ...

    def determine_available_memory(self, max_step_tokens: int, max_sequences: int) -> MemoryReport:
        """Measures the largest step."""
        ...

    def initialize_cache(self, num_blocks: int, block_size: int, max_model_len: int) -> int:
        """Allocates the KV tensors and returns their bytes."""
        ...

    def warm_up(self, max_step_tokens: int, max_sequences: int, progress: Callable[[int, int], None]) -> None:
        """Runs what would otherwise make first requests slow. `progress(done, total)`."""
        ...

    def execute(self, step: StepInput, on_launch: Callable[[], None]) -> StepOutput:
        """Executes a step, and calls `on_launch` when the device is at work.

        Raises StateMismatch, with nothing changed, for one that disagrees with what is held.
        """
        ...

    def start_profile(self, max_steps: int) -> None:
        """Profiles the next steps, at most so many; a profile that goes on is dropped."""
        ...

    def stop_profile(self) -> Profile:
        """Ends the profile and answers it."""
        ...

    def adapters(self) -> RuntimeAdapters:
        """Those of the model that is loaded; gone with it."""
        ...

    def prepare_grammar(self, key: bytes, grammar: str, live_keys: Sequence[bytes], revision: int) -> Preparation:
        """Compiles a grammar unless it is held; see GrammarStore.prepare. From any thread."""
        ...

    def sleep(self, level: SleepLevel) -> None:
        """Gives back the device's memory."""
        ...

    def wake_up(self, cancelled: Callable[[], bool]) -> None:
        """Takes it again; sleeps on when it raises."""
        ...

    def reset(self, phase: Phase) -> None:
        """Goes back to an earlier phase and gives back what later ones took."""
        ...

    def close(self) -> None:
        """Gives back everything, because the worker was told to stop. The last call."""
        ...

    @property
    def collective_cost(self) -> CollectiveCost:
        """What collectives have cost so far. May be read from any thread."""
        ...

    @property
    def allocator(self) -> AllocatorReport:
        """What the device's allocator has taken. May be read from any thread."""
        ...

    @property
    def num_sequences(self) -> int:
        """Sequences known. May be read from any thread."""
        ...
