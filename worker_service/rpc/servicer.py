"""WorkerService over gRPC: messages to values and back, errors with their place. What happens is in lifecycle.py."""

import asyncio
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import Any

import grpc
import structlog

from stepwire.rpc.errors import StepwireError
from stepwire.v1 import worker_pb2, worker_pb2_grpc
from worker_service.device_thread import DeviceThread
from worker_service.rpc.convert import held_adapter
from worker_service.rpc.failures import phase_failure, placed
from worker_service.rpc.lifecycle import Lifecycle
from worker_service.rpc.ports import Runtime
from worker_service.rpc.profile import start_profile, stop_profile
from worker_service.rpc.progress import LoadProgress, WarmUpProgress, changes
from worker_service.rpc.state import Place, Warm
from worker_service.runtime.report import LoadSummary, Phase, SleepLevel

SERVICE_NAME = "stepwire.v1.WorkerService"

_log = structlog.stdlib.get_logger(__name__)

_Context = grpc.aio.ServicerContext[Any, Any]

_RESET_TARGETS: Mapping[int, Phase] = {int(phase): phase for phase in (Phase.INITIALISED, Phase.LOADED, Phase.CACHED)}

_SLEEP_LEVELS: Mapping[int, SleepLevel] = {
    int(level): level for level in (SleepLevel.KEEP_WEIGHTS, SleepLevel.DROP_WEIGHTS)
}


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """All RPCs of worker.proto. Every error says in which phase, rank and host it arose."""

    def __init__(self, lifecycle: Lifecycle, device: DeviceThread[Runtime]) -> None:
        self._lifecycle = lifecycle
        self._device = device
        self._host = socket.gethostname()
        self._num_calls = 0
        self._last_call_s = time.monotonic()

    @property
    def idle_s(self) -> float:
        """Seconds since the last call ended; 0 while one goes on, such as the step stream."""
        return 0.0 if self._num_calls else time.monotonic() - self._last_call_s

    async def InitDevice(
        self, request: worker_pb2.InitDeviceRequest, _context: _Context
    ) -> worker_pb2.InitDeviceResponse:
        """See worker.proto."""
        place = Place(
            request.tensor_rank,
            request.tensor_parallel_size,
            request.pipeline_rank,
            request.pipeline_parallel_size,
        )
        with self._call():
            device = await self._lifecycle.init_device(request.epoch, request.scheduler_id, place, request.rendezvous)
        return worker_pb2.InitDeviceResponse(
            device=device.device,
            device_name=device.device_name,
            total_memory_bytes=device.total_memory_bytes,
            free_memory_bytes=device.free_memory_bytes,
            host=self._host,
            process_id=os.getpid(),
            rendezvous=device.rendezvous,
            device_id=device.device_id,
            memory_limit_bytes=device.memory_limit_bytes,
        )

    async def LoadModel(
        self, request: worker_pb2.LoadModelRequest, _context: _Context
    ) -> AsyncIterator[worker_pb2.LoadModelResponse]:
        """See worker.proto."""
        progress = LoadProgress()
        load = asyncio.create_task(
            self._lifecycle.load_model(
                request.epoch,
                request.model_path,
                request.dtype,
                progress,
                quantize=request.quantize or "auto",
                kv_cache_dtype=request.kv_cache_dtype or "auto",
            )
        )
        with self._call():
            try:
                async with aclosing(changes(progress, load)) as reports:
                    async for stage, loaded_bytes, total_bytes in reports:
                        yield worker_pb2.LoadModelResponse(
                            stage=stage, loaded_bytes=loaded_bytes, total_bytes=total_bytes
                        )
                summary = await load
                stage, loaded_bytes, total_bytes = progress.now
                yield worker_pb2.LoadModelResponse(
                    stage=stage,
                    loaded_bytes=loaded_bytes,
                    total_bytes=total_bytes,
                    summary=_load_summary(summary),
                )
            finally:
                if not load.done():
                    progress.cancel_reason = StepwireError("CANCELLED", "the caller cancelled the load")
                    load.cancel()

    async def DetermineAvailableMemory(
        self, request: worker_pb2.DetermineAvailableMemoryRequest, _context: _Context
    ) -> worker_pb2.DetermineAvailableMemoryResponse:
        """See worker.proto."""
        with self._call():
            report = await self._lifecycle.determine_available_memory(
                request.epoch, request.max_step_token_count, request.max_sequence_count
            )
        return worker_pb2.DetermineAvailableMemoryResponse(
            available_bytes=report.available_bytes,
            weight_bytes=report.weight_bytes,
            activation_bytes=report.activation_bytes,
            limit_bytes=report.limit_bytes,
        )

    async def InitializeCache(
        self, request: worker_pb2.InitializeCacheRequest, _context: _Context
    ) -> worker_pb2.InitializeCacheResponse:
        """See worker.proto."""
        with self._call():
            cache_bytes = await self._lifecycle.initialize_cache(
                request.epoch, request.block_count, request.block_size, request.max_model_len
            )
        return worker_pb2.InitializeCacheResponse(cache_bytes=cache_bytes)

    async def WarmUp(
        self, request: worker_pb2.WarmUpRequest, _context: _Context
    ) -> AsyncIterator[worker_pb2.WarmUpResponse]:
        """See worker.proto."""
        progress = WarmUpProgress()
        size = Warm(request.max_step_token_count, request.max_sequence_count)
        work = asyncio.create_task(self._lifecycle.warm_up(request.epoch, size, progress, skip=request.skip))
        with self._call():
            try:
                async with aclosing(changes(progress, work)) as reports:
                    async for num_done, num_total in reports:
                        if num_done < num_total:
                            yield worker_pb2.WarmUpResponse(done_count=num_done, total_count=num_total)
                await work
                num_total = max(1, progress.now[1])
                yield worker_pb2.WarmUpResponse(done_count=num_total, total_count=num_total)
            finally:
                work.cancel()

    async def ExecuteModel(
        self, request_iterator: AsyncIterator[worker_pb2.ExecuteModelRequest], _context: _Context
    ) -> AsyncIterator[worker_pb2.ExecuteModelResponse]:
        """See worker.proto."""
        with self._call():
            first = await anext(aiter(request_iterator), None)
            if first is None:
                return
            if first.WhichOneof("message") != "open":
                raise StepwireError("FIELD_INVALID", "the first message must be `open`", {"field": "message"})
            session = self._lifecycle.ready_session(first.open.epoch)
            stream = await session.open(first.open)
            async with aclosing(stream.responses(request_iterator)) as responses:
                async for response in responses:
                    yield response

    async def StartProfile(
        self, request: worker_pb2.StartProfileRequest, _context: _Context
    ) -> worker_pb2.StartProfileResponse:
        """See worker.proto."""
        with self._call():
            await start_profile(self._lifecycle, self._device, request)
        return worker_pb2.StartProfileResponse()

    async def StopProfile(
        self, request: worker_pb2.StopProfileRequest, _context: _Context
    ) -> AsyncIterator[worker_pb2.StopProfileResponse]:
        """See worker.proto."""
        with self._call():
            for response in await stop_profile(self._lifecycle, self._device, request):
                yield response

    async def AddAdapter(
        self, request: worker_pb2.AddAdapterRequest, _context: _Context
    ) -> worker_pb2.AddAdapterResponse:
        """See worker.proto."""
        with self._call():
            report = await self._lifecycle.adapters.add(request.epoch, request.path, request.fingerprint)
        return worker_pb2.AddAdapterResponse(adapter=held_adapter(report))

    async def RemoveAdapter(
        self, request: worker_pb2.RemoveAdapterRequest, _context: _Context
    ) -> worker_pb2.RemoveAdapterResponse:
        """See worker.proto."""
        with self._call():
            await self._lifecycle.adapters.remove(request.epoch, request.fingerprint)
        return worker_pb2.RemoveAdapterResponse()

    async def ListAdapters(
        self, _request: worker_pb2.ListAdaptersRequest, _context: _Context
    ) -> worker_pb2.ListAdaptersResponse:
        """See worker.proto."""
        with self._call():
            reports = await self._lifecycle.adapters.list()
        return worker_pb2.ListAdaptersResponse(adapters=map(held_adapter, reports))

    async def PrepareGrammar(
        self, request: worker_pb2.PrepareGrammarRequest, _context: _Context
    ) -> worker_pb2.PrepareGrammarResponse:
        """See worker.proto."""
        with self._call():
            done = await self._lifecycle.prepare_grammar(
                request.epoch, request.grammar_key, request.grammar, request.live_grammar_keys, request.revision
            )
        return worker_pb2.PrepareGrammarResponse(already_held=done.already_held, duration_ns=done.duration_ns)

    async def Sleep(self, request: worker_pb2.SleepRequest, _context: _Context) -> worker_pb2.SleepResponse:
        """See worker.proto."""
        with self._call():
            if request.level not in _SLEEP_LEVELS:
                names = ", ".join(f"SLEEP_LEVEL_{level.name}" for level in _SLEEP_LEVELS.values())
                metadata = {"field": "level", "found": str(request.level), "expected": names}
                raise StepwireError("FIELD_INVALID", f"level is {request.level}; expected one of {names}", metadata)
            level = await self._lifecycle.sleep(request.epoch, _SLEEP_LEVELS[request.level])
        return worker_pb2.SleepResponse(level=worker_pb2.SleepLevel.ValueType(level))

    async def WakeUp(self, request: worker_pb2.WakeUpRequest, _context: _Context) -> worker_pb2.WakeUpResponse:
        """See worker.proto."""
        with self._call():
            await self._lifecycle.wake_up(request.epoch)
        return worker_pb2.WakeUpResponse()

    async def Reset(self, request: worker_pb2.ResetRequest, _context: _Context) -> worker_pb2.ResetResponse:
        """See worker.proto."""
        with self._call():
            target = _RESET_TARGETS.get(request.to)
            if target is None:
                names = ", ".join(f"PHASE_{phase.name}" for phase in _RESET_TARGETS.values())
                metadata = {"field": "to", "found": str(request.to), "expected": names}
                raise StepwireError("FIELD_INVALID", f"to is {request.to}; expected one of {names}", metadata)
            phase = await self._lifecycle.reset(request.epoch, request.scheduler_id, target)
        return worker_pb2.ResetResponse(phase=worker_pb2.Phase.ValueType(phase))

    async def GetStatus(
        self, _request: worker_pb2.GetStatusRequest, _context: _Context
    ) -> worker_pb2.GetStatusResponse:
        """See worker.proto. Touches nothing that the device thread might hold."""
        state, session, runtime = self._lifecycle.state, self._lifecycle.session, self._device.runtime
        with self._call():
            if self._device.is_broken:
                # Who begins a new epoch waits for the process that takes this one's place.
                raise StepwireError("MODEL_NOT_READY", "the device has failed, and this worker is ending")
            return worker_pb2.GetStatusResponse(
                phase=worker_pb2.Phase.ValueType(state.phase),
                epoch=state.epoch,
                last_step_id=0 if session is None else session.guard.last_executed,
                fingerprint="" if state.loaded is None else state.loaded.summary.fingerprint,
                weight_bytes=0 if state.loaded is None else state.loaded.summary.weight_bytes,
                cache_bytes=0 if state.cached is None else state.cached.cache_bytes,
                sequence_count=0 if runtime is None else runtime.num_sequences,
                host=self._host,
                process_id=os.getpid(),
                block_count=0 if state.cached is None else state.cached.num_blocks,
                block_size=0 if state.cached is None else state.cached.block_size,
                max_model_len=0 if state.cached is None else state.cached.max_model_len,
                scheduler_id=state.scheduler_id,
                sleep_level=worker_pb2.SleepLevel.ValueType(state.sleep_level),
            )

    @contextmanager
    def _call(self) -> Iterator[None]:
        """Counts a call as contact with a scheduler, and gives its errors their place."""
        place = {
            "phase": self._lifecycle.state.phase.name,
            "rank": str(self._lifecycle.rank),
            "host": self._host,
        }
        self._num_calls += 1
        try:
            yield
        except Exception as error:
            failure = phase_failure(error)
            if failure is None:
                raise
            # That a worker was told to end is no failure of what it ends with: whoever told it knows, and `stopping`
            # stands in the log already.
            level = logging.INFO if failure.reason == "DRAINING" else logging.WARNING
            _log.log(level, "call_failed", reason=failure.reason, error=failure.message, **place)
            raise placed(failure, place) from error
        finally:
            self._num_calls -= 1
            self._last_call_s = time.monotonic()


def _load_summary(summary: LoadSummary) -> worker_pb2.LoadSummary:
    return worker_pb2.LoadSummary(
        fingerprint=summary.fingerprint,
        architecture=summary.architecture,
        weight_bytes=summary.weight_bytes,
        dtype=summary.dtype,
        kv_bytes_per_token=summary.kv_bytes_per_token,
        vocab_size=summary.vocab_size,
        max_position_count=summary.max_position_count,
        already_loaded=summary.already_loaded,
        duration_ns=summary.duration_ns,
        phases=[
            worker_pb2.LoadPhase(name=phase.name, duration_ns=phase.duration_ns, byte_count=phase.num_bytes)
            for phase in summary.phases
        ],
        mapped_bytes=summary.mapped_bytes,
        adapter_slot_count=summary.num_adapter_slots,
    )
