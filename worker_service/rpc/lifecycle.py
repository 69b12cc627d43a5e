"""Takes a worker through its phases: one change at a time, each finished once it is begun."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import structlog
from opentelemetry.trace import Tracer

from loader.shares import RankPlace
from stepwire.rpc.errors import StepwireError
from stepwire.telemetry.metrics import Metrics
from worker_service.device_thread import DeviceStopped, DeviceThread
from worker_service.rpc.adapters import AdapterCalls
from worker_service.rpc.guard import stale_epoch
from worker_service.rpc.limits import StepLimits, check_grammar, check_number
from worker_service.rpc.metrics import WorkerMetrics
from worker_service.rpc.paths import ModelRoots
from worker_service.rpc.phase_limits import check_cache, check_cache_size, check_place, check_step_size, check_types
from worker_service.rpc.ports import Runtime
from worker_service.rpc.progress import LoadProgress, WarmUpProgress, load_errors, record_phases, seconds_of_phases
from worker_service.rpc.sleep import SleepCalls
from worker_service.rpc.spans import SequenceSpans
from worker_service.rpc.state import Cached, Loaded, Measured, Place, Warm, WorkerState
from worker_service.rpc.stream import StepSession
from worker_service.runtime.grammars import Preparation
from worker_service.runtime.report import DeviceInfo, LoadSummary, Meeting, MemoryReport, Phase, SleepLevel

T = TypeVar("T")

# No step lasts so long beyond the time after which a scheduler calls it hung.
DEVICE_BACK_S = 20.0

_log = structlog.stdlib.get_logger(__name__)


class Lifecycle:
    """The phases of one worker.

    A change that has begun goes on when its caller goes away, except a load, which stops; so what
    `state` says is what the runtime holds. Changes wait for each other. A call that begins a new
    epoch does not wait for a load of an old one: it ends it.

    Methods raise StepwireError (STALE_EPOCH, WRONG_PHASE, FIELD_*), and what the runtime raises.
    """

    def __init__(
        self,
        device: DeviceThread[Runtime],
        *,
        tracer: Tracer,
        roots: ModelRoots,
        fingerprint_of: Callable[[Path], str],
        on_phase: Callable[[Phase], Awaitable[None]],
        on_hang: Callable[[], None],
        metrics: Metrics,
    ) -> None:
        """`on_hang` is called when the device does not come back from what it does, so that a reset cannot be."""
        self.state = WorkerState()
        self._metrics = WorkerMetrics(metrics, self.state, lambda: device.runtime)
        self.session: StepSession | None = None
        self._device = device
        self._tracer = tracer
        self._roots = roots
        self._fingerprint_of = fingerprint_of
        self._on_phase = on_phase
        self._on_hang = on_hang
        self._lock = asyncio.Lock()
        self.adapters = AdapterCalls(self.state, device, roots, self._change)
        self._sleep = SleepCalls(self.state, device, lambda: self.session)
        self._changes: set[asyncio.Task[Any]] = set()
        self._loads: set[LoadProgress] = set()
        self._grammar_thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")

    async def init_device(self, epoch: int, scheduler_id: str, place: Place, rendezvous: str = "") -> DeviceInfo:
        """STARTING or INITIALISED → INITIALISED, in a new epoch, or in one that a reset began: then the phase stays, as
        long as the place does. The ranks of a group meet at `rendezvous`; before that each is called without."""
        check_place(place, rendezvous)
        if self.state.is_new_epoch(epoch, scheduler_id) and self.state.phase <= Phase.INITIALISED:
            self._interrupt(stale_epoch(held=epoch, got=self.state.epoch))
        return await self._change(self._init_device(epoch, scheduler_id, place, rendezvous))

    async def load_model(
        self,
        epoch: int,
        model_path: str,
        dtype: str,
        progress: LoadProgress,
        *,
        quantize: str = "auto",
        kv_cache_dtype: str = "auto",
    ) -> LoadSummary:
        """INITIALISED → LOADED. Setting `progress.cancel_reason` stops it and leaves the phase as it was."""
        check_types(dtype, quantize, kv_cache_dtype)
        self._loads.add(progress)
        return await self._change(self._load_model(epoch, model_path, (dtype, quantize, kv_cache_dtype), progress))

    async def determine_available_memory(self, epoch: int, max_step_tokens: int, max_sequences: int) -> MemoryReport:
        """Measures in LOADED; answers what was measured in later phases."""
        check_step_size(max_step_tokens, max_sequences)
        return await self._change(self._determine(epoch, max_step_tokens, max_sequences))

    async def initialize_cache(self, epoch: int, num_blocks: int, block_size: int, max_model_len: int) -> int:
        """LOADED → CACHED; answers the bytes of the KV tensors."""
        check_cache(num_blocks, block_size, max_model_len)
        return await self._change(self._initialize_cache(epoch, num_blocks, block_size, max_model_len))

    async def warm_up(self, epoch: int, size: Warm, progress: WarmUpProgress, *, skip: bool = False) -> None:
        """CACHED → READY. After it steps up to `size` may come; with `skip` they are the first that run."""
        check_step_size(size.max_step_tokens, size.max_sequences)
        await self._change(self._warm_up(epoch, size, progress, skip=skip))

    async def reset(self, epoch: int, scheduler_id: str, to: Phase) -> Phase:
        """Any phase → `to` or an earlier one, in a new epoch; drops all sequences."""
        if self.state.is_new_epoch(epoch, scheduler_id):
            self._interrupt(stale_epoch(held=epoch, got=self.state.epoch))
        try:
            async with asyncio.timeout(DEVICE_BACK_S):
                return await self._change(self._reset(epoch, scheduler_id, to))
        except TimeoutError:
            self._on_hang()
            text = f"the device did not come back within {DEVICE_BACK_S:g} s from what it does; the worker ends itself"
            raise StepwireError("WORKER_FAILED", text) from None

    async def prepare_grammar(
        self, epoch: int, key: bytes, grammar: str, live_keys: Sequence[bytes], revision: int
    ) -> Preparation:
        """Makes a grammar known. Beside the device thread, and beside changes: a step may go on meanwhile."""
        self.state.require_epoch(epoch)
        if self.state.phase < Phase.LOADED or (runtime := self._device.runtime) is None:
            raise self.state.wrong_phase("PrepareGrammar", Phase.LOADED)
        check_grammar(key, grammar, live_keys, revision)
        prepare = partial(runtime.prepare_grammar, key, grammar, tuple(live_keys), revision)
        return await asyncio.get_running_loop().run_in_executor(self._grammar_thread, prepare)

    async def sleep(self, epoch: int, level: SleepLevel) -> SleepLevel:
        """READY stays READY; gives the device's memory back. Answers the level in force."""
        return await self._change(self._sleep.sleep(epoch, level))

    async def wake_up(self, epoch: int) -> None:
        """Takes the memory again."""
        await self._change(self._wake_up(epoch))

    async def _wake_up(self, epoch: int) -> None:
        progress = LoadProgress()
        self._loads.add(progress)
        try:
            await self._sleep.wake_up(epoch, progress)
        finally:
            self._loads.discard(progress)

    def ready_session(self, epoch: int) -> StepSession:
        """The session that a step stream joins. Raises StepwireError STALE_EPOCH or WRONG_PHASE."""
        self.state.require_epoch(epoch)
        if self.session is None:
            raise self.state.wrong_phase("ExecuteModel", Phase.READY)
        return self.session

    async def shut_down(self, reason: StepwireError) -> None:
        """Stops a load, ends the step stream after the step that is running, and closes the runtime."""
        for load in self._loads:
            load.cancel_reason = reason
        if self.session is not None:
            self.session.drain(reason)
        self._grammar_thread.shutdown(wait=False, cancel_futures=True)
        if self._changes:
            await asyncio.wait(set(self._changes))
        with suppress(DeviceStopped):
            await self._device.run(lambda runtime: runtime.close())

    def _interrupt(self, reason: StepwireError) -> None:
        for load in self._loads:
            load.cancel_reason = reason
        if self.session is not None:
            self.session.end(reason)
            self.session = None

    async def _change(self, change: Coroutine[Any, Any, T]) -> T:
        async def in_turn() -> T:
            async with self._lock:
                return await change

        task = asyncio.create_task(in_turn())
        self._changes.add(task)
        task.add_done_callback(self._changed)
        return await asyncio.shield(task)

    def _changed(self, task: asyncio.Task[Any]) -> None:
        self._changes.discard(task)
        if not task.cancelled():
            # The caller may be gone; then nobody else takes the error.
            task.exception()

    async def _enter(self, phase: Phase) -> None:
        self.state.phase = phase
        _log.info("phase_entered", phase=phase.name, epoch=self.state.epoch, rank=self.rank)
        await self._on_phase(phase)

    @property
    def rank(self) -> int:
        """This worker's rank; 0 before it has one."""
        return 0 if self.state.place is None else self.state.place.rank

    async def _init_device(self, epoch: int, scheduler_id: str, place: Place, rendezvous: str) -> DeviceInfo:
        state = self.state
        is_new = state.is_new_epoch(epoch, scheduler_id)
        is_unmet = place.num_ranks > 1 and not state.rendezvous
        if not is_new and state.device is not None and state.place == place:
            if rendezvous == state.rendezvous and not is_unmet:
                return state.device
            may_place = state.rendezvous is None or is_unmet
        else:
            may_place = is_new or state.rendezvous is None
        if not may_place or state.phase > (Phase.INITIALISED if is_new else Phase.CACHED):
            raise state.wrong_phase(
                "InitDevice", Phase.STARTING, remedy="call Reset to PHASE_INITIALISED with a new epoch"
            )
        if state.place != place and state.phase > Phase.INITIALISED:
            # What it holds is the shard of another place.
            await self._device.run(lambda r: r.reset(Phase.INITIALISED))
            state.drop_to(Phase.INITIALISED)
        device = await self._device.run(partial(_init_runtime, place=place, meeting=Meeting(epoch, rendezvous)))
        if is_new:
            state.take_epoch(epoch, scheduler_id)
        state.device, state.place, state.rendezvous = device, place, rendezvous
        await self._enter(max(state.phase, Phase.INITIALISED))
        return device

    async def _load_model(
        self, epoch: int, model_path: str, types: tuple[str, str, str], progress: LoadProgress
    ) -> LoadSummary:
        state = self.state
        try:
            state.require_epoch(epoch)
            path = await asyncio.to_thread(self._roots.resolve, model_path)
            if state.loaded is not None and await self._is_held(state.loaded, path, types):
                return replace(state.loaded.summary, already_loaded=True)
            state.require_phase("LoadModel", Phase.INITIALISED)
            load = partial(_load_runtime, path=path, types=types, progress=progress)
            summary = await self._device.run(load)
        finally:
            self._loads.discard(progress)
        state.loaded, state.measured = Loaded(*types, summary), None
        _log.info(
            "model_loaded",
            model_path=str(path),
            dtype=summary.dtype,
            weight_bytes=summary.weight_bytes,
            mapped_bytes=summary.mapped_bytes,
            seconds=round(summary.duration_ns / 1e9, 3),
            phases=seconds_of_phases(summary),
        )
        record_phases(self._tracer, summary, rank=self.rank, epoch=epoch)
        await self._enter(Phase.LOADED)
        return summary

    async def _is_held(self, loaded: Loaded, path: Path, types: tuple[str, str, str]) -> bool:
        dtype, *others = types
        if dtype not in (loaded.dtype, loaded.summary.dtype) or others != [loaded.quantize, loaded.kv_cache_dtype]:
            return False
        return await asyncio.to_thread(self._fingerprint_of, path) == loaded.summary.fingerprint

    async def _determine(self, epoch: int, max_step_tokens: int, max_sequences: int) -> MemoryReport:
        state = self.state
        state.require_epoch(epoch)
        measured = state.measured
        if (
            state.phase > Phase.LOADED
            and measured is not None
            and (measured.max_step_tokens, measured.max_sequences) == (max_step_tokens, max_sequences)
        ):
            return measured.report
        state.require_phase("DetermineAvailableMemory", Phase.LOADED)
        state.require_group("DetermineAvailableMemory")
        report = await self._device.run(lambda r: r.determine_available_memory(max_step_tokens, max_sequences))
        state.measured = Measured(max_step_tokens, max_sequences, report)
        return report

    async def _initialize_cache(self, epoch: int, num_blocks: int, block_size: int, max_model_len: int) -> int:
        state = self.state
        state.require_epoch(epoch)
        cached, loaded = state.cached, state.loaded
        asked = (num_blocks, block_size, max_model_len)
        if cached is not None and (cached.num_blocks, cached.block_size, cached.max_model_len) == asked:
            return cached.cache_bytes
        state.require_phase("InitializeCache", Phase.LOADED)
        if loaded is not None:
            check_cache_size(num_blocks * block_size, max_model_len, loaded.summary, state.measured)
        cache_bytes = await self._device.run(lambda r: r.initialize_cache(num_blocks, block_size, max_model_len))
        state.cached, state.warm = Cached(num_blocks, block_size, max_model_len, cache_bytes), None
        await self._enter(Phase.CACHED)
        return cache_bytes

    async def _warm_up(self, epoch: int, size: Warm, progress: WarmUpProgress, *, skip: bool) -> None:
        state = self.state
        state.require_epoch(epoch)
        if state.phase is Phase.READY and state.warm == size:
            return
        state.require_phase("WarmUp", Phase.CACHED)
        state.require_group("WarmUp")
        if state.measured is not None:
            check_number("max_step_token_count", size.max_step_tokens, 1, state.measured.max_step_tokens)
            check_number("max_sequence_count", size.max_sequences, 1, state.measured.max_sequences)
        is_warm = skip or state.warm == size
        if not skip and state.place is not None and state.place.num_ranks > 1:
            # Its steps need all ranks, and one of them may be another process now.
            is_warm = await self._device.run(partial(_on_all_ranks, is_so=is_warm))
        if not is_warm:
            await self._device.run(lambda r: r.warm_up(size.max_step_tokens, size.max_sequences, progress.report))
        state.warm = size
        self.session = self._new_session(size)
        await self._enter(Phase.READY)

    def _new_session(self, size: Warm) -> StepSession:
        loaded, cached, place = self.state.loaded, self.state.cached, self.state.place
        if loaded is None or cached is None:
            raise RuntimeError("a session needs a model and a cache")
        limits = StepLimits(
            max_step_tokens=size.max_step_tokens,
            max_sequences=size.max_sequences,
            max_model_len=cached.max_model_len,
            num_blocks=cached.num_blocks,
            block_size=cached.block_size,
            vocab_size=loaded.summary.vocab_size,
        )
        spans = SequenceSpans(self._tracer, rank=self.rank, epoch=self.state.epoch)
        return StepSession(
            self.state.epoch,
            limits=limits,
            device=self._device,
            spans=spans,
            on_answer=self._metrics.step_answered,
            is_output=place is None or place.is_output,
            num_stages=1 if place is None else place.pipeline_parallel_size,
        )

    async def _reset(self, epoch: int, scheduler_id: str, to: Phase) -> Phase:
        state = self.state
        if not state.is_new_epoch(epoch, scheduler_id):
            if state.phase <= to:
                return state.phase
            remedy = "take a new epoch: this one has gone on"
            raise state.wrong_phase("Reset", to, remedy=remedy)
        self._interrupt(stale_epoch(held=epoch, got=state.epoch))
        state.take_epoch(epoch, scheduler_id)
        target = min(state.kept_phase, to)
        if state.phase > Phase.STARTING:
            await self._device.run(partial(_reset_runtime, to=target))
        state.drop_to(target)
        await self._enter(target)
        return target


def _init_runtime(runtime: Runtime, place: Place, meeting: Meeting) -> DeviceInfo:
    ranks = RankPlace(place.tensor_rank, place.tensor_parallel_size, place.pipeline_rank, place.pipeline_parallel_size)
    return runtime.init_device(ranks, meeting)


def _on_all_ranks(runtime: Runtime, is_so: bool) -> bool:
    return runtime.on_all_ranks(is_so)


def _reset_runtime(runtime: Runtime, to: Phase) -> None:
    # Another rank may wait in a step of the old epoch that this one never runs.
    runtime.leave_group()
    runtime.reset(to)


def _load_runtime(runtime: Runtime, path: Path, types: tuple[str, str, str], progress: LoadProgress) -> LoadSummary:
    dtype, quantize, kv_cache_dtype = types
    with load_errors(progress):
        return runtime.load_model(path, dtype, progress.report, progress.is_cancelled, quantize, kv_cache_dtype)
