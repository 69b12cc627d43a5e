"""What a server's calls look like to clients and in traces, over real gRPC, however they end."""

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind
from opentelemetry.trace import StatusCode as SpanStatus
from structlog.testing import capture_logs

from stepwire.rpc.channel import create_channel
from stepwire.rpc.errors import StepwireError, from_rpc_error
from stepwire.rpc.server import add_standard_services, bind, create_server
from stepwire.telemetry import names
from stepwire.telemetry.trace import current_span_context

SERVICE = "test.Probe"
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
KINDS = ["UnaryUnary", "UnaryStream", "StreamUnary", "StreamStream", "Writer"]
# What gRPC says of a call that had ended when a request was written; what the server said of it comes after.
OF_A_WRITE = "Internal error from Core"
STREAMED = ["UnaryStream", "StreamStream", "Writer"]


class Probe:
    """Handlers of every shape that all do what `script` says, and count how they are left."""

    def __init__(self, script: Callable[[], Awaitable[None]]) -> None:
        self.script = script
        self.started = asyncio.Event()
        self.left = asyncio.Event()
        self.seen_span_id = 0

    async def _work(self) -> None:
        self.seen_span_id = current_span_context().span_id
        self.started.set()
        await self.script()

    async def unary_unary(self, request: bytes, context: Any) -> bytes:
        try:
            await self._work()
            return b"done"
        finally:
            self.left.set()

    async def stream_unary(self, requests: Any, context: Any) -> bytes:
        return await self.unary_unary(b"", context)

    async def unary_stream(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        try:
            yield b"first"
            await self._work()
            yield b"last"
        finally:
            self.left.set()

    async def stream_stream(self, requests: Any, context: Any) -> AsyncIterator[bytes]:
        async for message in self.unary_stream(b"", context):
            yield message

    async def writer(self, request: bytes, context: Any) -> None:
        try:
            await context.write(b"first")
            await self._work()
            await context.write(b"last")
        finally:
            self.left.set()

    def handlers(self) -> grpc.GenericRpcHandler:
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "UnaryUnary": grpc.unary_unary_rpc_method_handler(self.unary_unary),
                "UnaryStream": grpc.unary_stream_rpc_method_handler(self.unary_stream),
                "StreamUnary": grpc.stream_unary_rpc_method_handler(self.stream_unary),
                "StreamStream": grpc.stream_stream_rpc_method_handler(self.stream_stream),
                "Writer": grpc.unary_stream_rpc_method_handler(self.writer),
            },
        )


class Exporter(InMemorySpanExporter):
    def __init__(self) -> None:
        super().__init__()
        self.exported = asyncio.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.exported.set()
        return super().export(spans)


class Rig:
    """A server with a probe, a channel to it, and the spans that it ended."""

    def __init__(self, address: str, channel: grpc.aio.Channel, exporter: Exporter, server: grpc.aio.Server) -> None:
        self.address = address
        self.channel = channel
        self.exporter = exporter
        self.server = server

    def call(self, kind: str, **kwargs: Any) -> Any:
        path = f"/{SERVICE}/{kind}"
        if kind == "UnaryUnary":
            return self.channel.unary_unary(path)(b"", **kwargs)
        if kind == "StreamUnary":
            return self.channel.stream_unary(path)(iter([b""]), **kwargs)
        if kind == "StreamStream":
            return self.channel.stream_stream(path)(iter([b""]), **kwargs)
        return self.channel.unary_stream(path)(b"", **kwargs)

    async def outcome(self, kind: str, **kwargs: Any) -> list[bytes]:
        call = self.call(kind, **kwargs)
        try:
            if kind in STREAMED:
                return [message async for message in call]
            return [await call]
        except grpc.aio.AioRpcError as error:
            if error.details() != OF_A_WRITE:
                raise
        async with asyncio.timeout(20):
            while await call.details() == OF_A_WRITE:  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0.01)
        raise grpc.aio.AioRpcError(
            await call.code(), await call.initial_metadata(), await call.trailing_metadata(), await call.details()
        )

    async def span(self) -> ReadableSpan:
        async with asyncio.timeout(20):
            await self.exporter.exported.wait()
        (span,) = self.exporter.get_finished_spans()
        return span


@asynccontextmanager
async def running(probe: Probe, *, server_key: str | None = None, key: str | None = None) -> AsyncIterator[Rig]:
    exporter = Exporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    server = create_server(tracer_provider=provider, max_message_bytes=1 << 20, key=server_key)
    server.add_generic_rpc_handlers([probe.handlers()])
    add_standard_services(server, [SERVICE])
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    channel = create_channel(f"127.0.0.1:{port}", max_message_bytes=1 << 20, key=key)
    try:
        yield Rig(f"127.0.0.1:{port}", channel, exporter, server)
    finally:
        await channel.close()
        await server.stop(0)


async def nothing() -> None:
    pass


async def forever() -> None:
    await asyncio.Event().wait()


