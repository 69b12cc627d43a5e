"""Server interceptors: tracing outermost, then the key, then errors.

Each replaces a handler by one coroutine around it. A streaming handler's messages are written from
the innermost coroutine, so that the ones around it cost nothing for a message, however many there
are. It also means that a stream that ends early closes its handler's generator at once, instead of
leaving that to the garbage collector: a handler cleans up in `finally`, and sees CancelledError
where it awaits or GeneratorExit where it yields.
"""

import asyncio
import hmac
import inspect
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from hashlib import sha256
from typing import Any, TypeAlias

import grpc
import structlog
from google.protobuf.message import DecodeError
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, Tracer, TracerProvider

from stepwire.rpc.deadlines import has_passed
from stepwire.rpc.errors import STATUS_DETAILS_KEY, StepwireError, invalid_message, to_status
from stepwire.telemetry import names
from stepwire.telemetry.trace import context_from_metadata, current_span, end_rpc_span, get_tracer, traceparent

# Whatever the call's shape: (request or request iterator, context) -> response, or None once all are written.
Behaviour = Callable[[Any, Any], Awaitable[Any]]
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
_Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]]"

_HEALTH_PREFIX = "/grpc.health.v1.Health/"

_CODE_OF_NUMBER = {code.value[0]: code for code in grpc.StatusCode}

_log = structlog.stdlib.get_logger(__name__)


class TracingInterceptor(grpc.aio.ServerInterceptor):
    """A SERVER span for each call, with the right status however the call ends, or if it never begins.

    Inside a handler the span is the current one. Calls of `names.UNTRACED_METHODS` get a span only
    when the caller sent a trace context.
    """

    def __init__(self, tracer_provider: TracerProvider | None) -> None:
        self._tracer = get_tracer(tracer_provider)

    async def intercept_service(self, continuation: _Continuation, details: grpc.HandlerCallDetails) -> Any:
        """Wraps the call's handler in a span."""
        handler = await continuation(details)
        behaviour = _behaviour_of(handler)
        method = details.method.lstrip("/")
        parent = context_from_metadata(details.invocation_metadata)
        if handler is None or behaviour is None or (not parent and method in names.UNTRACED_METHODS):
            return handler
        attributes: dict[str, str | bool] = {names.RPC_SYSTEM: "grpc", names.RPC_METHOD: method}
        if method in names.KEPT_METHODS:
            attributes[names.KEEP] = True

        arrival = _Arrival(self._tracer, method, parent, attributes)

        async def traced(request: Any, context: Any) -> Any:
            arrival.has_begun = True
            span = self._tracer.start_span(method, parent, kind=SpanKind.SERVER, attributes=attributes)
            token = otel_context.attach(trace.set_span_in_context(span, parent))
            timeout_s = context.time_remaining()
            code, text = grpc.StatusCode.UNKNOWN, ""
            try:
                response = await behaviour(request, context)
                code, text = _status_set(context)
                return response
            except grpc.aio.AbortError:
                code, text = _status_set(context)
                raise
            except (asyncio.CancelledError, grpc.aio.InternalError):
                # InternalError: a message could not be written because the client is gone.
                code = _why_ended(timeout_s, context.time_remaining())
                raise
            except Exception as error:
                text = repr(error)
                raise
            finally:
                otel_context.detach(token)
                end_rpc_span(span, code, text)

        return _rebuild(handler, traced)


class _Arrival:
    """A call from its arrival on. Dropped before its handler has begun, it records the span that that would have had:
    gRPC does so with a call whose client has left by then, or whose deadline is over, as when the event loop runs late.
    """

    __slots__ = ("_arrived_ns", "_attributes", "_method", "_parent", "_tracer", "has_begun")

    def __init__(self, tracer: Tracer, method: str, parent: Context, attributes: Mapping[str, str | bool]) -> None:
        self._arrived_ns = time.time_ns()
        self._tracer = tracer
        self._method = method
        self._parent = parent
        self._attributes = attributes
        self.has_begun = False

    def __del__(self) -> None:
        if not self.has_begun:
            told = {**self._attributes, names.OUTCOME: names.OUTCOME_NOT_BEGUN}
            span = self._tracer.start_span(
                self._method, self._parent, kind=SpanKind.SERVER, attributes=told, start_time=self._arrived_ns
            )
            # Of a client that left and a deadline that passed it cannot be told which it was.
            end_rpc_span(span, grpc.StatusCode.CANCELLED)


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """Refuses methods that begin with `prefix` without `authorization: Bearer <key>`; health checks need no key."""

    def __init__(self, key: str, prefix: str = "/") -> None:
        self._digest = _digest(f"Bearer {key}")
        self._prefix = prefix

    async def intercept_service(self, continuation: _Continuation, details: grpc.HandlerCallDetails) -> Any:
        """Replaces the call's handler by a refusal, unless the key is right."""
        handler = await continuation(details)
        method = details.method
        is_open = not method.startswith(self._prefix) or method.startswith(_HEALTH_PREFIX)
        if handler is None or is_open or self._accepts(details):
            return handler
        return _rebuild(handler, _refuse)

    def _accepts(self, details: grpc.HandlerCallDetails) -> bool:
        values = [value for key, value in details.invocation_metadata or () if key == "authorization"]
        # Digests, so that not even the key's length shows in the time taken.
        return len(values) == 1 and hmac.compare_digest(_digest(values[0]), self._digest)


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns what a handler raises into a status with details.

    StepwireError becomes its own status. Anything else is a defect: INTERNAL without its text,
    which goes to the log, once, with the traceback.
    """

    async def intercept_service(self, continuation: _Continuation, details: grpc.HandlerCallDetails) -> Any:
        """Wraps the call's handler."""
        handler = await continuation(details)
        behaviour = _behaviour_of(handler)
        if handler is None or behaviour is None:
            return handler

        # gRPC would answer UNKNOWN, without details, to what cannot be parsed; so it is handed the bytes on.
        parse = None if handler.request_streaming else handler.request_deserializer

        async def guarded(request: Any, context: Any) -> Any:
            try:
                if parse is not None:
                    request = _parsed(parse, request)
                return await behaviour(request, context)
            except (grpc.aio.AbortError, grpc.aio.InternalError):
                raise
            except Exception as error:
                end_with(context, _public_error(error, details.method))
                # It leads to the frames it came through, and those to the request, which may be large.
                error.__traceback__ = None
                return None

        deserializer = handler.request_deserializer if parse is None else None
        return _rebuild(handler, guarded, deserializer=deserializer)


