"""What a step stream says when it breaks, and a connection that is closed."""

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc.aio import Metadata
from grpc_status import rpc_status

from scheduler_service.rpc import worker_client
from scheduler_service.rpc.worker_client import GrpcStepStream, WorkerClient
from stepwire.rpc.errors import StepwireError, to_status
from stepwire.telemetry.trace import get_tracer
from stepwire.v1 import worker_pb2 as pb
from stepwire.v1 import worker_pb2_grpc


class EndedCall:
    """A call whose end a write meets before what the worker said of it is there."""

    def __init__(self, said: StepwireError | None) -> None:
        self._status = None if said is None else rpc_status.to_status(to_status(said))
        self._num_asked = 0

    async def write(self, message: bytes) -> None:
        raise grpc.aio.AioRpcError(await self.code(), Metadata(), Metadata(), await self.details())

    async def read(self) -> object:
        raise grpc.aio.AioRpcError(await self.code(), Metadata(), Metadata(), await self.details())

    async def code(self) -> grpc.StatusCode:
        self._num_asked += 1
        return self._status.code if self._is_there else grpc.StatusCode.INTERNAL  # type: ignore[union-attr]

    async def details(self) -> str:
        return self._status.details if self._is_there else "Internal error from Core"  # type: ignore[union-attr]

    @property
    def _is_there(self) -> bool:
        return self._status is not None and self._num_asked > 3

    async def initial_metadata(self) -> Metadata:
        return Metadata()

    async def trailing_metadata(self) -> Metadata:
        return Metadata(*self._status.trailing_metadata)  # type: ignore[union-attr]


@pytest.mark.parametrize("way", ["send", "receive"])
async def test_a_stream_that_has_just_ended_says_why(way: str) -> None:
    """Or a worker's own error would be taken for the loss of its process, and its request not be blamed."""
    stream = GrpcStepStream(EndedCall(StepwireError("OUT_OF_MEMORY", "12 bytes short")), 1)
    with pytest.raises(StepwireError, match="12 bytes short") as caught:
        await (stream.send(b"") if way == "send" else stream.receive())
    assert caught.value.reason == "OUT_OF_MEMORY"


async def test_one_whose_worker_has_said_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_client, "_STATUS_TIMEOUT_S", 0.05)
    with pytest.raises(StepwireError, match="connection to the worker broke") as caught:
        await GrpcStepStream(EndedCall(None), 1).send(b"")
    assert caught.value.metadata["grpc_code"] == "INTERNAL"


async def test_calls_on_a_connection_that_is_closed_fail_as_others_do() -> None:
    """As when a model is unloaded while an operator profiles it."""
    # It listens and never answers, so that calls wait: nothing is accepted.
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = WorkerClient(f"127.0.0.1:{server.getsockname()[1]}", key=None, tracer=get_tracer(None))
        waiting = asyncio.create_task(client.get_status(timeout_s=10))
        await asyncio.sleep(0.1)
        await client.close()
        for call in (waiting, client.get_status(timeout_s=1), client.stop_profile(1)):
            with pytest.raises(StepwireError, match="serves this model no more") as caught:
                await call
            assert caught.value.reason == "CANCELLED"


class SilentCall(EndedCall):
    """A call that ends in order, and of which nothing is said beyond what a write made of it."""

    async def read(self) -> object:
        return grpc.aio.EOF


async def test_one_that_ends_without_a_word_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_client, "_STATUS_TIMEOUT_S", 0.05)
    async with asyncio.timeout(5):
        with pytest.raises(StepwireError, match="the worker ended the step stream"):
            await GrpcStepStream(SilentCall(None), 1).receive()


class Leaving(worker_pb2_grpc.WorkerServiceServicer):
    """A worker whose server ends its calls, as gRPC does with those of a server that is stopped."""

    async def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.GetStatusResponse:
        await context.abort(grpc.StatusCode.CANCELLED)
        raise AssertionError

    async def LoadModel(self, request: pb.LoadModelRequest, context: Any) -> AsyncIterator[pb.LoadModelResponse]:
        yield pb.LoadModelResponse(stage="weights")
        await context.abort(grpc.StatusCode.CANCELLED)


async def test_a_call_that_the_worker_cancels_is_the_workers_loss() -> None:
    """Or a request that waits for it would be told that it was cancelled, and go to no other replica."""
    server = grpc.aio.server()
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(Leaving(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    client = WorkerClient(f"127.0.0.1:{port}", key=None, tracer=get_tracer(None))
    with pytest.raises(StepwireError, match=f"the worker at 127.0.0.1:{port} ended the call") as caught:
        await client.get_status(timeout_s=5)
    assert caught.value.reason == "WORKER_FAILED"
    with pytest.raises(StepwireError, match="ended the call"):
        async for _ in client.load_model(1, "path", "auto", "auto", "auto"):
            pass
    await client.close()
    await server.stop(None)
