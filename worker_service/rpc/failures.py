"""What went wrong in the worker, as the error that its caller gets."""

from collections.abc import Mapping
from dataclasses import replace

from loader.errors import CheckpointError
from stepwire.rpc.errors import StepwireError
from worker_service.device_thread import DeviceStopped
from worker_service.runtime.errors import RuntimeFailure
from worker_service.runtime.shortage import breaks_thread, is_out_of_memory
from worker_service.runtime.step import StateMismatch

_REASON_OF_CHECKPOINT_CODE: Mapping[str, str] = {
    "not_found": "CHECKPOINT_NOT_FOUND",
    "invalid": "CHECKPOINT_INVALID",
    "unsupported": "CHECKPOINT_UNSUPPORTED",
}

_REASON_OF_RUNTIME_CODE: Mapping[str, str] = {
    "device_unavailable": "DEVICE_UNAVAILABLE",
    "out_of_memory": "OUT_OF_MEMORY",
    "unsupported": "FIELD_INVALID",
    "invalid": "FIELD_INVALID",
    "rendezvous_failed": "RENDEZVOUS_FAILED",
    "peer_lost": "PEER_LOST",
    "grammar_invalid": "GRAMMAR_INVALID",
    "grammars_full": "GRAMMARS_FULL",
}

# After one of these the device answers no further call rightly.
_FATAL_RUNTIME_CODE = "device_failed"


def is_fatal(error: BaseException) -> bool:
    """Whether the process must end, because the device, or the interpreter, can no longer be trusted.

    What an error follows from counts as it does: it may have been given another meaning, such as want of memory.
    """
    if isinstance(error, RuntimeFailure) and error.code == _FATAL_RUNTIME_CODE:
        return True
    # torch's own error of a broken accelerator, known by name so that this module needs no torch.
    if any(kind.__name__ == "AcceleratorError" for kind in type(error).__mro__):
        return True
    if not isinstance(error, Exception) or breaks_thread(error):
        return True
    return error.__cause__ is not None and is_fatal(error.__cause__)


def phase_failure(error: BaseException) -> StepwireError | None:
    """The caller's error for a phase RPC that failed; None for a defect, whose text stays in the log."""
    if isinstance(error, StepwireError):
        return error
    if isinstance(error, CheckpointError):
        return _checkpoint_failure(error)
    if isinstance(error, RuntimeFailure):
        reason = _REASON_OF_RUNTIME_CODE.get(error.code, "WORKER_FAILED")
        return StepwireError(reason, str(error), {"cause": error.code, **error.metadata})
    if is_out_of_memory(error):
        return _out_of_memory(error, {})
    if isinstance(error, DeviceStopped):
        return _worker_failure(error.__cause__ or error, {})
    if is_fatal(error):
        return _worker_failure(error, {})
    return None


def load_failure(error: Exception) -> StepwireError | None:
    """The caller's error where a load gives an error another meaning: what is not supported is the checkpoint."""
    if isinstance(error, RuntimeFailure) and error.code == "unsupported":
        return StepwireError("CHECKPOINT_UNSUPPORTED", str(error), {"cause": error.code, **error.metadata})
    return None


def adapter_failure(error: RuntimeFailure) -> StepwireError | None:
    """The caller's error where a call about adapters gives an error another meaning."""
    reason = {"unsupported": "ADAPTER_UNSUPPORTED", "limit": "ADAPTER_LIMIT"}.get(error.code)
    return None if reason is None else StepwireError(reason, str(error), {"cause": error.code, **error.metadata})


def step_failure(error: BaseException, *, step_id: int | None = None) -> StepwireError:
    """The error that ends the step stream. Names the cause in any case: it is what recovery reports."""
    metadata = {} if step_id is None else {"step_id": str(step_id)}
    if isinstance(error, StateMismatch):
        return StepwireError("STATE_MISMATCH", str(error), metadata)
    if isinstance(error, RuntimeFailure) and error.code in ("out_of_memory", "peer_lost"):
        return StepwireError(_REASON_OF_RUNTIME_CODE[error.code], str(error), {**metadata, **error.metadata})
    if isinstance(error, DeviceStopped) and error.__cause__ is not None:
        return _worker_failure(error.__cause__, metadata)
    if is_out_of_memory(error):
        return _out_of_memory(error, metadata)
    return _worker_failure(error, metadata)


def placed(error: StepwireError, place: Mapping[str, str]) -> StepwireError:
    """The error with where it happened: phase, rank, host. What it says itself is kept."""
    return replace(error, metadata={**place, **error.metadata})


def _checkpoint_failure(error: CheckpointError) -> StepwireError:
    found = {
        "file": None if error.file is None else str(error.file),
        "tensor": error.tensor,
        "expected": error.expected,
        "found": error.found,
        "remedy": error.remedy,
    }
    metadata = {key: value for key, value in found.items() if value is not None}
    return StepwireError(_REASON_OF_CHECKPOINT_CODE.get(error.code, "CHECKPOINT_INVALID"), str(error), metadata)


def _out_of_memory(error: BaseException, metadata: Mapping[str, str]) -> StepwireError:
    """Outside of the runtime's own calls, which say what needed it."""
    cause = _cause_of(error)
    return StepwireError("OUT_OF_MEMORY", f"the worker has no memory left: {cause}", {**metadata, "cause": cause})


def _worker_failure(error: BaseException, metadata: Mapping[str, str]) -> StepwireError:
    cause = _cause_of(error)
    extra = error.metadata if isinstance(error, RuntimeFailure) else {}
    return StepwireError("WORKER_FAILED", f"the worker failed: {cause}", {**metadata, "cause": cause, **extra})


def _cause_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")
