"""Every kind of failure has a reason, and only a broken device ends the process."""

from pathlib import Path

import pytest

from loader.errors import CheckpointError
from stepwire.rpc.errors import StepwireError
from worker_service.device_thread import DeviceStopped
from worker_service.rpc.failures import is_fatal, load_failure, phase_failure, placed, step_failure
from worker_service.runtime.errors import RuntimeFailure
from worker_service.runtime.step import StateMismatch


class AcceleratorError(RuntimeError):
    """Stands for torch's, which is known by its name."""


def because(error: Exception, cause: BaseException) -> Exception:
    error.__cause__ = cause
    return error


def stopped(cause: BaseException) -> Exception:
    return because(DeviceStopped("the device thread has ended"), cause)


@pytest.mark.parametrize(
    ("error", "reason", "metadata"),
    [
        (CheckpointError("not_found", "no file", "look", Path("/a")), "CHECKPOINT_NOT_FOUND", {"file": "/a"}),
        (CheckpointError("invalid", "bad", "fix", tensor="t"), "CHECKPOINT_INVALID", {"tensor": "t", "remedy": "fix"}),
        (CheckpointError("unsupported", "new", "wait"), "CHECKPOINT_UNSUPPORTED", {"remedy": "wait"}),
        (RuntimeFailure("out_of_memory", "full", {"needed_bytes": "5"}), "OUT_OF_MEMORY", {"needed_bytes": "5"}),
        (RuntimeFailure("device_unavailable", "none"), "DEVICE_UNAVAILABLE", {}),
        (RuntimeFailure("invalid", "no", {"field": "x"}), "FIELD_INVALID", {"field": "x"}),
        (RuntimeFailure("device_failed", "gone"), "WORKER_FAILED", {"cause": "device_failed"}),
        (MemoryError(), "OUT_OF_MEMORY", {"cause": "MemoryError"}),
        (RuntimeError("std::bad_alloc"), "OUT_OF_MEMORY", {"cause": "RuntimeError: std::bad_alloc"}),
        (stopped(OSError("gone")), "WORKER_FAILED", {"cause": "OSError: gone"}),
        (AcceleratorError("lost"), "WORKER_FAILED", {"cause": "AcceleratorError: lost"}),
        (StepwireError("WRONG_PHASE", "not yet"), "WRONG_PHASE", {}),
    ],
)
def test_reasons_of_a_phase(error: Exception, reason: str, metadata: dict[str, str]) -> None:
    failure = phase_failure(error)
    assert failure is not None
    assert failure.reason == reason
    assert metadata.items() <= failure.metadata.items()


def test_a_defect_has_no_public_error() -> None:
    assert phase_failure(KeyError("secret")) is None


@pytest.mark.parametrize(
    ("error", "reason", "cause"),
    [
        (StateMismatch("3, not 9"), "STATE_MISMATCH", None),
        (RuntimeFailure("out_of_memory", "full"), "OUT_OF_MEMORY", None),
        (RuntimeFailure("device_failed", "gone"), "WORKER_FAILED", "RuntimeFailure: gone"),
        (MemoryError(), "OUT_OF_MEMORY", "MemoryError"),
        (RuntimeError("std::bad_alloc"), "OUT_OF_MEMORY", "RuntimeError: std::bad_alloc"),
        (KeyError("x"), "WORKER_FAILED", "KeyError: 'x'"),
        (stopped(SystemExit("bus")), "WORKER_FAILED", "SystemExit: bus"),
    ],
)
def test_reasons_of_a_step(error: Exception, reason: str, cause: str | None) -> None:
    failure = step_failure(error, step_id=7)
    assert failure.reason == reason
    assert failure.metadata["step_id"] == "7"
    assert failure.metadata.get("cause") == cause


def test_what_a_load_does_not_support_is_the_checkpoint() -> None:
    failure = load_failure(RuntimeFailure("unsupported", "no such layer"))
    assert failure is not None and failure.reason == "CHECKPOINT_UNSUPPORTED"
    assert load_failure(ValueError()) is None


@pytest.mark.parametrize(
    ("error", "fatal"),
    [
        (RuntimeFailure("device_failed", ""), True),
        (AcceleratorError(), True),
        (SystemExit(), True),
        (KeyboardInterrupt(), True),
        (RuntimeFailure("out_of_memory", ""), False),
        (
            because(RuntimeFailure("out_of_memory", ""), RuntimeError("DefaultCPUAllocator: can't allocate memory")),
            False,
        ),
        (because(RuntimeFailure("out_of_memory", ""), RuntimeError("could not create a primitive")), True),
        (because(RuntimeFailure("out_of_memory", ""), AcceleratorError("CUDA error: out of memory")), True),
        (RuntimeError("could not create a primitive"), True),
        (StateMismatch(), False),
        (ZeroDivisionError(), False),
        (MemoryError(), False),
    ],
)
def test_what_ends_the_process(error: BaseException, fatal: bool) -> None:
    assert is_fatal(error) is fatal


def test_a_place_never_replaces_what_an_error_says() -> None:
    error = placed(StepwireError("WRONG_PHASE", "m", {"phase": "own"}, 2.0), {"phase": "READY", "rank": "1"})
    assert error.metadata == {"phase": "own", "rank": "1"}
    assert (error.message, error.retry_after_s) == ("m", 2.0)
