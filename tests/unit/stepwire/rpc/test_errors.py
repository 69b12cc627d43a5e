from typing import Any

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from stepwire.rpc.errors import STATUS_DETAILS_KEY, StepwireError, from_rpc_error, known_reasons, to_status


def failed_call(code: grpc.StatusCode, details: str, trailers: list[tuple[str, Any]]) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailers), details)


def sent(error: StepwireError) -> grpc.aio.AioRpcError:
    status = to_status(error)
    return failed_call(error.code, status.message, [(STATUS_DETAILS_KEY, status.SerializeToString())])


def test_every_reason_of_the_protocol_has_a_code_and_comes_back() -> None:
    assert len(known_reasons()) >= 27
    for reason in known_reasons():
        error = from_rpc_error(sent(StepwireError(reason, "why", {"field": "x"})))
        assert (error.reason, error.message, error.metadata) == (reason, "why", {"field": "x"})
        assert error.code is not grpc.StatusCode.OK
        assert error.retry_after_s is None


def test_a_reason_outside_the_protocol_is_a_programming_error() -> None:
    with pytest.raises(ValueError, match="NO_SUCH_REASON"):
        StepwireError("NO_SUCH_REASON", "x")


def test_when_to_come_back() -> None:
    assert from_rpc_error(sent(StepwireError("QUEUE_FULL", "full", retry_after_s=0.25))).retry_after_s == 0.25


def test_exactly_one_error_info() -> None:
    status = to_status(StepwireError("QUEUE_FULL", "full", retry_after_s=1))
    assert [detail.TypeName() for detail in status.details] == ["google.rpc.ErrorInfo", "google.rpc.RetryInfo"]


@pytest.mark.parametrize("text", ["x" * 100_000, "語" * 100_000, "\ud800" * 9_000])
def test_texts_of_any_length_fit_into_trailers(text: str) -> None:
    status = to_status(StepwireError("FIELD_INVALID", text, {"value": text}))
    assert len(status.SerializeToString()) < 1600
    assert len(status.message.encode()) < 1010
    assert status.message.endswith("…")


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK])
def test_a_status_of_a_stranger_keeps_its_text_and_code(code: grpc.StatusCode) -> None:
    error = from_rpc_error(failed_call(code, "from a proxy", []))
    assert error.message == "from a proxy"
    assert error.metadata == {"grpc_code": code.name}
    assert error.reason in known_reasons()


def test_details_that_are_not_ours_are_ignored() -> None:
    packed = any_pb2.Any()
    packed.Pack(error_details_pb2.ErrorInfo(reason="QUEUE_FULL", domain="elsewhere.example"))
    foreign = status_pb2.Status(code=13, message="inner", details=[packed])
    broken = any_pb2.Any(type_url="type.googleapis.com/google.rpc.ErrorInfo", value=b"\xff\xff")
    for trailer in (foreign.SerializeToString(), status_pb2.Status(details=[broken]).SerializeToString(), b"\xff"):
        error = from_rpc_error(failed_call(grpc.StatusCode.INTERNAL, "outer", [(STATUS_DETAILS_KEY, trailer)]))
        assert (error.reason, error.message) == ("INTERNAL", "outer")
