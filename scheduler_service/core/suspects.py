"""Which requests may be what ends epochs, and the trial of each alone.

A fault inside a worker is counted against every request that was in flight. Those with two are
suspects. They run alone, the newest first, each until it has got past the place where it stood when
the last epoch ended: then it is cleared. One that ends an epoch alone is convicted.
"""

from collections.abc import Iterable

from scheduler_service.core.request import Request, Sequence

_FAULTS_OF_A_SUSPECT = 2


class Suspects:
    """Counts of faults by request, and the request on trial. Knows nothing of where sequences stand."""

    def __init__(self) -> None:
        self.trial: Request | None = None
        self._faults: dict[str, int] = {}
        self._suspects: dict[str, tuple[float, Request]] = {}
        self._marks: dict[str, dict[int, int]] = {}

    @property
    def is_active(self) -> bool:
        """Whether there are suspects, so that nothing but the one on trial may run."""
        return bool(self._suspects)

    def blame(self, in_flight: Iterable[Sequence]) -> Request | None:
        """Counts a fault against the live sequences that were in flight; answers the request that it convicts."""
        requests: dict[str, Request] = {}
        for sequence in in_flight:
            request = requests[sequence.request.request_id] = sequence.request
            marks = self._marks.setdefault(request.request_id, {})
            marks[sequence.index] = len(sequence.token_ids) + sequence.pending
            self._faults.setdefault(request.request_id, 0)
            if self._faults[request.request_id] + 1 >= _FAULTS_OF_A_SUSPECT:
                self._suspects[request.request_id] = (sequence.arrival, request)
        for request_id in requests:
            self._faults[request_id] += 1
        trial, self.trial = self.trial, None
        return trial if trial is not None and requests.keys() == {trial.request_id} else None

    def begin(self) -> Request:
        """Puts the newest suspect on trial."""
        _, self.trial = max(self._suspects.values(), key=lambda entry: (entry[0], entry[1].request_id))
        return self.trial

    def is_past(self, sequences: Iterable[Sequence]) -> bool:
        """Whether these, the live sequences of the request on trial, have got past where they stood at the fault."""
        marks = {} if self.trial is None else self._marks.get(self.trial.request_id, {})
        return all(len(sequence.token_ids) > marks.get(sequence.index, -1) for sequence in sequences)

    def clear(self) -> None:
        """Clears the request on trial. One more fault makes it a suspect again."""
        if self.trial is not None:
            self._faults[self.trial.request_id] = _FAULTS_OF_A_SUSPECT - 1
            self._drop(self.trial.request_id)

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        if self._faults.pop(request_id, None) is not None:
            self._drop(request_id)

    def _drop(self, request_id: str) -> None:
        self._suspects.pop(request_id, None)
        self._marks.pop(request_id, None)
        if self.trial is not None and self.trial.request_id == request_id:
            self.trial = None
