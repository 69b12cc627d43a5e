"""A runtime without a device: everything but the arithmetic. Imports no torch.

It reads a checkpoint's headers and tokenizer, checks every step as the real one does, and answers
with tokens that are a function of (seed, sequence index, output position) alone, and of what the form of
the output allows. A step takes the
time that stepwire.simulation.cost says, as wall time. It is for what lies around a model: the
protocol, recovery, the door under load, sizes that no machine at hand has.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from loader.checkpoint import Checkpoint, open_checkpoint
from loader.errors import LoadCancelled
from loader.shares import RankPlace
from loader.tokenizer import load_tokenizer
from stepwire.simulation.cost import CostModel, Hardware, ModelShape
from stepwire.simulation.shapes import shape_of_checkpoint
from worker_service.runtime.adapters import NoAdapters
from worker_service.runtime.errors import RuntimeFailure
from worker_service.runtime.grammars import GrammarStore, Preparation
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
from worker_service.runtime.sequences import SequenceTable
from worker_service.runtime.sim_runner import SimRunner
from worker_service.runtime.step import (
    StepInput,
    StepOutput,
    nobody_waits,
)

T = TypeVar("T")
IntArray = NDArray[np.int64]

_MASK_THREADS = 2
_ALONE = Meeting()
_NOWHERE = "nowhere:1"
_LOWER_KV = "raise sim_memory_bytes, memory_fraction or memory_limit_bytes, or use a smaller model"


class SimSettings(Protocol):
    """What this runtime needs of the worker's settings. A rate of 0 is without limit."""

    @property
    def memory_fraction(self) -> float: ...
    @property
    def memory_limit_bytes(self) -> int | None: ...
    @property
    def kv_cache_bytes(self) -> int | None: ...
    @property
    def sim_compute_flops(self) -> float: ...
    @property
    def sim_bandwidth_bytes(self) -> float: ...
    @property
    def sim_latency_s(self) -> float: ...
    @property
    def sim_memory_bytes(self) -> int: ...
    @property
    def sim_fatal_token(self) -> int | None: ...


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A model as far as it is simulated. `choices` [n] are the token ids that may be sampled."""

    checkpoint: Checkpoint
    dtype: str
    shape: ModelShape
    choices: IntArray
    grammars: GrammarStore


class SimRuntime:
    """Implements worker_service.rpc.ports.Runtime. All calls block and belong on one thread.

    `sleep(seconds)` spends the time of a step; tests give their own.
    """

    def __init__(self, settings: SimSettings, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self._settings = settings
        self._sleep = sleep
        self._hardware = Hardware(
            "sim",
            settings.sim_compute_flops,
            settings.sim_bandwidth_bytes,
            settings.sim_latency_s,
            settings.sim_memory_bytes,
        )
        self._loaded: _Loaded | None = None
        self._runner: SimRunner | None = None

    @property
    def num_sequences(self) -> int:
        """Sequences it knows. May be read from any thread."""
        runner = self._runner
        return 0 if runner is None else runner.num_sequences

    def init_device(self, place: RankPlace, meeting: Meeting = _ALONE) -> DeviceInfo:  # noqa: ARG002
        """Takes a place. The ranks of a group need not meet: each draws the same tokens, and takes the time of all."""
        memory = self._hardware.memory_bytes
        return DeviceInfo("sim", "simulated device", memory, memory, _NOWHERE if place.num_ranks > 1 else "")

    @property
    def collective_cost(self) -> CollectiveCost:
        """None."""
        return CollectiveCost()

    @property
    def allocator(self) -> AllocatorReport:
        """Nothing: it allocates none."""
        return AllocatorReport()

    def leave_group(self) -> None:
        """Nothing connects the ranks."""

    def on_all_ranks(self, is_so: bool) -> bool:
        """What it is here: what it is asked for, each rank can do or leave by itself."""
        return is_so

    def load_model(
        self,
        path: Path,
        dtype: str,
        progress: Callable[[str, int, int], None],
        cancelled: Callable[[], bool],
        quantize: str = "auto",
        kv_cache_dtype: str = "auto",
    ) -> LoadSummary:
        """Reads headers and tokenizer. Raises CheckpointError, LoadCancelled, and RuntimeFailure "out_of_memory", or
        "unsupported" for weights or a cache that are to be quantised: the cost model knows none."""
        begin = time.perf_counter_ns()
        progress("inspect", 0, 0)
        if quantize not in ("auto", "none"):
            raise RuntimeFailure("unsupported", f"a simulated device does not quantize to {quantize}; leave it out")
        if kv_cache_dtype != "auto":
            message = f"a simulated device has no KV cache of {kv_cache_dtype}; leave kv_cache_dtype out"
            raise RuntimeFailure("unsupported", message)
        checkpoint = open_checkpoint(path)
        chosen = checkpoint.config.dtype if dtype == "auto" else dtype
        held = self._loaded
        if held is not None and held.checkpoint.fingerprint == checkpoint.fingerprint and held.dtype == chosen:
            return self._summary(held, already_loaded=True, begin=begin)
        self.reset(Phase.INITIALISED)
        shape = shape_of_checkpoint(checkpoint, chosen)
        self._check_fits(shape.weight_bytes, f"the weights of {path}")
        choices = _visible_token_ids(checkpoint)
        if cancelled():
            raise LoadCancelled
        progress("attach", shape.weight_bytes, shape.weight_bytes)
        grammars = GrammarStore.of_checkpoint(checkpoint, num_threads=_MASK_THREADS)
        self._loaded = loaded = _Loaded(checkpoint, chosen, shape, choices, grammars)
        return self._summary(loaded, already_loaded=False, begin=begin)

    def determine_available_memory(self, max_step_tokens: int, max_sequences: int) -> MemoryReport:
        """What is left of sim_memory_bytes, or kv_cache_bytes if set. Raises RuntimeFailure "out_of_memory"."""
        shape = self._need_model().shape
        self.reset(Phase.LOADED)
        # Hidden states and the MLP's, four bytes each, of all tokens, and logits of all sequences.
        activation = 4 * (6 * max_step_tokens * shape.hidden_size + max_sequences * shape.vocab_size)
        share, hard = (
            int(self._hardware.memory_bytes * self._settings.memory_fraction),
            self._settings.memory_limit_bytes,
        )
        limit = share if hard is None else min(share, hard)
        room = limit - shape.weight_bytes - activation
        wanted = self._settings.kv_cache_bytes
        if room < (wanted or 1):
            raise RuntimeFailure(
                "out_of_memory",
                f"the simulated device may use {limit} bytes, of which weights take {shape.weight_bytes} and the "
                f"largest step {activation}: too few are left for the KV cache; {_LOWER_KV}",
                {"limit_bytes": str(limit), "weight_bytes": str(shape.weight_bytes), "needed_bytes": str(wanted or 1)},
            )
        return MemoryReport(room if wanted is None else wanted, shape.weight_bytes, activation, limit)

    def initialize_cache(self, num_blocks: int, block_size: int, max_model_len: int) -> int:
        """Counts the KV tensors' bytes, and allocates nothing. Raises RuntimeFailure "out_of_memory"."""
        loaded = self._need_model()
        self.reset(Phase.LOADED)
        num_bytes = num_blocks * block_size * loaded.shape.kv_bytes_per_token
        self._check_fits(loaded.shape.weight_bytes + num_bytes, "weights and KV cache")
        table = SequenceTable(
            vocab_size=loaded.shape.vocab_size,
            max_model_len=max_model_len,
            num_blocks=num_blocks,
            block_size=block_size,
        )
        cost = CostModel(loaded.shape, self._hardware)
        self._runner = SimRunner(table, loaded.choices, loaded.grammars, cost, self._sleep)
        return num_bytes

    def warm_up(self, max_step_tokens: int, max_sequences: int, progress: Callable[[int, int], None]) -> None:
        """Nothing is cold. Drops all sequences."""
        del max_step_tokens, max_sequences
        self._need_runner().drop_sequences()
        progress(1, 1)

    def execute(self, step: StepInput, on_launch: Callable[[], None] = nobody_waits) -> StepOutput:
        """Executes a step. Raises StateMismatch, with nothing changed, when it disagrees with what is held."""
        fatal = self._settings.sim_fatal_token
        if fatal is not None and any(fatal in new.token_ids for new in step.new_sequences):
            os.abort()
        return self._need_runner().execute(step, on_launch)

    def start_profile(self, max_steps: int) -> None:  # noqa: ARG002
        """Raises RuntimeFailure "unsupported": nothing is computed that could be profiled."""
        raise RuntimeFailure("unsupported", "a simulated device computes nothing: profile a worker of a real one")

    def stop_profile(self) -> Profile:
        """As `start_profile`."""
        raise RuntimeFailure("invalid", "no profile was begun; call StartProfile first")

    def adapters(self) -> NoAdapters:
        """None are taken."""
        return NoAdapters("a simulated device takes no adapters: its answers would be the same")

    def prepare_grammar(self, key: bytes, grammar: str, live_keys: Sequence[bytes], revision: int) -> Preparation:
        """See GrammarStore.prepare. From any thread."""
        return self._need_model().grammars.prepare(key, grammar, live_keys, revision)

    def sleep(self, level: SleepLevel) -> None:
        """Drops the sequences: there is no memory to give back. Forgets no weights, since it reads none."""
        del level
        self._need_runner().drop_sequences()

    def wake_up(self, cancelled: Callable[[], bool]) -> None:
        """Everything is there."""

    def reset(self, phase: Phase) -> None:
        """Goes back to an earlier phase, and drops what later ones took."""
        if phase <= Phase.CACHED and self._runner is not None:
            self._runner.drop_sequences()
        if self._loaded is not None:
            self._loaded.grammars.begin_epoch()
        if phase <= Phase.LOADED:
            self._runner = None
        if phase <= Phase.INITIALISED and self._loaded is not None:
            self._loaded.grammars.close()
            self._loaded = None

    def close(self) -> None:
        """Drops everything."""
        self.reset(Phase.STARTING)

    def _summary(self, loaded: _Loaded, *, already_loaded: bool, begin: int) -> LoadSummary:
        config = loaded.checkpoint.config
        return LoadSummary(
            fingerprint=loaded.checkpoint.fingerprint,
            architecture=config.architecture,
            weight_bytes=loaded.shape.weight_bytes,
            dtype=loaded.dtype,
            kv_bytes_per_token=loaded.shape.kv_bytes_per_token,
            vocab_size=config.vocab_size,
            max_position_count=config.max_position_count,
            already_loaded=already_loaded,
            duration_ns=time.perf_counter_ns() - begin,
        )

    def _check_fits(self, needed: int, what: str) -> None:
        there = self._hardware.memory_bytes
        if needed > there:
            raise RuntimeFailure(
                "out_of_memory",
                f"{what} need {needed} bytes and the simulated device has {there}; {_LOWER_KV}",
                {"needed_bytes": str(needed), "free_bytes": str(there)},
            )

    def _need_model(self) -> _Loaded:
        return _present(self._loaded, "a model", "LoadModel")

    def _need_runner(self) -> "SimRunner":
        return _present(self._runner, "a KV cache", "InitializeCache")


def _visible_token_ids(checkpoint: Checkpoint) -> IntArray:
    """The ids [n] that have text: those of the model that the tokenizer knows, without special ones and ends."""
    tokenizer = load_tokenizer(checkpoint)
    hidden = tokenizer.special_token_ids | set(checkpoint.config.eos_token_ids)
    num = min(checkpoint.config.vocab_size, tokenizer.vocab_size)
    choices = np.array([token_id for token_id in range(num) if token_id not in hidden], np.int64)
    if not len(choices):
        raise RuntimeFailure("unsupported", f"the tokenizer of {checkpoint.path} has special tokens only")
    return choices


def _present(value: T | None, what: str, call: str) -> T:
    if value is None:
        raise RuntimeFailure("invalid", f"the worker does not hold {what} yet; call {call} first")
    return value
