"""The runtime as the worker service uses it: one call for each phase, then steps."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeVar

import torch

from loader.checkpoint import open_checkpoint
from loader.quantised.settle import settle
from loader.shares import RankPlace
from worker_service.kernels.native import Pool
from worker_service.runtime.allocator import allocator_report
from worker_service.runtime.device import (
    choose_dtype,
    choose_kv_dtype,
    choose_quantize,
    device_id,
    device_name,
    open_device,
    usable_cores,
)
from worker_service.runtime.dummy import decode_step, largest_lengths, num_blocks_of, prefill_step
from worker_service.runtime.errors import RuntimeFailure
from worker_service.runtime.executor import Executor
from worker_service.runtime.grammars import Preparation
from worker_service.runtime.group import GroupSettings, RankGroup
from worker_service.runtime.loaded_model import LoadedModel, load_model
from worker_service.runtime.loading import LoadJob, LoadPhases
from worker_service.runtime.memory import (
    MemoryBudget,
    MemorySettings,
    check_cache_fits,
    device_memory,
    explains_out_of_memory,
    peak_bytes,
    plan_cache,
)
from worker_service.runtime.model_adapters import AdapterSettings, ModelAdapters
from worker_service.runtime.native import native_pool
from worker_service.runtime.preload import check_before_load
from worker_service.runtime.profiling import StepProfiler
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
from worker_service.runtime.restart_store import RestartStore
from worker_service.runtime.runner import ModelRunner
from worker_service.runtime.sleep import Asleep, LoadSource, give_back
from worker_service.runtime.step import Sampling, StepInput, StepOutput, nobody_waits

T = TypeVar("T")

_ALONE = Meeting()
_BLOCK_SIZE = 16
# The costliest way to sample: everything on.
_FULL_SAMPLING = Sampling(
    temperature=1.0, top_k=2000, top_p=0.9, min_p=0.01, repetition_penalty=1.1, logprobs=1, prompt_logprobs=1
)
_LOWER_STEP = "lower max_num_batched_tokens or max_num_seqs"


class RuntimeSettings(MemorySettings, AdapterSettings, GroupSettings, Protocol):
    """What the runtime needs of the worker's settings."""

    @property
    def device(self) -> str: ...
    @property
    def threads(self) -> int | None: ...
    @property
    def native_kernels(self) -> bool: ...
    @property
    def cuda_graphs(self) -> bool: ...