def end_with(context: Any, error: StepwireError) -> None:
    """Gives a call an error as its status. Its handler is to return None then.

    Not by `context.abort`: gRPC keeps the exception which that raises, and with it every frame on its way, in a
    cycle with the context, so that what a refused request held would stay until the garbage collector comes.
    """
    status = to_status(error)
    context.set_code(error.code)
    context.set_details(status.message)
    context.set_trailing_metadata(((STATUS_DETAILS_KEY, status.SerializeToString()),))


def _public_error(error: Exception, method: str) -> StepwireError:
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:  # What a TaskGroup raises.
        error = error.exceptions[0]
    if isinstance(error, StepwireError):
        return error
    if isinstance(error, DecodeError):  # Of a stream: what came was read within the handler.
        return invalid_message(error)
    current_span().record_exception(error)
    _log.error("handler_failed", method=method.lstrip("/"), exc_info=error)
    context = traceparent(current_span())
    metadata = {"trace_id": context.split("-")[1]} if context else {}
    return StepwireError("INTERNAL", "internal error; the service's log has its cause", metadata)


def _parsed(parse: Callable[[bytes], Any], data: bytes) -> Any:
    try:
        return parse(data)
    except DecodeError as error:
        raise invalid_message(error) from error


async def _refuse(_request: Any, context: Any) -> None:
    message = "the call carries no valid key: send it as metadata `authorization: Bearer <key>`"
    end_with(context, StepwireError("UNAUTHENTICATED", message))


def _behaviour_of(handler: "_Handler | None") -> Behaviour | None:
    """A handler's function as a coroutine function; None for one that is not asynchronous."""
    if handler is None:
        return None
    function: Any = handler.stream_stream or handler.stream_unary or handler.unary_stream or handler.unary_unary
    if inspect.isasyncgenfunction(function):
        return _writing_all(function)
    return function if inspect.iscoroutinefunction(function) else None


def _writing_all(generator_function: Callable[[Any, Any], Any]) -> Behaviour:
    async def write_all(request: Any, context: Any) -> None:
        write = context.write
        async with aclosing(generator_function(request, context)) as responses:
            async for response in responses:
                await write(response)

    return write_all


_SAME: Any = object()


def _rebuild(handler: _Handler, behaviour: Behaviour, *, deserializer: Any = _SAME) -> _Handler:
    build: Any
    if handler.response_streaming:
        build = (
            grpc.stream_stream_rpc_method_handler if handler.request_streaming else grpc.unary_stream_rpc_method_handler
        )
    else:
        build = (
            grpc.stream_unary_rpc_method_handler if handler.request_streaming else grpc.unary_unary_rpc_method_handler
        )
    if deserializer is _SAME:
        deserializer = handler.request_deserializer
    rebuilt: _Handler = build(behaviour, deserializer, handler.response_serializer)
    return rebuilt


def _status_set(context: Any) -> tuple[grpc.StatusCode, str]:
    code = context.code()  # A number after `abort`; whatever the handler gave it after `set_code`.
    if not isinstance(code, grpc.StatusCode):
        code = _CODE_OF_NUMBER.get(code, grpc.StatusCode.OK)
    return code, context.details() or ""


def _why_ended(timeout_s: float | None, remaining_s: float | None) -> grpc.StatusCode:
    if timeout_s is None or remaining_s is None:
        return grpc.StatusCode.CANCELLED
    is_late = has_passed(timeout_s, remaining_s)
    return grpc.StatusCode.DEADLINE_EXCEEDED if is_late else grpc.StatusCode.CANCELLED


def _digest(value: str | bytes) -> bytes:
    return sha256(value.encode() if isinstance(value, str) else value).digest()
