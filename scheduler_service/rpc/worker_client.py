"""WorkerService over gRPC, as the engine's port.

Calls made under a sampled span get a CLIENT span each, and carry its context; heartbeats and steps,
which are made under none, cost no span.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import contextmanager
from typing import Any, TypeVar

import grpc
from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, Tracer

from scheduler_service.core.plan import StepPlan, StepResult
from scheduler_service.engine.grammars import PreparedGrammar
from scheduler_service.engine.ports import (
    Device,
    LoadProgress,
    MemoryReport,
    Phase,
    Place,
    RankProfile,
    SleepLevel,
    StepTimings,
    WorkerStatus,
)
from scheduler_service.rpc.worker_adapters import WorkerAdapters
from scheduler_service.rpc.worker_messages import (
    load_summary,
    phase_of,
    rank_profile,
    step_message,
    step_result,
    step_timings,
    worker_status,
)
from stepwire.rpc.channel import create_channel
from stepwire.rpc.errors import StepwireError, from_rpc_error
from stepwire.telemetry import names
from stepwire.telemetry.trace import end_rpc_span, inject
from stepwire.v1 import worker_pb2 as pb
from stepwire.v1.worker_pb2_grpc import WorkerServiceStub

MAX_MESSAGE_BYTES = 256 << 20
_UNARY_TIMEOUT_S = 300.0
_RESET_TIMEOUT_S = 60.0
_GRAMMAR_TIMEOUT_S = 60.0
_LOAD_TIMEOUT_S = 24 * 3600.0
_PROFILE_TIMEOUT_S = 120.0
_OPEN_TIMEOUT_S = 30.0
_STATUS_TIMEOUT_S = 1.0
_STATUS_EVERY_S = 0.005
_ENDED = "the worker ended the step stream"
# The status that gRPC gives a call of its own, when a message cannot be written.
_OF_A_WRITE = (grpc.StatusCode.INTERNAL, "Internal error from Core")
# A worker that is started anew is waited for by everybody.
_MAX_BACKOFF_MS = 150

T = TypeVar("T")


class WorkerClient:
    """One worker. Every method raises StepwireError when the call fails."""

    def __init__(self, address: str, *, key: str | None, tracer: Tracer) -> None:
        self._key = key
        self._tracer = tracer
        self._connect(address)

    def _connect(self, address: str) -> None:
        self.address = address
        self._channel = create_channel(
            address, max_message_bytes=MAX_MESSAGE_BYTES, key=self._key, max_backoff_ms=_MAX_BACKOFF_MS
        )
        self._stub = WorkerServiceStub(self._channel)
        # The stub's own would encode a step once for every rank.
        self._execute_model: Any = self._channel.stream_stream(
            "/stepwire.v1.WorkerService/ExecuteModel",
            request_serializer=None,
            response_deserializer=pb.ExecuteModelResponse.FromString,
        )
        self.adapters = WorkerAdapters(self._stub, self._unary)

    async def move(self, address: str) -> None:
        """From now on it is found elsewhere."""
        await self._channel.close()
        self._connect(address)

    async def get_status(self, *, timeout_s: float) -> WorkerStatus:
        """How it stands."""
        response = await self._unary("GetStatus", self._stub.GetStatus, pb.GetStatusRequest(), timeout_s)
        return worker_status(response)

    async def init_device(self, epoch: int, scheduler_id: str, place: Place, rendezvous: str) -> Device:
        """Takes it into an epoch, on a device. The ranks of a group meet at `rendezvous`; rank 0 says where when it is
        called with ""."""
        request = pb.InitDeviceRequest(
            epoch=epoch,
            scheduler_id=scheduler_id,
            tensor_rank=place.tensor_rank,
            tensor_parallel_size=place.tensor_parallel_size,
            pipeline_rank=place.pipeline_rank,
            pipeline_parallel_size=place.pipeline_parallel_size,
            rendezvous=rendezvous,
        )
        response = await self._unary("InitDevice", self._stub.InitDevice, request, _UNARY_TIMEOUT_S)
        return Device(
            response.device,
            response.device_name,
            response.total_memory_bytes,
            response.free_memory_bytes,
            response.rendezvous,
            response.device_id,
            response.memory_limit_bytes,
        )

    async def load_model(
        self, epoch: int, path: str, dtype: str, quantize: str, kv_cache_dtype: str
    ) -> AsyncIterator[LoadProgress]:
        """Loads its shard of the model; `quantize` says what becomes of its weights, and its cache is to hold values
        of `kv_cache_dtype`, of the model's own type where that is "auto"."""
        request = pb.LoadModelRequest(
            epoch=epoch, model_path=path, dtype=dtype, quantize=quantize, kv_cache_dtype=kv_cache_dtype
        )
        async for response in self._streamed("LoadModel", self._stub.LoadModel, request, _LOAD_TIMEOUT_S):
            summary = load_summary(response.summary) if response.HasField("summary") else None
            yield LoadProgress(response.stage, response.loaded_bytes, response.total_bytes, summary)

    async def determine_available_memory(self, epoch: int, max_step_tokens: int, max_sequences: int) -> MemoryReport:
        """Measures what the KV cache may use."""
        request = pb.DetermineAvailableMemoryRequest(
            epoch=epoch, max_step_token_count=max_step_tokens, max_sequence_count=max_sequences
        )
        call = self._stub.DetermineAvailableMemory
        response = await self._unary("DetermineAvailableMemory", call, request, _UNARY_TIMEOUT_S)
        return MemoryReport(
            response.available_bytes, response.weight_bytes, response.activation_bytes, response.limit_bytes
        )

    async def initialize_cache(self, epoch: int, num_blocks: int, block_size: int, max_model_len: int) -> int:
        """Allocates the KV tensors; answers their bytes."""
        request = pb.InitializeCacheRequest(
            epoch=epoch, block_count=num_blocks, block_size=block_size, max_model_len=max_model_len
        )
        response = await self._unary("InitializeCache", self._stub.InitializeCache, request, _UNARY_TIMEOUT_S)
        return int(response.cache_bytes)

    async def warm_up(
        self, epoch: int, max_step_tokens: int, max_sequences: int, *, skip: bool
    ) -> AsyncIterator[tuple[int, int]]:
        """Runs what would make the first requests slow, unless they cannot wait; yields (parts done, parts in all)."""
        request = pb.WarmUpRequest(
            epoch=epoch, max_step_token_count=max_step_tokens, max_sequence_count=max_sequences, skip=skip
        )
        async for response in self._streamed("WarmUp", self._stub.WarmUp, request, _LOAD_TIMEOUT_S):
            yield response.done_count, response.total_count

    async def sleep(self, epoch: int, level: SleepLevel) -> None:
        """Gives its device's memory back; no sequence may be known, and no step in flight."""
        request = pb.SleepRequest(epoch=epoch, level=pb.SleepLevel.ValueType(level))
        await self._unary("Sleep", self._stub.Sleep, request, _UNARY_TIMEOUT_S)

    async def wake_up(self, epoch: int) -> None:
        """Takes the memory again."""
        await self._unary("WakeUp", self._stub.WakeUp, pb.WakeUpRequest(epoch=epoch), _LOAD_TIMEOUT_S)

    async def reset(self, epoch: int, scheduler_id: str, phase: Phase) -> Phase:
        """Takes it back to an earlier phase and into a new epoch."""
        request = pb.ResetRequest(epoch=epoch, scheduler_id=scheduler_id, to=pb.Phase.ValueType(phase))
        response = await self._unary("Reset", self._stub.Reset, request, _RESET_TIMEOUT_S)
        return phase_of(response.phase)

    async def start_profile(self, epoch: int, max_steps: int) -> None:
        """Profiles the steps to come, at most so many."""
        request = pb.StartProfileRequest(epoch=epoch, max_step_count=max_steps)
        await self._unary("StartProfile", self._stub.StartProfile, request, _PROFILE_TIMEOUT_S)

    async def stop_profile(self, epoch: int) -> RankProfile:
        """Ends the profile and answers it."""
        request, trace, summary = pb.StopProfileRequest(epoch=epoch), bytearray(), pb.ProfileSummary()
        async for part in self._streamed("StopProfile", self._stub.StopProfile, request, _PROFILE_TIMEOUT_S):
            trace += part.trace
            if len(trace) > MAX_MESSAGE_BYTES:
                text = f"the worker's profile is larger than {MAX_MESSAGE_BYTES} bytes: profile fewer steps"
                raise StepwireError("WORKER_FAILED", text)
            if part.HasField("summary"):
                summary = part.summary
        return rank_profile(summary, bytes(trace))

    async def prepare_grammar(self, epoch: int, prepared: PreparedGrammar) -> None:
        """Makes a grammar known."""
        request = pb.PrepareGrammarRequest(
            epoch=epoch,
            grammar_key=prepared.key,
            grammar=prepared.grammar,
            live_grammar_keys=prepared.live_keys,
            revision=prepared.revision,
        )
        await self._unary("PrepareGrammar", self._stub.PrepareGrammar, request, _GRAMMAR_TIMEOUT_S)

    def encode_step(self, plan: StepPlan, epoch: int) -> bytes:
        """A step as it goes over the wire: the same for all workers of an epoch."""
        return pb.ExecuteModelRequest(step=step_message(plan, epoch)).SerializeToString()

    async def open_stream(self, epoch: int) -> "GrpcStepStream":
        """Opens the step stream of an epoch in which no step was sent."""
        call = self._execute_model(timeout=None)
        stream = GrpcStepStream(call, epoch)
        await stream.open()
        return stream

    async def close(self) -> None:
        """Closes the connection."""
        await self._channel.close()

    async def _unary(self, method: str, call: Callable[..., Awaitable[Any]], request: object, timeout_s: float) -> Any:
        with self._call_span(method) as metadata:
            return await call(request, timeout=timeout_s, metadata=metadata)

    async def _streamed(
        self, method: str, call: Callable[..., Any], request: object, timeout_s: float
    ) -> AsyncIterator[Any]:
        with self._call_span(method) as metadata:
            responses = call(request, timeout=timeout_s, metadata=metadata)
            try:
                async for response in responses:
                    yield response
            finally:
                responses.cancel()

    @contextmanager
    def _call_span(self, method: str) -> Any:
        """Metadata for a call; turns its failure into a StepwireError, and its end into a span's."""
        name = f"stepwire.v1.WorkerService/{method}"
        # Not recorded, it is still the caller's: the worker's log then names the same trace.
        span = trace.get_current_span()
        if span.is_recording():
            attributes = {names.RPC_SYSTEM: "grpc", names.RPC_METHOD: name, names.WORKER: self.address}
            span = self._tracer.start_span(name, kind=SpanKind.CLIENT, attributes=attributes)
        metadata: list[tuple[str, str]] = []
        inject(span, metadata)
        code = grpc.StatusCode.CANCELLED
        try:
            yield tuple(metadata)
            code = grpc.StatusCode.OK
        except grpc.RpcError as error:
            code = error.code()
            meaning = from_rpc_error(error)
            if meaning.metadata.get("grpc_code") == grpc.StatusCode.CANCELLED.name:
                # Nobody here cancelled it: that comes as CancelledError. A server ends its calls so when it goes away.
                text = f"the worker at {self.address} ended the call ({meaning.message}): it goes away"
                meaning = StepwireError("WORKER_FAILED", text, meaning.metadata)
            raise meaning from error
        except grpc.aio.UsageError as error:
            # Nothing else is used wrongly here but what is closed: the model was unloaded meanwhile.
            raise self._closed() from error
        except asyncio.CancelledError:
            # gRPC cancels whoever waits on a connection that is closed; that is no cancellation of the task.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise self._closed() from None
        finally:
            _end(span, code)

    def _closed(self) -> StepwireError:
        return StepwireError("CANCELLED", f"the worker at {self.address} serves this model no more")


