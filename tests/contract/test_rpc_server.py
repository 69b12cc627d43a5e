"""Servers and channels over real sockets: ports, health, reflection, sizes, keepalive."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from stepwire.rpc.channel import create_channel, create_sync_channel, key_metadata
from stepwire.rpc.run import run
from stepwire.rpc.server import AddressInUse, BindError, HealthServicer, add_standard_services, bind, create_server

SERVICE = "stepwire.v1.InferenceService"
LIMIT = 10_000


async def echo(request: bytes, context: Any) -> bytes:
    return request


@asynccontextmanager
async def running(key: str | None = None) -> AsyncIterator[tuple[int, HealthServicer]]:
    server = create_server(tracer_provider=None, max_message_bytes=LIMIT, key=key)
    handler = grpc.unary_unary_rpc_method_handler(echo)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test.Echo", {"Echo": handler})])
    health = add_standard_services(server, [SERVICE])
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    try:
        yield port, health
    finally:
        await server.stop(0)


async def test_a_port_is_taken_once() -> None:
    async with running() as (port, _):
        other = create_server(tracer_provider=None, max_message_bytes=LIMIT)
        with pytest.raises(AddressInUse, match=rf"127\.0\.0\.1:{port} is in use .*--port"):
            bind(other, "127.0.0.1", port)
        await other.stop(0)


async def test_a_port_held_by_something_else_is_named() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        server = create_server(tracer_provider=None, max_message_bytes=LIMIT)
        with pytest.raises(AddressInUse):
            bind(server, "127.0.0.1", held.getsockname()[1])
        await server.stop(0)


async def test_an_address_of_another_machine_is_named() -> None:
    server = create_server(tracer_provider=None, max_message_bytes=LIMIT)
    with pytest.raises(BindError, match=r"192\.0\.2\.1:5") as caught:
        bind(server, "192.0.2.1", 5)
    assert not isinstance(caught.value, AddressInUse)
    await server.stop(0)


async def test_health_starts_as_not_serving_and_changes() -> None:
    async with running() as (port, health), create_channel(f"127.0.0.1:{port}", max_message_bytes=LIMIT) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE), timeout=10)
        for name in ("", SERVICE):
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)
            assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        await health.set_all(serving=True)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        await health.enter_graceful_shutdown()
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Check(health_pb2.HealthCheckRequest(service="unknown"), timeout=5)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_server_that_does_not_serve_is_alive_all_the_same() -> None:
    async with running() as (port, health), create_channel(f"127.0.0.1:{port}", max_message_bytes=LIMIT) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for serving in (True, False):
            await health.set_all(serving=serving)
            answer = await stub.Check(health_pb2.HealthCheckRequest(service="live"), timeout=5)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_reflection_lists_the_services() -> None:
    async with running() as (port, _), create_channel(f"127.0.0.1:{port}", max_message_bytes=LIMIT) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        (answer,) = [answer async for answer in stub.ServerReflectionInfo(iter([request]), timeout=5)]
        found = {service.name for service in answer.list_services_response.service}
        assert found == {SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}


async def test_messages_are_bounded_on_both_sides() -> None:
    async with running() as (port, _):
        for limit in (LIMIT, 10 * LIMIT):
            async with create_channel(f"127.0.0.1:{port}", max_message_bytes=limit) as channel:
                call = channel.unary_unary("/test.Echo/Echo")
                assert await call(b"x" * LIMIT, timeout=5) == b"x" * LIMIT
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call(b"x" * (LIMIT + 1), timeout=5)
                assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_sync_channel_passes_its_key_with_the_call() -> None:
    async with running("secret") as (port, _):
        with create_sync_channel(f"127.0.0.1:{port}", max_message_bytes=LIMIT) as channel:
            call = channel.unary_unary("/test.Echo/Echo")
            answer = await asyncio.to_thread(call, b"a", timeout=5, metadata=[key_metadata("secret")])
            assert answer == b"a"
            with pytest.raises(grpc.RpcError):
                await asyncio.to_thread(call, b"a", timeout=5)


async def test_a_cancelled_call_with_a_key_is_cancelled_on_the_server() -> None:
    """Client interceptors would break this; the channel that adds a key must not."""
    left = asyncio.Event()
    started = asyncio.Event()

    async def wait(request: bytes, context: Any) -> bytes:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            left.set()
        return b""

    server = create_server(tracer_provider=None, max_message_bytes=LIMIT, key="k")
    handler = grpc.unary_unary_rpc_method_handler(wait)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test.Wait", {"Wait": handler})])
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    async with create_channel(f"127.0.0.1:{port}", max_message_bytes=LIMIT, key="k") as channel:

        async def caller() -> None:
            await channel.unary_unary("/test.Wait/Wait")(b"")

        task = asyncio.create_task(caller())
        await started.wait()
        task.cancel()
        async with asyncio.timeout(20):
            await left.wait()
        with pytest.raises(asyncio.CancelledError):
            await task
    await server.stop(0)


@pytest.mark.full
async def test_keepalive_pings_do_not_end_an_idle_call() -> None:
    """With the wrong server option a client that pings as ours does loses its call after a few pings."""
    async with running() as (port, health), create_channel(f"127.0.0.1:{port}", max_message_bytes=LIMIT) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=120)
        await watch.read()
        await asyncio.sleep(55)
        await health.set_all(serving=True)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING


def test_run_uses_uvloop_and_returns_the_exit_status() -> None:
    async def main() -> int:
        return 3 if type(asyncio.get_running_loop()).__module__.startswith("uvloop") else 4

    assert run(main()) == 3
