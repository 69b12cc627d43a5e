"""One error type for every failed call, and its mapping to and from gRPC statuses.

The wire form is `google.rpc.Status` with exactly one ErrorInfo (AIP-193): reason from
errors.proto, domain "stepwire", every variable part in the metadata; and a RetryInfo where a
retry makes sense.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from stepwire.v1.errors_pb2 import ErrorReason

DOMAIN = "stepwire"
STATUS_DETAILS_KEY = "grpc-status-details-bin"

# gRPC begins to refuse metadata above 8 KiB, and the message is in it twice.
_MAX_MESSAGE_BYTES = 1000
_MAX_METADATA_BYTES = 250

_CODES: Mapping[str, grpc.StatusCode] = {
    "FIELD_OUT_OF_RANGE": grpc.StatusCode.INVALID_ARGUMENT,
    "FIELD_INVALID": grpc.StatusCode.INVALID_ARGUMENT,
    "PROMPT_EMPTY": grpc.StatusCode.INVALID_ARGUMENT,
    "PROMPT_TOO_LONG": grpc.StatusCode.INVALID_ARGUMENT,
    "TOKEN_ID_OUT_OF_VOCABULARY": grpc.StatusCode.INVALID_ARGUMENT,
    "CHAT_TEMPLATE_MISSING": grpc.StatusCode.FAILED_PRECONDITION,
    "CHAT_TEMPLATE_FAILED": grpc.StatusCode.INVALID_ARGUMENT,
    "MODEL_NOT_FOUND": grpc.StatusCode.NOT_FOUND,
    "REQUEST_ALREADY_EXISTS": grpc.StatusCode.ALREADY_EXISTS,
    "QUEUE_FULL": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "DEADLINE_EXCEEDED": grpc.StatusCode.DEADLINE_EXCEEDED,
    "CANCELLED": grpc.StatusCode.CANCELLED,
    "DRAINING": grpc.StatusCode.UNAVAILABLE,
    "MODEL_NOT_READY": grpc.StatusCode.UNAVAILABLE,
    "WORKER_FAILED": grpc.StatusCode.UNAVAILABLE,
    "SEQUENCE_FAILED": grpc.StatusCode.INTERNAL,
    "STALE_EPOCH": grpc.StatusCode.FAILED_PRECONDITION,
    "STEP_OUT_OF_ORDER": grpc.StatusCode.FAILED_PRECONDITION,
    "STATE_MISMATCH": grpc.StatusCode.FAILED_PRECONDITION,
    "WRONG_PHASE": grpc.StatusCode.FAILED_PRECONDITION,
    "CHECKPOINT_NOT_FOUND": grpc.StatusCode.NOT_FOUND,
    "CHECKPOINT_UNAVAILABLE": grpc.StatusCode.UNAVAILABLE,
    "CHECKPOINT_INVALID": grpc.StatusCode.INVALID_ARGUMENT,
    "CHECKPOINT_UNSUPPORTED": grpc.StatusCode.INVALID_ARGUMENT,
    "DEVICE_UNAVAILABLE": grpc.StatusCode.FAILED_PRECONDITION,
    "OUT_OF_MEMORY": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "UNAUTHENTICATED": grpc.StatusCode.UNAUTHENTICATED,
    "INTERNAL": grpc.StatusCode.INTERNAL,
    "STREAM_DISPLACED": grpc.StatusCode.ABORTED,
    "CLIENT_TOO_SLOW": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "MODEL_ASLEEP": grpc.StatusCode.UNAVAILABLE,
    "REQUEST_ENDS_WORKERS": grpc.StatusCode.INTERNAL,
    "FENCED": grpc.StatusCode.UNAVAILABLE,
    "PEER_LOST": grpc.StatusCode.UNAVAILABLE,
    "RENDEZVOUS_FAILED": grpc.StatusCode.UNAVAILABLE,
    "ADAPTER_NOT_FOUND": grpc.StatusCode.NOT_FOUND,
    "ADAPTER_IN_USE": grpc.StatusCode.FAILED_PRECONDITION,
    "ADAPTER_UNSUPPORTED": grpc.StatusCode.FAILED_PRECONDITION,
    "ADAPTER_LIMIT": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "GRAMMAR_INVALID": grpc.StatusCode.INVALID_ARGUMENT,
    "GRAMMAR_TOO_COMPLEX": grpc.StatusCode.INVALID_ARGUMENT,
    "GRAMMARS_FULL": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "MODEL_ALREADY_EXISTS": grpc.StatusCode.ALREADY_EXISTS,
}


@dataclass(eq=False)
class StepwireError(Exception):
    """A call failed, for a reason a program can act on.

    `reason` is the name of an ErrorReason without its prefix; `message` names what is wrong and
    what to do; `metadata` holds every variable part of the message; `retry_after_s` is set where
    a retry makes sense.
    """

    reason: str
    message: str
    metadata: Mapping[str, str] = field(default_factory=dict)
    retry_after_s: float | None = None

    def __post_init__(self) -> None:
        if self.reason not in _CODES:
            raise ValueError(f"{self.reason!r} is not the name of an ErrorReason")

    def __str__(self) -> str:
        return self.message

    @property
    def code(self) -> grpc.StatusCode:
        """The gRPC status code that belongs to the reason."""
        return _CODES[self.reason]


def known_reasons() -> frozenset[str]:
    """The reasons of errors.proto, without prefix."""
    names = ErrorReason.DESCRIPTOR.values_by_name
    return frozenset(name.removeprefix("ERROR_REASON_") for name in names) - {"UNSPECIFIED"}


def invalid_message(error: DecodeError) -> StepwireError:
    """The error of a request that is no message of its type."""
    return StepwireError("FIELD_INVALID", f"the request is no valid message: {error}", {"cause": str(error)})


def to_status(error: StepwireError) -> status_pb2.Status:
    """The wire form of an error; texts that would not fit into a call's trailers are cut."""
    metadata = {key: _shortened(value, _MAX_METADATA_BYTES) for key, value in error.metadata.items()}
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata)
    details = [_pack(info)]
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(int(error.retry_after_s * 1000))
        details.append(_pack(error_details_pb2.RetryInfo(retry_delay=delay)))
    message = _shortened(error.message, _MAX_MESSAGE_BYTES)
    return status_pb2.Status(code=error.code.value[0], message=message, details=details)