def _end(span: Span, code: grpc.StatusCode) -> None:
    if span.is_recording():
        end_rpc_span(span, code)


class GrpcStepStream:
    """The step stream to one worker."""

    def __init__(self, call: Any, epoch: int) -> None:
        self._call = call
        self._epoch = epoch
        self._is_cancelled = False

    async def open(self) -> None:
        """Exchanges the first messages. Raises StepwireError."""
        try:
            async with asyncio.timeout(_OPEN_TIMEOUT_S):
                opening = pb.ExecuteModelRequest(open=pb.OpenStream(epoch=self._epoch, last_step_id=0))
                await self._write(opening.SerializeToString())
                first = await self._read()
        except TimeoutError:
            self.cancel()
            text = f"the worker did not open the step stream within {_OPEN_TIMEOUT_S:g} s"
            raise StepwireError("WORKER_FAILED", text) from None
        if first.WhichOneof("message") != "open":
            raise StepwireError("WORKER_FAILED", "the worker's first message on the step stream is not `open`")

    async def send(self, step: bytes) -> None:
        """Sends a step, encoded."""
        await self._write(step)

    async def receive(self) -> tuple[StepResult, StepTimings]:
        """The next result."""
        result = await self.receive_message()
        return step_result(result), step_timings(result.timings)

    async def send_message(self, step: pb.Step) -> None:
        """Sends a step as it stands."""
        await self._write(pb.ExecuteModelRequest(step=step).SerializeToString())

    async def receive_message(self) -> pb.StepResult:
        """The next result, as it came."""
        return (await self._read()).result

    def cancel(self) -> None:
        """Ends the stream; calls in progress raise StepwireError."""
        self._is_cancelled = True
        self._call.cancel()

    async def _write(self, message: bytes) -> None:
        try:
            await self._call.write(message)
        except asyncio.CancelledError:
            self._raise_if_closed()
            raise
        except grpc.RpcError as error:
            # Of a call that has just ended a write knows no cause; the call's own status does.
            raise await self._meaning(_lost(error)) from error
        except Exception as error:
            if not self._call.done():
                raise
            # gRPC says no more than that the call is over.
            raise await self._meaning(StepwireError("WORKER_FAILED", _ENDED)) from error

    async def _read(self) -> pb.ExecuteModelResponse:
        try:
            response = await self._call.read()
        except asyncio.CancelledError:
            self._raise_if_closed()
            raise
        except grpc.RpcError as error:
            raise await self._meaning(_lost(error)) from error
        if response is grpc.aio.EOF:
            raise await self._meaning(StepwireError("WORKER_FAILED", _ENDED))
        message: pb.ExecuteModelResponse = response
        return message

    def _raise_if_closed(self) -> None:
        """gRPC cancels whoever waits on a call that was cancelled; that is no cancellation of the task."""
        task = asyncio.current_task()
        if self._is_cancelled and task is not None and not task.cancelling():
            raise StepwireError("CANCELLED", "the step stream was closed") from None

    async def _meaning(self, otherwise: StepwireError) -> StepwireError:
        """What the worker said, or `otherwise` where nothing comes."""
        try:
            return await asyncio.wait_for(self._why_ended(), _STATUS_TIMEOUT_S)
        except TimeoutError:
            return otherwise

    async def _why_ended(self) -> StepwireError:
        code, details = await self._call.code(), await self._call.details()
        while (code, details) == _OF_A_WRITE:
            # The call had ended, and that is all the write could know: what the worker said is about to replace it.
            await asyncio.sleep(_STATUS_EVERY_S)
            code, details = await self._call.code(), await self._call.details()
        details = details or _ENDED
        if code is grpc.StatusCode.OK:
            return StepwireError("WORKER_FAILED", details)
        trailing = await self._call.trailing_metadata()
        initial = await self._call.initial_metadata()
        return _lost(grpc.aio.AioRpcError(code, initial, trailing, details=details))


def _lost(error: grpc.RpcError) -> StepwireError:
    """What a broken stream means: the worker's own error, or that its process is gone."""
    meaning = from_rpc_error(error)
    if "grpc_code" not in meaning.metadata:
        return meaning
    return StepwireError(
        "WORKER_FAILED",
        f"the connection to the worker broke ({meaning.message}): its process was killed, crashed, or lost its "
        "network; its log may say why",
        meaning.metadata,
    )
