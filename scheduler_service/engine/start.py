"""Walks workers through the phases of a start, all ranks at the same phase before the next begins.

A first start, the adoption of workers that run already and the start of a new epoch are one walk: what
a worker holds is kept as far as it is of use.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

import structlog
from opentelemetry.trace import Tracer

from scheduler_service.engine.causes import COLLECT_S, OF_OTHERS
from scheduler_service.engine.group import LOST_AFTER_S, fenced
from scheduler_service.engine.ports import Device, LoadSummary, MemoryReport, Phase, Place, WorkerPort, WorkerStatus
from scheduler_service.engine.progress import ProgressReport, progress_report
from scheduler_service.engine.ranks import Rank, rank_failed
from scheduler_service.engine.startup_spans import startup_phase
from scheduler_service.engine.supervision import Supervision, Unsupervised
from stepwire.rpc.errors import StepwireError

_RETRY_EVERY_S = 0.1
_STATUS_TIMEOUT_S = 2.0
_NOT_YET_THERE = frozenset({"MODEL_NOT_READY", "DEADLINE_EXCEEDED"})

_log = structlog.stdlib.get_logger(__name__)
T = TypeVar("T")
Hook = Callable[[Sequence[WorkerPort]], Awaitable[None]]
DeviceHook = Callable[[Rank, Device], None]
StatusHook = Callable[[Rank, WorkerStatus], None]


@dataclass(frozen=True, slots=True)
class StartPlan:
    """What the workers are to be made ready for. `num_blocks` None takes what their memory holds.

    With `fit_max_model_len` a context that does not fit is made shorter, rather than refused.
    """

    model_path: str
    dtype: str
    quantize: str
    fingerprint: str
    architecture: str
    vocab_size: int
    max_model_len: int
    max_sequences: int
    max_step_tokens: int
    block_size: int
    num_blocks: int | None
    worker_timeout_s: float
    fit_max_model_len: bool = False
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    kv_cache_dtype: str = "auto"


@dataclass(frozen=True, slots=True)
class StartedGroup:
    """A group that is ready for its step streams to be opened."""

    ranks: Sequence[Rank]
    epoch: int
    num_blocks: int
    max_model_len: int
    summary: LoadSummary


class GroupStarter:
    """Makes a group of workers ready, as often as asked; each time in a new epoch.

    `hooks` are called with the ports of all ranks once these are ready, before any sequence comes: whoever
    keeps more on workers than weights and KV, such as adapters, brings it there again. `on_device` is told which device
    each rank has, before any weights are loaded, and may raise StepwireError; so may `on_found`, which is told of each
    worker of a first start before that touches it.
    """

    def __init__(
        self, ports: Sequence[WorkerPort], plan: StartPlan, tracer: Tracer, *, supervision: Supervision | None = None
    ) -> None:
        self.hooks: list[Hook] = []
        self.on_device: DeviceHook = lambda _rank, _device: None
        self.on_found: StatusHook = lambda _rank, _status: None
        self.supervision = supervision or Unsupervised()
        sizes = plan.tensor_parallel_size, plan.pipeline_parallel_size
        self._ranks = [Rank(i, port, Place.of(i, *sizes)) for i, port in enumerate(ports)]
        self._names = [port.address for port in ports]
        self._plan = plan
        self._tracer = tracer
        self.scheduler_id = secrets.token_hex(8)
        """Whom workers belong to that were started by this."""
        self._epoch = 0
        self._num_blocks: int | None = None

    @property
    def epoch(self) -> int:
        """The last epoch begun; 0 before the first."""
        return self._epoch

    async def start(self) -> StartedGroup:
        """Walks all phases. After the first start the number of KV blocks stays as it is.

        Raises StepwireError naming phase, rank, address, cause and remedy; FENCED when another scheduler has taken
        the workers over since the last start.
        """
        kept = Phase.CACHED
        while True:
            with self._span("connect"):
                statuses = await self._each("connect", self._connect)
            kept = min(kept, self._common_phase(statuses))
            try:
                return await self._walk(statuses, kept)
            except StepwireError as error:
                # An adopted worker holds something else after all, such as the same model in another dtype.
                if error.reason != "WRONG_PHASE" or kept is Phase.INITIALISED:
                    raise
                kept = Phase(kept - 1)

    async def release(self) -> None:
        """Has the workers forget the model, in an epoch of its own. One that cannot be reached is left as it is."""
        self._epoch += 1
        resets = (rank.port.reset(self._epoch, self.scheduler_id, Phase.INITIALISED) for rank in self._ranks)
        outcomes = await asyncio.gather(*resets, return_exceptions=True)
        for rank, outcome in zip(self._ranks, outcomes, strict=True):
            if isinstance(outcome, StepwireError):
                _log.warning(
                    "worker_not_released", address=rank.port.address, reason=outcome.reason, error=str(outcome)
                )
            elif isinstance(outcome, BaseException):
                raise outcome

    async def _walk(self, statuses: Sequence[WorkerStatus], kept: Phase) -> StartedGroup:
        self._epoch = max(self._epoch, *(status.epoch for status in statuses)) + 1
        async with self._phase("init_device"):
            await self._each("init_device", lambda rank: self._adopt(rank, statuses[rank.rank], kept))
            await self._meet()
        async with self._phase("load_model") as report:
            summaries = await self._each("load_model", lambda rank: self._load(rank, report))
        num_blocks = self._num_blocks
        if num_blocks is None:
            async with self._phase("determine_available_memory"):
                memory = await self._each("determine_available_memory", self._measure)
            self._plan = fit_context(self._plan, summaries, memory)
            num_blocks = decide_num_blocks(self._plan, summaries, memory)
        async with self._phase("initialize_cache"):
            await self._each("initialize_cache", lambda rank: self._initialize_cache(rank, num_blocks))
        async with self._phase("warm_up") as report:
            await self._each("warm_up", lambda rank: self._warm_up(rank, report))
        for hook in self.hooks:
            await hook([rank.port for rank in self._ranks])
        self._num_blocks = num_blocks
        return StartedGroup(self._ranks, self._epoch, num_blocks, self._plan.max_model_len, summaries[0])

    def _common_phase(self, statuses: Sequence[WorkerStatus]) -> Phase:
        """How far those ranks may be left that need not begin anew: no further than is right for all."""
        plan = self._plan
        if all(
            status.phase >= Phase.CACHED
            and (status.block_size, status.max_model_len) == (plan.block_size, plan.max_model_len)
            and self._num_blocks in (None, status.num_blocks)
            for status in statuses
        ):
            return Phase.CACHED
        return Phase.LOADED

    async def _each(self, phase: str, action: Callable[[Rank], Awaitable[T]]) -> list[T]:
        """Does something on all ranks at once; the first rank that fails ends it.

        One that fails because of another is given half a second, in which that one may say what is wrong with it.
        """

        async def one(rank: Rank) -> T:
            try:
                return await action(rank)
            except StepwireError as error:
                raise rank_failed(rank, phase, error) from error

        tasks = [asyncio.create_task(one(rank)) for rank in self._ranks]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            if all(error.reason in OF_OTHERS for error in _errors_of(tasks)):
                # Also where there is no error: then all are done.
                await asyncio.wait(tasks, timeout=COLLECT_S)
            if errors := _errors_of(tasks):
                raise min(errors, key=lambda error: error.reason in OF_OTHERS)
            return [task.result() for task in tasks]
        finally:
            # Cancelled calls end at once on this side, and tell their workers to stop.
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _connect(self, rank: Rank) -> WorkerStatus:
        began = time.monotonic()
        deadline = began + self._plan.worker_timeout_s
        is_known = rank.process_id != 0
        while True:
            if (place := self.supervision.place_of(self._names[rank.rank])) != rank.port.address:
                _log.info("worker_moved", rank=rank.rank, address=rank.port.address, to=place)
                await rank.port.move(place)
            try:
                status = await rank.port.get_status(timeout_s=_STATUS_TIMEOUT_S)
            except StepwireError as error:
                if error.reason not in _NOT_YET_THERE:
                    raise
                if why := self.supervision.why_gone(self._names[rank.rank]):
                    text = f"the worker at {rank.port.address} is not started again: {why}"
                    raise StepwireError("WORKER_FAILED", text, error.metadata) from error
                if time.monotonic() > deadline:
                    raise StepwireError(
                        "WORKER_FAILED",
                        f"no worker answers at {rank.port.address} within {self._plan.worker_timeout_s:g} s "
                        f"({error.message}); start one there, name another address with --workers, or wait longer with "
                        "--worker-timeout",
                        error.metadata,
                    ) from error
                if is_known and time.monotonic() - began > LOST_AFTER_S:
                    is_known = False
                    self.supervision.replace(rank.port.address, rank.process_id)
                await asyncio.sleep(_RETRY_EVERY_S)
                continue
            if status.epoch > self._epoch > 0:
                raise fenced(status.epoch, status.scheduler_id)
            if self._epoch == 0:
                self.on_found(rank, status)
            rank.host, rank.process_id = status.host, status.process_id
            return status

    async def _adopt(self, rank: Rank, status: WorkerStatus, kept: Phase) -> None:
        if status.phase is Phase.STARTING:
            return
        # A worker of an earlier epoch or scheduler: what it holds of our model is kept.
        is_loaded = status.phase >= Phase.LOADED and status.fingerprint == self._plan.fingerprint
        to = kept if is_loaded else Phase.INITIALISED
        phase = await rank.port.reset(self._epoch, self.scheduler_id, to)
        _log.info("worker_adopted", rank=rank.rank, address=rank.port.address, kept=phase.name.lower())

    async def _meet(self) -> None:
        """Gives every rank its device; those of a group then meet where rank 0 says. Raises StepwireError."""
        rendezvous = ""
        if len(self._ranks) > 1:
            # Nobody waits for a rank whose process has just begun: its imports may take longer than a collective may.
            devices = await self._each("init_device", lambda rank: self._device(rank, ""))
            rendezvous = devices[0].rendezvous
        await self._each("init_device", lambda rank: self._init_device(rank, rendezvous))

    async def _device(self, rank: Rank, rendezvous: str) -> Device:
        return await rank.port.init_device(self._epoch, self.scheduler_id, rank.place, rendezvous)

    async def _init_device(self, rank: Rank, rendezvous: str) -> None:
        device = await self._device(rank, rendezvous)
        self.on_device(rank, device)
        _log.info(
            "device",
            rank=rank.rank,
            address=rank.port.address,
            device=device.device,
            name=device.device_name,
            free_bytes=device.free_memory_bytes,
        )

    async def _load(self, rank: Rank, report: ProgressReport) -> LoadSummary:
        summary: LoadSummary | None = None
        plan = self._plan
        types = (plan.dtype, plan.quantize, plan.kv_cache_dtype)
        async for progress in rank.port.load_model(self._epoch, plan.model_path, *types):
            report.update(rank.rank, progress.stage, progress.loaded_bytes, progress.total_bytes)
            summary = progress.summary or summary
        if summary is None:
            raise StepwireError("WORKER_FAILED", "the worker ended the load without a summary")
        if summary.vocab_size != self._plan.vocab_size or summary.architecture != self._plan.architecture:
            raise StepwireError(
                "CHECKPOINT_INVALID",
                f"the worker's {self._plan.model_path} is another model than the scheduler's: {summary.architecture} "
                f"with {summary.vocab_size} token ids, not {self._plan.architecture} with {self._plan.vocab_size}; "
                "give both the same files",
                {"file": self._plan.model_path, "expected": self._plan.architecture, "found": summary.architecture},
            )
        if summary.fingerprint != self._plan.fingerprint:
            # Equal files copied at different times differ in their fingerprints.
            _log.warning(
                "fingerprint_differs", rank=rank.rank, scheduler=self._plan.fingerprint, worker=summary.fingerprint
            )
        _log.info(
            "model_loaded",
            rank=rank.rank,
            weight_bytes=summary.weight_bytes,
            dtype=summary.dtype,
            seconds=round(summary.duration_s, 3),
            already_loaded=summary.already_loaded,
            mapped_bytes=summary.mapped_bytes,
            phases=[f"{phase.name} {phase.duration_s:.3f} s" for phase in summary.phases],
        )
        return summary

    async def _measure(self, rank: Rank) -> MemoryReport:
        return await rank.port.determine_available_memory(
            self._epoch, self._plan.max_step_tokens, self._plan.max_sequences
        )

    async def _initialize_cache(self, rank: Rank, num_blocks: int) -> None:
        cache_bytes = await rank.port.initialize_cache(
            self._epoch, num_blocks, self._plan.block_size, self._plan.max_model_len
        )
        _log.info("cache", rank=rank.rank, blocks=num_blocks, block_size=self._plan.block_size, bytes=cache_bytes)

    async def _warm_up(self, rank: Rank, report: ProgressReport) -> None:
        # Requests wait for a group that was lost; a first start may take its time.
        is_waited_for = self._num_blocks is not None
        plan = self._plan
        warm_up = rank.port.warm_up(self._epoch, plan.max_step_tokens, plan.max_sequences, skip=is_waited_for)
        async for done, total in warm_up:
            report.update(rank.rank, "warm_up", done, total)

    @asynccontextmanager
    async def _phase(self, phase: str) -> AsyncIterator[ProgressReport]:
        """A span and a progress report around a phase."""
        with self._span(phase), progress_report(phase) as report:
            yield report

    @contextmanager
    def _span(self, phase: str) -> Iterator[None]:
        with startup_phase(self._tracer, phase, self._epoch):
            yield


def _errors_of(tasks: Sequence[asyncio.Task[T]]) -> list[StepwireError]:
    """What went wrong so far, by rank. Raises what is no StepwireError."""
    errors = []
    for task in tasks:
        error = task.exception() if task.done() and not task.cancelled() else None
        if isinstance(error, StepwireError):
            errors.append(error)
        elif error is not None:
            raise error
    return errors


def fit_context(plan: StartPlan, summaries: Sequence[LoadSummary], memory: Sequence[MemoryReport]) -> StartPlan:
    """The plan, its `max_model_len` lowered to what the KV blocks hold where that is wished; logs what it became."""
    if not plan.fit_max_model_len:
        return plan
    fitting = _num_fitting(plan, summaries, memory)
    longest = (fitting if plan.num_blocks is None else min(plan.num_blocks, fitting)) * plan.block_size
    if not 0 < longest < plan.max_model_len:
        return plan
    _log.info("max_model_len_fitted", wished=plan.max_model_len, fitted=longest, blocks=longest // plan.block_size)
    return replace(plan, max_model_len=longest)


def decide_num_blocks(plan: StartPlan, summaries: Sequence[LoadSummary], memory: Sequence[MemoryReport]) -> int:
    """The number of KV blocks: what the rank with least memory holds, or what was asked for, but no more than usable.

    Raises OUT_OF_MEMORY when not even one sequence of `max_model_len` fits.
    """
    per_sequence = -(-plan.max_model_len // plan.block_size)
    usable = plan.max_sequences * per_sequence
    fitting = _num_fitting(plan, summaries, memory)
    num_blocks = min(fitting if plan.num_blocks is None else plan.num_blocks, usable)
    found = "num_kv_blocks asks for" if plan.num_blocks is not None else "the workers' memory holds"
    if plan.num_blocks is not None and plan.num_blocks > max(fitting, 0):
        raise StepwireError(
            "OUT_OF_MEMORY",
            f"num_kv_blocks asks for {plan.num_blocks} KV blocks and the workers' memory holds {max(fitting, 0)}; "
            "lower num_kv_blocks, or give the workers more memory (memory_fraction, kv_cache_bytes)",
            {"num_kv_blocks": str(plan.num_blocks), "fitting_blocks": str(fitting)},
        )
    if num_blocks < per_sequence:
        raise StepwireError(
            "OUT_OF_MEMORY",
            f"one sequence of max_model_len = {plan.max_model_len} tokens needs {per_sequence} KV blocks and {found} "
            f"{max(num_blocks, 0)}; lower max_model_len to at most {max(num_blocks, 0) * plan.block_size} or set "
            "fit_max_model_len, or raise num_kv_blocks or the workers' memory (memory_fraction, kv_cache_bytes)",
            {"needed_blocks": str(per_sequence), "fitting_blocks": str(num_blocks)},
        )
    return num_blocks


def _num_fitting(plan: StartPlan, summaries: Sequence[LoadSummary], memory: Sequence[MemoryReport]) -> int:
    """KV blocks that the rank with least memory holds."""
    block_bytes = [summary.kv_bytes_per_token * plan.block_size for summary in summaries]
    return min(report.available_bytes // size for report, size in zip(memory, block_bytes, strict=True))