def raising(error: BaseException) -> Callable[[], Awaitable[None]]:
    async def script() -> None:
        raise error

    return script


def assert_span(span: ReadableSpan, kind: str, code: str, status: SpanStatus) -> None:
    assert span.name == f"{SERVICE}/{kind}"
    assert span.kind is SpanKind.SERVER
    assert span.attributes is not None
    assert span.attributes[names.RPC_SYSTEM] == "grpc"
    assert span.attributes[names.RPC_METHOD] == f"{SERVICE}/{kind}"
    assert span.attributes[names.RPC_STATUS] == code
    assert span.status.status_code is status


@pytest.mark.parametrize("kind", KINDS)
async def test_a_call_that_succeeds(kind: str) -> None:
    probe = Probe(nothing)
    async with running(probe) as rig:
        messages = await rig.outcome(kind)
        assert messages == ([b"first", b"last"] if kind in STREAMED else [b"done"])
        span = await rig.span()
    assert_span(span, kind, "OK", SpanStatus.UNSET)
    assert span.context is not None
    assert probe.seen_span_id == span.context.span_id
    assert not current_span_context().is_valid


@pytest.mark.parametrize("kind", KINDS)
async def test_the_caller_is_the_parent(kind: str) -> None:
    async with running(Probe(nothing)) as rig:
        await rig.outcome(kind, metadata=(("traceparent", TRACEPARENT), ("baggage", "a=b")))
        span = await rig.span()
    assert span.parent is not None and span.parent.is_remote
    assert f"{span.parent.trace_id:032x}-{span.parent.span_id:016x}" in TRACEPARENT


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("reason", "status"), [("PROMPT_TOO_LONG", SpanStatus.UNSET), ("MODEL_NOT_READY", SpanStatus.ERROR)]
)
async def test_a_handler_that_refuses(kind: str, reason: str, status: SpanStatus) -> None:
    refusal = StepwireError(reason, "8 tokens are more than 4", {"limit": "4"}, 1.5)
    async with running(Probe(raising(refusal))) as rig:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.outcome(kind)
        span = await rig.span()
    error = from_rpc_error(caught.value)
    assert caught.value.code() is refusal.code
    assert (error.reason, error.message, error.metadata) == (reason, refusal.message, {"limit": "4"})
    assert error.retry_after_s == 1.5
    assert_span(span, kind, refusal.code.name, status)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_handler_that_raises(kind: str) -> None:
    failure = KeyError("a secret")
    with capture_logs() as records:
        async with running(Probe(raising(failure))) as rig:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await rig.outcome(kind)
            span = await rig.span()
    assert [(record["event"], record["exc_info"]) for record in records] == [("handler_failed", failure)]
    error = from_rpc_error(caught.value)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert error.reason == "INTERNAL"
    assert "secret" not in error.message
    assert span.context is not None
    assert error.metadata == {"trace_id": f"{span.context.trace_id:032x}"}
    assert_span(span, kind, "INTERNAL", SpanStatus.ERROR)
    assert [event.name for event in span.events] == ["exception"]


async def test_an_error_out_of_a_task_group() -> None:
    refusal = StepwireError("QUEUE_FULL", "full")
    async with running(Probe(raising(ExceptionGroup("tasks", [ExceptionGroup("inner", [refusal])])))) as rig:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.outcome("UnaryUnary")
    assert from_rpc_error(caught.value).reason == "QUEUE_FULL"


@pytest.mark.parametrize("kind", KINDS)
async def test_a_client_that_cancels(kind: str) -> None:
    probe = Probe(forever)
    async with running(probe) as rig:
        call = rig.call(kind)
        await probe.started.wait()
        call.cancel()
        async with asyncio.timeout(20):
            await probe.left.wait()
        span = await rig.span()
    assert_span(span, kind, "CANCELLED", SpanStatus.UNSET)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_deadline_that_passes(kind: str) -> None:
    probe = Probe(forever)
    async with running(probe) as rig:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.outcome(kind, timeout=0.5)
        async with asyncio.timeout(20):
            await probe.left.wait()
        span = await rig.span()
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert_span(span, kind, "DEADLINE_EXCEEDED", SpanStatus.ERROR)


@pytest.mark.parametrize("kind", ["UnaryUnary", "UnaryStream", "Writer"])
async def test_a_deadline_that_passes_before_the_handler_begins(kind: str) -> None:
    """As it does when the event loop runs late: the call has come, and gRPC never hands it over."""
    probe = Probe(nothing)
    codes: list[grpc.StatusCode] = []

    def call() -> None:
        try:
            calls = channel.unary_unary if kind == "UnaryUnary" else channel.unary_stream
            answer = calls(f"/{SERVICE}/{kind}")(b"", timeout=0.1, metadata=(("traceparent", TRACEPARENT),))
            list(answer)
        except grpc.RpcError as error:
            codes.append(error.code())

    async with running(probe) as rig:
        with grpc.insecure_channel(rig.address) as channel:
            await asyncio.to_thread(grpc.channel_ready_future(channel).result, 20)
            thread = threading.Thread(target=call)
            thread.start()
            thread.join()  # Here, and not beside the loop, which is to stand still.
            span = await rig.span()
    assert codes == [grpc.StatusCode.DEADLINE_EXCEEDED]
    assert not probe.started.is_set()
    assert_span(span, kind, "CANCELLED", SpanStatus.UNSET)
    assert span.attributes is not None and span.attributes[names.OUTCOME] == names.OUTCOME_NOT_BEGUN
    assert span.parent is not None and f"{span.parent.span_id:016x}" in TRACEPARENT


