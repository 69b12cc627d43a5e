"""When requests are to be looked at because of their deadlines."""

import heapq
from collections.abc import Callable, Iterator

from scheduler_service.core.request import Request

_MIN_SWEEP = 64


class Deadlines:
    """Live requests by the time of their next check, earliest first.

    Ended requests are dropped as they come up, and all together when they are the most.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._num_added = 0
        self._sweep_at = _MIN_SWEEP

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: Request, check_at: float, is_live: Callable[[Request], bool]) -> None:
        """Notes when to look at a live request."""
        self._num_added += 1
        heapq.heappush(self._heap, (check_at, self._num_added, request))
        if len(self._heap) >= self._sweep_at:
            # A deadline may be years away; an ended request must not stay in memory until then.
            self._heap = [entry for entry in self._heap if is_live(entry[2])]
            heapq.heapify(self._heap)
            self._sweep_at = max(_MIN_SWEEP, 2 * len(self._heap))

    def next(self, is_live: Callable[[Request], bool]) -> float | None:
        """When the next live request is to be looked at."""
        while self._heap and not is_live(self._heap[0][2]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def due(self, now: float, is_live: Callable[[Request], bool]) -> Iterator[Request]:
        """Takes out the live requests that are to be looked at by `now`."""
        while (check_at := self.next(is_live)) is not None and check_at <= now:
            yield heapq.heappop(self._heap)[2]