class WorkerRuntime:
    """A device, a model, a cache and the sequences on it. All calls block and belong on one thread.

    Phases are only as strict as the state demands: the service above keeps their order, epochs and
    repeats. A call that lacks what an earlier phase makes raises RuntimeFailure "invalid".
    """

    def __init__(self, settings: RuntimeSettings, store: RestartStore | None = None) -> None:
        """With a `store`, packed weights are kept in it, and taken from it."""
        self._settings = settings
        self._store = store
        self._place = RankPlace()
        self.group = RankGroup(settings)
        self._device: torch.device | None = None
        self._pool: Pool | None = None
        self._loaded: LoadedModel | None = None
        self._executor: Executor | None = None
        self._runner: ModelRunner | None = None
        self._profiler: StepProfiler | None = None
        self._asleep: Asleep | None = None
        self._max_sequences = 0

    @property
    def num_sequences(self) -> int:
        """Sequences it knows. May be read from any thread."""
        runner = self._runner
        return 0 if runner is None else runner.num_sequences

    @property
    def cache_bytes(self) -> int:
        """Bytes of the KV tensors. May be read from any thread."""
        executor = self._executor
        return 0 if executor is None else executor.cache_bytes

    def init_device(self, place: RankPlace, meeting: Meeting = _ALONE) -> DeviceInfo:
        """Selects the device and the number of threads. Meets the other ranks where `meeting` says; where that does not
        say, rank 0 answers where they may.

        Raises RuntimeFailure "device_unavailable", "invalid", or "rendezvous_failed".
        """
        device = open_device(self._settings.device)
        num_threads = self._settings.threads or max(1, usable_cores() // self._settings.local_ranks)
        torch.set_num_threads(num_threads)
        if self._device not in (None, device):
            self.reset(Phase.STARTING)
        self._device, self._place = device, place
        if self._pool is None and device.type == "cpu" and self._settings.native_kernels:
            self._pool = native_pool(num_threads)
        rendezvous = self._meet(place, device, meeting)
        memory = device_memory(device)
        return DeviceInfo(
            str(device),
            device_name(device),
            memory.total_bytes,
            memory.free_bytes,
            rendezvous,
            device_id(device),
            MemoryBudget.of(self._settings).limit_bytes(device),
        )

    @property
    def collective_cost(self) -> CollectiveCost:
        """What collectives have cost so far. May be read from any thread."""
        return self.group.cost

    @property
    def allocator(self) -> AllocatorReport:
        """What the device's allocator has taken. May be read from any thread."""
        return allocator_report(self._device)

    def leave_group(self) -> None:
        """Ends what connects this rank with others: those that wait for it fail at once."""
        self.group.leave()

    def on_all_ranks(self, is_so: bool) -> bool:
        """Whether it is so on every rank of the group; all of them must ask."""
        return self.group.on_all_ranks(is_so)

    def _meet(self, place: RankPlace, device: torch.device, meeting: Meeting) -> str:
        if place.num_ranks == 1:
            return ""
        if not meeting.address:
            return self.group.bind(meeting.epoch) if place.rank == 0 else ""
        self.group.form(place, device, meeting, None if self._pool is None else self._pool.library)
        return meeting.address

    def load_model(
        self,
        path: Path,
        dtype: str,
        progress: Callable[[str, int, int], None],
        cancelled: Callable[[], bool],
        quantize: str = "auto",
        kv_cache_dtype: str = "auto",
    ) -> LoadSummary:
        """Loads this rank's shard in `dtype`, "auto" for what suits the device; `quantize` says what becomes of its
        weights (see `loader.quantised.settle`), and keys and values in its cache are rounded to `kv_cache_dtype`.

        `progress(phase, done_bytes, total_bytes)` is called often. Raises CheckpointError, LoadCancelled and
        RuntimeFailure "out_of_memory"; a model held before is kept only when headers tell that the new one cannot be
        loaded.
        """
        phases, device = LoadPhases(progress, cancelled), self._need_device()
        opened, wish, stored = open_checkpoint(path), choose_quantize(quantize), choose_kv_dtype(kv_cache_dtype)
        chosen = choose_dtype(dtype, opened.config.dtype, device)
        checkpoint, rounding = settle(opened, wish)
        job, held = LoadJob(checkpoint, self._place, chosen, device, rounding, stored), self._loaded
        if held is not None and held.job.makes_the_same(job):
            return held.summary(already_loaded=True, phases=phases)
        limit_bytes = MemoryBudget.of(self._settings).limit_bytes(device)
        check_before_load(checkpoint, self._place, chosen, device, limit_bytes, rounding)
        self.reset(Phase.INITIALISED)
        source = LoadSource(path, dtype, quantize, kv_cache_dtype, checkpoint.fingerprint)
        self._loaded = loaded = load_model(
            job, phases, source, settings=self._settings, group=self.group, store=self._store, pool=self._pool
        )
        return loaded.summary(already_loaded=False, phases=phases)

    def determine_available_memory(self, max_step_tokens: int, max_sequences: int) -> MemoryReport:
        """Runs the largest step once and answers what the KV cache may use. Drops a cache that is held.

        Raises RuntimeFailure "out_of_memory".
        """
        self._check_step_size(max_step_tokens, max_sequences)
        self.reset(Phase.LOADED)
        device, loaded = self._need_device(), self._need_model()
        longest = min(loaded.job.checkpoint.config.max_position_count, max_step_tokens)
        lengths = largest_lengths(max_step_tokens, max_sequences, longest)

        driver_bytes = 0

        def largest_step() -> None:
            nonlocal driver_bytes
            executor = loaded.engine.executor(num_blocks_of(lengths, _BLOCK_SIZE), _BLOCK_SIZE, longest)
            driver_bytes = executor.prepare_decodes(max_sequences)
            runner = ModelRunner(executor, max_model_len=longest)
            runner.execute(prefill_step(lengths, _BLOCK_SIZE, _FULL_SAMPLING))
            runner.drop_sequences()

        with (
            self.group.left_on_failure(),
            explains_out_of_memory(device, f"a step of {max_step_tokens} tokens", _LOWER_STEP),
        ):
            measured = peak_bytes(device, largest_step)
        # Its prompts have no earlier context; a step that has needs this much more.
        activation = measured + loaded.engine.context_bytes(loaded.job.checkpoint.config.max_position_count)
        budget = MemoryBudget.of(self._settings)
        activation += loaded.adapters.device_bytes + driver_bytes
        return plan_cache(device, budget, weight_bytes=loaded.weight_bytes, activation_bytes=activation)

    def initialize_cache(self, num_blocks: int, block_size: int, max_model_len: int) -> int:
        """Allocates the KV tensors and answers their bytes. Raises RuntimeFailure "out_of_memory" or "invalid"."""
        self._need_model()
        for name, value, high in (
            ("block_count", num_blocks, 2**31),
            ("block_size", block_size, 2**16),
            ("max_model_len", max_model_len, 2**24),
        ):
            if not 1 <= value <= high:
                raise RuntimeFailure("invalid", f"{name} {value} lies outside 1 to {high}", {"field": name})
        self.reset(Phase.LOADED)
        return self._make_cache(num_blocks, block_size, max_model_len)

    def _make_cache(self, num_blocks: int, block_size: int, max_model_len: int) -> int:
        loaded = self._need_model()
        check_cache_fits(self._need_device(), num_blocks * block_size * loaded.engine.kv_bytes_per_token)
        self._executor = loaded.engine.executor(num_blocks, block_size, max_model_len)
        self._runner = ModelRunner(
            self._executor,
            max_model_len=max_model_len,
            adapters=loaded.adapters.table,
            grammars=loaded.grammars,
        )
        return self._executor.cache_bytes

    def warm_up(self, max_step_tokens: int, max_sequences: int, progress: Callable[[int, int], None]) -> None:
        """Runs steps of the shapes to come. Drops all sequences. Raises RuntimeFailure "out_of_memory"."""
        self._check_step_size(max_step_tokens, max_sequences)
        runner, cache, device = self._need_runner(), self._need_executor(), self._need_device()
        batches = [1 << i for i in range(max_sequences.bit_length()) if 1 << i < max_sequences] + [max_sequences]
        plans = [[min(max_step_tokens, runner.max_model_len - 1)], *([1] * batch for batch in batches)]
        plans = [plan for plan in plans if plan[0] and num_blocks_of(plan, cache.block_size, 1) <= cache.num_blocks]
        progress(0, len(plans))
        with self.group.left_on_failure(), explains_out_of_memory(device, "the steps of a warm-up", _LOWER_STEP):
            cache.prepare_decodes(max_sequences)
            self._max_sequences = max_sequences
            for done, lengths in enumerate(plans, 1):
                runner.execute(prefill_step(lengths, cache.block_size, Sampling(), 1))
                runner.execute(decode_step(lengths, 0))
                runner.drop_sequences()
                progress(done, len(plans))

    def execute(self, step: StepInput, on_launch: Callable[[], None] = nobody_waits) -> StepOutput:
        """Executes a step, and calls `on_launch` before the forward pass.

        Raises StateMismatch, with nothing changed, when it disagrees with what is held; RuntimeFailure "out_of_memory"
        when the device runs out.
        """
        device = self._need_device()
        with self.group.left_on_failure(), explains_out_of_memory(device, f"step {step.step_id}", _LOWER_STEP):
            if self._profiler is None:
                return self._need_runner().execute(step, on_launch)
            with self._profiler.step():
                return self._need_runner().execute(step, on_launch)

    def start_profile(self, max_steps: int) -> None:
        """Profiles the next steps, at most so many. One that was begun before is dropped."""
        if self._profiler is not None:
            self._profiler.stop()
        self._profiler = StepProfiler(max_steps, self._need_device())

    def stop_profile(self) -> Profile:
        """Ends the profile and answers it. Raises RuntimeFailure "invalid" when none was begun."""
        profiler, self._profiler = self._profiler, None
        return _present(profiler, "a profile", "StartProfile").stop()

    def adapters(self) -> ModelAdapters:
        """The adapters of the model that it holds; gone with it."""
        return self._need_model().adapters

    def prepare_grammar(self, key: bytes, grammar: str, live_keys: Sequence[bytes], revision: int) -> Preparation:
        """See GrammarStore.prepare. From any thread: what is compiled for a model that goes meanwhile goes with it."""
        asleep = self._asleep
        grammars = self._need_model().grammars if asleep is None else asleep.grammars
        return grammars.prepare(key, grammar, live_keys, revision)

    def sleep(self, level: SleepLevel) -> None:
        """Gives back the KV tensors and, as `level` says, the weights. No sequence may be known."""
        device = self._need_device()
        if self._asleep is None:
            # In a call of its own: whatever names the cache or the weights here keeps them from being given back.
            self._asleep = self._remembered()
        self._runner = self._executor = None
        if level is SleepLevel.DROP_WEIGHTS:
            self._loaded = None
        elif self._loaded is not None:
            self._loaded.adapters.table.leave_device()
            self._loaded.engine.move_weights(torch.device("cpu"))
        give_back(device)

    def wake_up(self, cancelled: Callable[[], bool]) -> None:
        """Takes memory and weights again; sleeps on when it raises.

        Raises RuntimeFailure "out_of_memory", or "invalid" where the checkpoint has become another one; what
        `load_model` raises where the weights were dropped.
        """
        asleep, device = self._asleep, self._need_device()
        if asleep is None:
            return
        try:
            if self._loaded is None:
                self._load_again(asleep, cancelled)
            else:
                with explains_out_of_memory(device, "the weights", "end what holds it, or wake up later"):
                    self._loaded.engine.move_weights(device)
            self._make_cache(*asleep.sizes)
            if self._max_sequences:
                with explains_out_of_memory(device, "recorded steps", "end what holds it, or wake up later"):
                    self._need_executor().prepare_decodes(self._max_sequences)
        except BaseException:
            self._asleep = asleep
            raise
        self._asleep = None

    def _remembered(self) -> Asleep:
        """What to wake up to."""
        runner, executor, loaded = self._need_runner(), self._need_executor(), self._need_model()
        sizes = (executor.num_blocks, executor.block_size, runner.max_model_len)
        return Asleep(sizes, loaded.source, loaded.grammars)

    def _load_again(self, asleep: Asleep, cancelled: Callable[[], bool]) -> None:
        source = asleep.source
        # A reset on the way there must not end what sleeps.
        self._asleep = None
        summary = self.load_model(
            source.path, source.dtype, _nobody_watches, cancelled, source.quantize, source.kv_cache_dtype
        )
        loaded, self._loaded = self._need_model(), None
        loaded.grammars.close()
        source.check(summary.fingerprint)
        # What was compiled is of the tokenizer, and live requests count on it.
        self._loaded = replace(loaded, grammars=asleep.grammars)

    def reset(self, phase: Phase) -> None:
        """Goes back to an earlier phase, and gives back what later ones took."""
        asleep, self._asleep = self._asleep, None
        if asleep is not None and self._loaded is None:
            asleep.grammars.close()
        elif asleep is not None and self._loaded is not None and phase >= Phase.LOADED:
            self._loaded.engine.move_weights(self._need_device())
        if phase <= Phase.CACHED and self._runner is not None:
            self._runner.drop_sequences()
        if self._loaded is not None:
            self._loaded.grammars.begin_epoch()
        if phase <= Phase.LOADED:
            self._runner = self._executor = None
        if phase <= Phase.INITIALISED and self._loaded is not None:
            self._loaded.grammars.close()
            self._loaded = None
        if phase <= Phase.LOADED and self._device is not None and self._device.type == "cuda":
            torch.cuda.empty_cache()
        if phase <= Phase.STARTING:
            self._device = None

    def close(self) -> None:
        """Gives back everything, as the worker was told to stop: also weights that the default store keeps for it."""
        self.reset(Phase.STARTING)
        if self._store is not None:
            self._store.forget()

    @staticmethod
    def _check_step_size(max_step_tokens: int, max_sequences: int) -> None:
        for name, value in (("max_step_token_count", max_step_tokens), ("max_sequence_count", max_sequences)):
            if not 1 <= value <= 2**20:
                raise RuntimeFailure("invalid", f"{name} {value} lies outside 1 to {2**20}", {"field": name})

    def _need_device(self) -> torch.device:
        return _present(self._device, "a device", "InitDevice")

    def _need_model(self) -> LoadedModel:
        return _present(self._loaded, "a model", "LoadModel")

    def _need_executor(self) -> Executor:
        return _present(self._executor, "a KV cache", "InitializeCache")

    def _need_runner(self) -> ModelRunner:
        return _present(self._runner, "a KV cache", "InitializeCache")


def _nobody_watches(_phase: str, _done: int, _total: int) -> None:
    """What is told of the progress of a load that wakes up."""


def _present(value: T | None, what: str, call: str) -> T:
    if value is None:
        raise RuntimeFailure("invalid", f"the worker does not hold {what} yet; call {call} first")
    return value
