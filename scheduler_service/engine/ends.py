"""Why a request is not taken, or ends before its last token, in the words of the answer."""

from scheduler_service.core.errors import DuplicateRequest, QueueFull
from scheduler_service.core.plan import EndEvent
from scheduler_service.core.request import FinishReason
from scheduler_service.engine.live import LiveRequest
from stepwire.rpc.errors import StepwireError


def queue_full(error: QueueFull) -> StepwireError:
    """What refuses a request for which the queue has no room."""
    return StepwireError("QUEUE_FULL", str(error), {"limit": str(error.limit), "what": error.what}, error.retry_after_s)


def already_exists(error: DuplicateRequest) -> StepwireError:
    """What refuses a request whose id another one has."""
    return StepwireError("REQUEST_ALREADY_EXISTS", str(error), {"request_id": error.request_id})


def too_slow(live: LiveRequest) -> StepwireError:
    """What ends a request whose client does not read: its output may not fill the memory of all."""
    return StepwireError(
        "CLIENT_TOO_SLOW",
        "the client leaves too much output untaken; read the stream, or ask for fewer sequences or log-probabilities",
        {"request_id": live.request.request_id, "output_tokens": str(live.num_output_tokens)},
    )


def ends_workers(request_id: str) -> StepwireError:
    """What ends a request that was in flight, each time, when its worker broke, at last alone."""
    return StepwireError(
        "REQUEST_ENDS_WORKERS",
        "the worker broke three times with this request in flight, the last time with no other one: it is not tried "
        "again; the scheduler's log has the worker's cause",
        {"request_id": request_id},
    )


def end_error(event: EndEvent) -> StepwireError:
    """Why a sequence, and with it its request, ended without its last token."""
    request_id = event.sequence.request.request_id
    metadata = {"request_id": request_id, "sequence_index": str(event.sequence.index)}
    if event.finish_reason is FinishReason.DEADLINE:
        return StepwireError("DEADLINE_EXCEEDED", "the deadline passed before the request was finished", metadata)
    if event.finish_reason is FinishReason.ERROR:
        if event.error_reason is not None:
            return StepwireError(event.error_reason, f"sequence {event.sequence.index}: {event.message}", metadata)
        text = f"sequence {event.sequence.index} failed on the worker: {event.message}"
        return StepwireError("SEQUENCE_FAILED", text, metadata)
    return StepwireError("CANCELLED", "the request was cancelled", metadata)
