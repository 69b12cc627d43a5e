"""Asks servers for their health by grpc.health.v1."""

import asyncio

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from stepwire.rpc.channel import create_channel

_MAX_MESSAGE_BYTES = 65_536
_RETRY_S = 0.05


async def wait_until_serving(target: str, service: str = "") -> None:
    """Returns when the server says that it serves, however long that takes."""
    async with create_channel(target, max_message_bytes=_MAX_MESSAGE_BYTES) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while True:
            try:
                async for answer in stub.Watch(health_pb2.HealthCheckRequest(service=service)):
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        return
            except grpc.aio.AioRpcError:
                # Not listening yet.
                await asyncio.sleep(_RETRY_S)


async def ask(target: str, service: str, timeout_s: float) -> str:
    """The server's status, such as "SERVING". Raises grpc.RpcError when there is no answer."""
    async with create_channel(target, max_message_bytes=_MAX_MESSAGE_BYTES) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s)
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
