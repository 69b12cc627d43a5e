"""What both clients do when the service is lost in the middle of a request: send it again with what they hold."""

import time

import grpc

from stepwire.client.types import Event, Output, Started
from stepwire.rpc.errors import StepwireError
from stepwire.v1 import inference_pb2

DEFAULT_RESUME_S = 30.0
_LEAST_PAUSE_S, _MOST_PAUSE_S = 0.1, 2.0


class Progress:
    """A request, and what has come of it: enough to go on with it elsewhere, or after a restart."""

    def __init__(self, request: inference_pb2.GenerateRequest, timeout: float | None, resume_s: float) -> None:
        self.request = request
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._resume_s = resume_s
        self._token_ids: dict[int, list[int]] = {}
        self._has_started = False
        self._first: StepwireError | None = None
        self._lost_at = 0.0
        self._pause_s = _LEAST_PAUSE_S

    @property
    def timeout(self) -> float | None:
        """Seconds that are left of the whole request's time."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def take(self, event: Event) -> Event | None:
        """Notes an event; None for one that the caller has had already."""
        if isinstance(event, Started):
            if self._has_started:
                return None
            self._has_started = True
            self.request.request_id = event.request_id
            self.request.sampling.seed = event.seed
        elif isinstance(event, Output):
            held = self._token_ids.setdefault(event.sequence_index, [])
            if event.position != len(held):
                text = f"sequence {event.sequence_index} went on at position {event.position}, not {len(held)}"
                raise StepwireError("INTERNAL", text)
            held.extend(event.token_ids)
        if not isinstance(event, Started):
            self._first, self._pause_s = None, _LEAST_PAUSE_S
        return event

    def pause_before_resuming(self, failure: StepwireError) -> float:
        """Seconds to wait before the request is sent again.

        Raises StepwireError, the first that was met, when it is not to be: it had not begun, the service asks for no
        retry, or it has been away for too long.
        """
        now = time.monotonic()
        if self._first is None:
            if not self._may_resume(failure):
                raise failure
            self._first, self._lost_at = failure, now
        elif not (_is_away(failure) or failure.reason == "REQUEST_ALREADY_EXISTS"):
            raise failure
        pause_s = max(self._pause_s, min(failure.retry_after_s or 0.0, _MOST_PAUSE_S))
        self._pause_s = min(2 * self._pause_s, _MOST_PAUSE_S)
        if now + pause_s > self._lost_at + self._resume_s or (self._deadline or now + pause_s) < now + pause_s:
            raise self._first
        return pause_s

    def next_request(self) -> inference_pb2.GenerateRequest:
        """The request with what has come of it."""
        request = inference_pb2.GenerateRequest()
        request.CopyFrom(self.request)
        del request.prior_output_token_ids[:]
        num = request.sampling.n if request.sampling.HasField("n") else 1
        for index in range(num):
            request.prior_output_token_ids.add(ids=self._token_ids.get(index, ()))
        return request

    def _may_resume(self, failure: StepwireError) -> bool:
        sampling = self.request.sampling
        is_whole = sampling.HasField("best_of") or sampling.HasField("prompt_logprobs")
        return self._has_started and not is_whole and _is_away(failure)


def _is_away(failure: StepwireError) -> bool:
    """Whether the service is gone, or says that it is worth while to come back."""
    # Only an error that no service said names the target that was not reached.
    is_gone = "target" in failure.metadata
    return failure.code is grpc.StatusCode.UNAVAILABLE and (is_gone or failure.retry_after_s is not None)