@pytest.mark.parametrize("kind", STREAMED)
async def test_a_stream_that_is_abandoned(kind: str) -> None:
    probe = Probe(forever)
    async with running(probe) as rig:
        call = rig.call(kind)
        assert await call.read() == b"first"
        await probe.started.wait()
        await rig.channel.close()  # No cancel: the client just goes.
        async with asyncio.timeout(20):
            await probe.left.wait()
        span = await rig.span()
    assert_span(span, kind, "CANCELLED", SpanStatus.UNSET)


@pytest.mark.parametrize("kind", STREAMED)
async def test_a_stream_that_is_never_read(kind: str) -> None:
    """The handler blocks on flow control, in its write, until the call is cancelled."""
    probe = Probe(nothing)
    chunk = b"x" * 60_000

    async def flood(request: bytes, context: Any) -> AsyncIterator[bytes]:
        try:
            while True:
                probe.started.set()
                yield chunk
        finally:
            probe.left.set()

    async def flooding_writer(request: bytes, context: Any) -> None:
        try:
            while True:
                probe.started.set()
                await context.write(chunk)
        finally:
            probe.left.set()

    probe.unary_stream = probe.stream_stream = flood  # type: ignore[method-assign,assignment]
    probe.writer = flooding_writer  # type: ignore[method-assign]
    async with running(probe) as rig:
        call = rig.call(kind)
        await probe.started.wait()
        call.cancel()
        async with asyncio.timeout(20):
            await probe.left.wait()
        span = await rig.span()
    assert_span(span, kind, "CANCELLED", SpanStatus.UNSET)


async def test_a_server_that_stops_ends_its_spans() -> None:
    probe = Probe(forever)
    async with running(probe) as rig:
        call = rig.call("UnaryStream")
        await probe.started.wait()
        await rig.server.stop(0)
        span = await rig.span()
        with pytest.raises(grpc.aio.AioRpcError):
            while await call.read() is not grpc.aio.EOF:
                pass
    assert_span(span, "UnaryStream", "CANCELLED", SpanStatus.UNSET)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("key", [None, "", "wrong", "right "])
async def test_a_wrong_key_is_refused(kind: str, key: str | None) -> None:
    probe = Probe(nothing)
    async with running(probe, server_key="right", key=key) as rig:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.outcome(kind)
        span = await rig.span()
    assert from_rpc_error(caught.value).reason == "UNAUTHENTICATED"
    assert_span(span, kind, "UNAUTHENTICATED", SpanStatus.UNSET)
    assert not probe.started.is_set()


@pytest.mark.parametrize("kind", KINDS)
async def test_the_right_key_is_accepted(kind: str) -> None:
    async with running(Probe(nothing), server_key="right", key="right") as rig:
        metadata = (("traceparent", TRACEPARENT),)
        assert await rig.outcome(kind, metadata=metadata)
        assert (await rig.span()).parent is not None


async def test_health_needs_no_key_and_makes_no_span() -> None:
    async with running(Probe(nothing), server_key="right") as rig:
        stub = health_pb2_grpc.HealthStub(rig.channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=5)
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert not rig.exporter.get_finished_spans()
        await stub.Check(health_pb2.HealthCheckRequest(), metadata=(("traceparent", TRACEPARENT),), timeout=5)
        assert (await rig.span()).name == "grpc.health.v1.Health/Check"


async def test_an_unknown_method_is_unimplemented() -> None:
    async with running(Probe(nothing)) as rig:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.channel.unary_unary(f"/{SERVICE}/Nothing")(b"", timeout=5)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("kind", KINDS)
async def test_what_a_refused_call_held_is_free_without_the_garbage_collector(kind: str) -> None:
    class Held:
        """Stands for a large request."""

    seen: list[weakref.ref[Held]] = []

    async def script() -> None:
        held = Held()
        seen.append(weakref.ref(held))
        raise StepwireError("FIELD_INVALID", "no")

    gc.disable()
    try:
        async with running(Probe(script)) as rig:
            with pytest.raises(grpc.aio.AioRpcError):
                await rig.outcome(kind)
            await rig.span()
            async with asyncio.timeout(20):
                # The call may have ended for its caller before it has for the server.
                while seen[0]() is not None:  # noqa: ASYNC110 - nothing tells of it
                    await asyncio.sleep(0.005)
    finally:
        gc.enable()