def from_rpc_error(error: grpc.RpcError) -> StepwireError:
    """What a failed call means.

    A status without our ErrorInfo (the peer is gone, or is not Stepwire) becomes the reason
    nearest to its code, with gRPC's own text.
    """
    own = status_error(error)
    if own is not None:
        return own
    code: grpc.StatusCode = error.code()
    text: str = error.details() or code.name
    return StepwireError(_REASON_OF_CODE.get(code, "INTERNAL"), text, {"grpc_code": code.name})


def status_error(error: grpc.RpcError) -> StepwireError | None:
    """The error that a Stepwire service ended the call with; None for a status that is not of one."""
    for entry in error.trailing_metadata() or ():
        key, value = cast(tuple[str, bytes], entry)
        if key == STATUS_DETAILS_KEY:
            parsed = _from_details(value)
            if parsed is not None:
                return parsed
    return None


_REASON_OF_CODE: Mapping[grpc.StatusCode, str] = {
    grpc.StatusCode.INVALID_ARGUMENT: "FIELD_INVALID",
    grpc.StatusCode.NOT_FOUND: "MODEL_NOT_FOUND",
    grpc.StatusCode.DEADLINE_EXCEEDED: "DEADLINE_EXCEEDED",
    grpc.StatusCode.CANCELLED: "CANCELLED",
    grpc.StatusCode.UNAVAILABLE: "MODEL_NOT_READY",
    # gRPC's own: a message or metadata beyond its limits. The same call again would fail again.
    grpc.StatusCode.RESOURCE_EXHAUSTED: "FIELD_OUT_OF_RANGE",
    grpc.StatusCode.UNAUTHENTICATED: "UNAUTHENTICATED",
    grpc.StatusCode.FAILED_PRECONDITION: "WRONG_PHASE",
    grpc.StatusCode.ALREADY_EXISTS: "REQUEST_ALREADY_EXISTS",
}


def _from_details(serialised: bytes) -> StepwireError | None:
    info = error_details_pb2.ErrorInfo()
    retry = error_details_pb2.RetryInfo()
    found, retry_after_s = False, None
    try:
        status = status_pb2.Status.FromString(serialised)
        for detail in status.details:
            if detail.Is(info.DESCRIPTOR):
                detail.Unpack(info)
                found = info.domain == DOMAIN and info.reason in _CODES
            elif detail.Is(retry.DESCRIPTOR):
                detail.Unpack(retry)
                retry_after_s = retry.retry_delay.ToMilliseconds() / 1000
    except DecodeError:  # Not Stepwire's, whatever it is.
        return None
    return StepwireError(info.reason, status.message, dict(info.metadata), retry_after_s) if found else None


def _shortened(text: str, max_bytes: int) -> str:
    # What cannot be encoded (a lone surrogate) must not turn one error into another.
    encoded = text.encode(errors="replace")
    return encoded.decode() if len(encoded) <= max_bytes else f"{encoded[:max_bytes].decode(errors='ignore')}…"


def _pack(message: error_details_pb2.ErrorInfo | error_details_pb2.RetryInfo) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
