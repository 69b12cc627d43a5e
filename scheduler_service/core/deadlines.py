"""When requests expire."""

import heapq
from collections.abc import Callable, Iterator

from scheduler_service.core.request import Request


class Deadlines:
    """The deadlines of live requests, earliest first. Entries of ended requests are dropped as they come up."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._num_added = 0

    def add(self, request: Request) -> None:
        """Notes a request that has a deadline."""
        if request.deadline is not None:
            self._num_added += 1
            heapq.heappush(self._heap, (request.deadline, self._num_added, request))

    def next(self, is_live: Callable[[Request], bool]) -> float | None:
        """The earliest deadline of a live request."""
        while self._heap and not is_live(self._heap[0][2]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def due(self, now: float, is_live: Callable[[Request], bool]) -> Iterator[str]:
        """Takes out the ids of live requests whose deadline is at or before `now`."""
        while (deadline := self.next(is_live)) is not None and deadline <= now:
            yield heapq.heappop(self._heap)[2].request_id
