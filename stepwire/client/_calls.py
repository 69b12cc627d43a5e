"""What the calls of both clients have in common: key, span, and errors."""

import grpc
from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, TracerProvider

from stepwire.client.types import GenerateKeywords, Model, ModelState
from stepwire.rpc.channel import key_metadata
from stepwire.rpc.errors import StepwireError, from_rpc_error, status_error
from stepwire.telemetry import names
from stepwire.telemetry.trace import end_rpc_span, get_tracer, inject

SERVICE = "stepwire.v1.InferenceService"
TENANT_KEY = "stepwire-tenant"
DEFAULT_TARGET = "127.0.0.1:50051"
DEFAULT_TIMEOUT_S = 10.0
DEFAULT_MAX_MESSAGE_BYTES = 64 << 20
POLL_INTERVAL_S = 0.1
MAX_STREAM_INTERVAL = 512


def in_whole(keywords: GenerateKeywords) -> GenerateKeywords:
    """The same, where nobody looks at an answer before its end: few large messages."""
    return {"stream_interval": MAX_STREAM_INTERVAL, **keywords}


class CallFactory:
    """Begins calls to one service."""

    def __init__(
        self,
        target: str,
        key: str | None,
        tenant: str | None,
        tracer_provider: TracerProvider | None,
        service: str = SERVICE,
    ) -> None:
        self.target = target
        self._service = service
        self._metadata = [] if key is None else [key_metadata(key)]
        if tenant is not None:
            self._metadata.append((TENANT_KEY, tenant))
        self._tracer = get_tracer(tracer_provider)
        host, _, port = target.rpartition(":")
        self._attributes: dict[str, str | int] = {names.RPC_SYSTEM: "grpc", names.SERVER_ADDRESS: host or target}
        if port.isdecimal():
            self._attributes[names.SERVER_PORT] = int(port)

    def begin(self, method: str, *, traced: bool = True) -> "ClientCall":
        """Starts the CLIENT span of a call; a poll is not traced."""
        metadata = list(self._metadata)
        if not traced:
            return ClientCall(self.target, trace.INVALID_SPAN, metadata)
        name = f"{self._service}/{method}"
        attributes = {**self._attributes, names.RPC_METHOD: name}
        span = self._tracer.start_span(name, kind=SpanKind.CLIENT, attributes=attributes)
        inject(span, metadata)
        return ClientCall(self.target, span, metadata)


class ClientCall:
    """One call: the metadata to send with it, and its span, which the first outcome ends."""

    __slots__ = ("_is_ended", "_span", "_target", "metadata")

    def __init__(self, target: str, span: Span, metadata: list[tuple[str, str]]) -> None:
        self.metadata = metadata
        self._target = target
        self._span = span
        self._is_ended = False

    def succeeded(self) -> None:
        """The call returned."""
        self._end(grpc.StatusCode.OK)

    def cancelled(self) -> StepwireError:
        """The call was cancelled on this side."""
        self._end(grpc.StatusCode.CANCELLED, "cancelled by the client")
        return StepwireError("CANCELLED", "the call was cancelled by the client")

    def failed(self, error: grpc.RpcError) -> StepwireError:
        """The call ended with a status other than OK; returns what to raise."""
        result = from_rpc_error(error)
        code: grpc.StatusCode = error.code()
        if code is grpc.StatusCode.UNAVAILABLE and status_error(error) is None:
            text = f"cannot reach the service at {self._target}: {result.message}"
            result = StepwireError(result.reason, text, {**result.metadata, "target": self._target})
        self._end(code, result.message)
        return result

    def _end(self, code: grpc.StatusCode, text: str = "") -> None:
        if not self._is_ended:
            self._is_ended = True
            end_rpc_span(self._span, code, text)


def client_closed() -> StepwireError:
    """What a call of a closed client raises."""
    return StepwireError("CANCELLED", "the client is closed")


def stream_cut() -> StepwireError:
    """What a stream without its first or last message means."""
    return StepwireError("INTERNAL", "the stream ended without its last message")


def why_not_ready(outcome: Model | StepwireError) -> str:
    """What a poll in `wait_ready` found. Raises StepwireError for what waiting does not mend."""
    if isinstance(outcome, StepwireError):
        if outcome.code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            return outcome.message
        raise outcome
    if outcome.state is ModelState.FAILED:
        text = f"model {outcome.name} has failed; the service's log has the cause"
        raise StepwireError("WORKER_FAILED", text, {"model": outcome.name})
    return f"model {outcome.name} is {outcome.state}"


def not_ready(target: str, timeout: float, last: str) -> StepwireError:
    """What waiting in vain raises."""
    text = f"the service at {target} was not ready within {timeout:g} s: {last}"
    return StepwireError("DEADLINE_EXCEEDED", text, {"target": target})
