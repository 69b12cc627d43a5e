"""A worker service over real gRPC with a fake runtime, and short ways to walk it through its phases."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
from opentelemetry.trace import TracerProvider

from stepwire.rpc.channel import create_channel
from stepwire.v1 import worker_pb2 as pb
from stepwire.v1.worker_pb2_grpc import WorkerServiceStub
from tests.support.fake_runtime import FakeRuntime, fingerprint_of
from worker_service.main import MAX_MESSAGE_BYTES, ExitCode, Worker
from worker_service.settings import WorkerSettings

if TYPE_CHECKING:
    from stepwire.v1.worker_pb2_grpc import WorkerServiceAsyncStub

MODEL = "/models/tiny"
TIMEOUT_S = 30.0


@dataclass
class RunningWorker:
    """A worker and a channel to it."""

    worker: Worker
    runtime: FakeRuntime
    channel: grpc.aio.Channel
    stub: "WorkerServiceAsyncStub"
    port: int

    async def init_device(
        self, epoch: int = 1, scheduler_id: str = "s", rendezvous: str = "", **place: int
    ) -> pb.InitDeviceResponse:
        place = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, **place}
        request = pb.InitDeviceRequest(epoch=epoch, scheduler_id=scheduler_id, rendezvous=rendezvous, **place)
        return await self.stub.InitDevice(request, timeout=TIMEOUT_S)

    async def load_model(
        self, epoch: int = 1, path: str = MODEL, dtype: str = "auto", quantize: str = "", kv: str = ""
    ) -> list[pb.LoadModelResponse]:
        request = pb.LoadModelRequest(epoch=epoch, model_path=path, dtype=dtype, quantize=quantize, kv_cache_dtype=kv)
        return [message async for message in self.stub.LoadModel(request, timeout=TIMEOUT_S)]

    async def measure(self, epoch: int = 1, tokens: int = 64, sequences: int = 8) -> Any:
        request = pb.DetermineAvailableMemoryRequest(
            epoch=epoch, max_step_token_count=tokens, max_sequence_count=sequences
        )
        return await self.stub.DetermineAvailableMemory(request, timeout=TIMEOUT_S)

    async def initialize_cache(self, epoch: int = 1, blocks: int = 32, **sizes: int) -> pb.InitializeCacheResponse:
        sizes = {"block_size": 16, "max_model_len": 256, **sizes}
        request = pb.InitializeCacheRequest(epoch=epoch, block_count=blocks, **sizes)
        return await self.stub.InitializeCache(request, timeout=TIMEOUT_S)

    async def warm_up(self, epoch: int = 1, tokens: int = 64, sequences: int = 8) -> list[pb.WarmUpResponse]:
        request = pb.WarmUpRequest(epoch=epoch, max_step_token_count=tokens, max_sequence_count=sequences)
        return [message async for message in self.stub.WarmUp(request, timeout=TIMEOUT_S)]

    async def reset(self, epoch: int, to: int = pb.PHASE_CACHED, scheduler_id: str = "s") -> pb.ResetResponse:
        request = pb.ResetRequest(epoch=epoch, scheduler_id=scheduler_id, to=pb.Phase.ValueType(to))
        return await self.stub.Reset(request, timeout=TIMEOUT_S)

    async def status(self) -> pb.GetStatusResponse:
        return await self.stub.GetStatus(pb.GetStatusRequest(), timeout=TIMEOUT_S)

    async def walk_to_ready(self, epoch: int = 1) -> None:
        await self.init_device(epoch)
        await self.load_model(epoch)
        await self.measure(epoch)
        await self.initialize_cache(epoch)
        await self.warm_up(epoch)

    async def open_stream(self, epoch: int = 1, last_step_id: int = 0) -> "Stream":
        stream = Stream(self.stub.ExecuteModel(timeout=30.0))
        await stream.open(epoch, last_step_id)
        return stream


class Stream:
    """A step stream, driven message by message. Errors are grpc.aio.AioRpcError."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.opened: pb.OpenStream | None = None

    async def open(self, epoch: int, last_step_id: int) -> None:
        request = pb.ExecuteModelRequest(open=pb.OpenStream(epoch=epoch, last_step_id=last_step_id))
        await self.call.write(request)
        self.opened = (await self._read()).open

    async def send(self, step: pb.Step) -> None:
        await self.call.write(pb.ExecuteModelRequest(step=step))

    async def receive(self) -> pb.StepResult:
        return (await self._read()).result

    async def execute(self, step: pb.Step) -> pb.StepResult:
        await self.send(step)
        return await self.receive()

    async def error(self) -> grpc.aio.AioRpcError:
        """Reads what is left, to the error that ends the stream."""
        try:
            while True:
                await self._read()
        except grpc.aio.AioRpcError as error:
            return error

    async def _read(self) -> pb.ExecuteModelResponse:
        message = await self.call.read()
        if message is grpc.aio.EOF:
            code = await self.call.code()
            if code is grpc.StatusCode.OK:
                raise EOFError("the stream ended without an error")
            raise grpc.aio.AioRpcError(
                code,
                await self.call.initial_metadata(),
                await self.call.trailing_metadata(),
                details=await self.call.details(),
            )
        return message


def new_sequence(sequence_id: int, tokens: Sequence[int], **fields: Any) -> pb.NewSequence:
    """A sequence with a prompt and one block."""
    sampling = fields.pop("sampling", {})
    values = {
        "sequence_id": sequence_id,
        "request_id": f"r{sequence_id}",
        "token_ids": tokens,
        "prompt_token_count": len(tokens),
        "sampling": pb.SequenceSampling(**{"top_p": 1.0, "repetition_penalty": 1.0, "typical_p": 1.0, **sampling}),
        "block_ids": [sequence_id],
        **fields,
    }
    return pb.NewSequence(**values)


def first_step(step_id: int, *new: pb.NewSequence, epoch: int = 1) -> pb.Step:
    """A step that computes the whole prompts of new sequences."""
    return pb.Step(
        epoch=epoch,
        step_id=step_id,
        new_sequences=new,
        sequence_ids=[sequence.sequence_id for sequence in new],
        scheduled_token_counts=[len(sequence.token_ids) for sequence in new],
        computed_token_counts=[0] * len(new),
        new_block_counts=[0] * len(new),
    )


def decode_step(step_id: int, computed: dict[int, int], *, epoch: int = 1, **fields: Any) -> pb.Step:
    """A step that computes one token of each known sequence."""
    return pb.Step(
        epoch=epoch,
        step_id=step_id,
        sequence_ids=list(computed),
        scheduled_token_counts=[1] * len(computed),
        computed_token_counts=list(computed.values()),
        new_block_counts=[0] * len(computed),
        **fields,
    )


@asynccontextmanager
async def running_worker(
    *, runtime: FakeRuntime | None = None, tracer_provider: TracerProvider | None = None, **settings: Any
) -> AsyncIterator[RunningWorker]:
    """A worker on a free port of this machine, and its end."""
    runtime = runtime or FakeRuntime()
    worker = Worker(
        WorkerSettings(port=0, **settings),
        tracer_provider,
        lambda _settings: runtime,
        fingerprint_of=fingerprint_of,
    )
    port = await worker.start()
    channel = create_channel(f"127.0.0.1:{port}", max_message_bytes=MAX_MESSAGE_BYTES, key=settings.get("cluster_key"))
    try:
        yield RunningWorker(worker, runtime, channel, WorkerServiceStub(channel), port)
    finally:
        for gate in runtime.gates.values():
            gate.set()
        await channel.close()
        await worker.shut_down(ExitCode.STOPPED)
