"""The waiting sequences, in the order in which they may start."""

import heapq
from collections.abc import Iterator

from scheduler_service.core.request import Sequence, SequenceState


class WaitingQueue:
    """A priority queue of sequences: higher priority first, then earlier arrival.

    A sequence that left the WAITING state is dropped when it comes up, so leaving costs nothing.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, float, int, Sequence]] = []
        self._num_live = 0

    def __len__(self) -> int:
        return self._num_live

    def __iter__(self) -> Iterator[Sequence]:
        """The live sequences, in no particular order."""
        return (entry[3] for entry in self._heap if entry[3].state is SequenceState.WAITING)

    def push(self, sequence: Sequence) -> None:
        """Adds a sequence; sets its state to WAITING."""
        sequence.state = SequenceState.WAITING
        self._num_live += 1
        entry = (-sequence.request.priority, sequence.arrival, sequence.sequence_id, sequence)
        heapq.heappush(self._heap, entry)

    def peek(self) -> Sequence | None:
        """The sequence that goes next. Drops dead entries, else changes nothing."""
        heap = self._heap
        while heap and heap[0][3].state is not SequenceState.WAITING:
            heapq.heappop(heap)
        return heap[0][3] if heap else None

    def pop(self) -> Sequence:
        """Takes the sequence that `peek` returned; its state is the caller's to set."""
        self._num_live -= 1
        return heapq.heappop(self._heap)[3]

    def note_departure(self) -> None:
        """Counts out a sequence that waited here and has just left the WAITING state, other than by `pop`."""
        self._num_live -= 1
        if len(self._heap) > 64 and len(self._heap) > 2 * self._num_live:
            self._heap = [entry for entry in self._heap if entry[3].state is SequenceState.WAITING]
            heapq.heapify(self._heap)
