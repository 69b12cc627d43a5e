"""The waiting sequences, in the order in which they may start.

Effective priority first: the base priority, and one more for every `ageing_s` seconds since the
arrival, so that whatever waits long enough goes before all that comes later. Then the tenant that
has had least, then, among those with a deadline, the one with fewest tokens to compute, so that
most of them are in time (docs/adr/0009-shortest-first.md); those without follow. Then the earlier arrival.
"""

import heapq
from bisect import insort
from collections.abc import Iterator

from scheduler_service.core.request import Sequence, SequenceState
from scheduler_service.core.tenants import TenantLedger

_NEVER = float("inf")
_MAX_LIFTS = 256


class _Level:
    """The sequences of one effective priority: a heap for each tenant, and the tenants by what they have had.

    A tenant's count only grows while it is busy, so a stale entry of `_tenants` stands too far in
    front, and is put back where it belongs when it comes up.
    """

    def __init__(self, ledger: TenantLedger) -> None:
        self._ledger = ledger
        self._heaps: dict[str, list[tuple[float, float, int, int, Sequence]]] = {}
        self._tenants: list[tuple[float, str]] = []

    def pop(self) -> None:
        """Takes out the sequence that `peek` has just returned."""
        heapq.heappop(self._heaps[self._tenants[0][1]])

    def __iter__(self) -> Iterator[Sequence]:
        return (entry[4] for heap in self._heaps.values() for entry in heap if _is_current(entry[4], entry[3]))

    def push(self, sequence: Sequence) -> None:
        """Adds a sequence."""
        request = sequence.request
        heap = self._heaps.get(request.tenant)
        if heap is None:
            heap = self._heaps[request.tenant] = []
            heapq.heappush(self._tenants, (self._ledger.served(request.tenant), request.tenant))
        num_tokens = _NEVER if request.deadline is None else len(sequence.token_ids)
        heapq.heappush(heap, (num_tokens, sequence.arrival, sequence.sequence_id, sequence.ticket, sequence))

    def peek(self) -> Sequence | None:
        """The next sequence that still waits here. Drops those that do not, as they come up."""
        while self._tenants:
            counted, tenant = self._tenants[0]
            heap = self._heaps[tenant]
            while heap and not _is_current(heap[0][4], heap[0][3]):
                heapq.heappop(heap)
            if not heap:
                heapq.heappop(self._tenants)
                del self._heaps[tenant]
            elif (served := self._ledger.served(tenant)) > counted:
                heapq.heapreplace(self._tenants, (served, tenant))
            else:
                return heap[0][4]
        return None


def _is_current(sequence: Sequence, ticket: int) -> bool:
    """Whether an entry stands for where its sequence waits now: each placing has a ticket of its own."""
    return sequence.state is SequenceState.WAITING and sequence.ticket == ticket


class WaitingQueue:
    """Sequences that wait. One that left the WAITING state is dropped when it comes up, so leaving costs nothing."""

    def __init__(self, ledger: TenantLedger, ageing_s: float) -> None:
        self._ledger = ledger
        self._ageing_s = ageing_s
        self._levels: dict[int, _Level] = {}
        self._order: list[int] = []
        self._ageing: list[tuple[float, int, Sequence]] = []
        self._next_ticket = 1
        self._num_live = 0
        self._num_entries = 0

    def __len__(self) -> int:
        return self._num_live

    def __iter__(self) -> Iterator[Sequence]:
        """The sequences that wait, in no particular order."""
        for level in self._levels.values():
            yield from level

    def push(self, sequence: Sequence, now: float) -> None:
        """Adds a sequence; sets its state to WAITING and its level by its age."""
        sequence.state = SequenceState.WAITING
        sequence.level = sequence.request.priority + int((now - sequence.arrival) / self._ageing_s)
        self._num_live += 1
        self._place(sequence)

    def age(self, now: float) -> None:
        """Lifts sequences that have waited long enough since they were last lifted, those due earliest first.

        At most 256 at a time: after a burst, all of a long queue are due at once, and steps must not wait for that.
        """
        for _ in range(_MAX_LIFTS):
            if not self._ageing or self._ageing[0][0] > now:
                break
            _, ticket, sequence = heapq.heappop(self._ageing)
            if _is_current(sequence, ticket):
                sequence.level += 1
                self._place(sequence)

    def put_first(self, sequence: Sequence) -> None:
        """Lets a waiting sequence go before all others."""
        sequence.level = self._order[-1] + 1
        self._place(sequence)

    def peek(self) -> Sequence | None:
        """The sequence that goes next."""
        while self._order:
            sequence = self._levels[self._order[-1]].peek()
            if sequence is not None:
                return sequence
            del self._levels[self._order.pop()]
        return None

    def pop(self) -> None:
        """Takes out the sequence that `peek` has just returned; its state is the caller's to set."""
        self._levels[self._order[-1]].pop()
        self._num_entries -= 1
        self._depart()

    def note_departure(self) -> None:
        """Counts out a sequence that waited here and has just left the WAITING state, other than by `pop`."""
        self._depart()

    def forget_departed(self) -> None:
        """Drops what is left here of those that have gone."""
        self._rebuild()

    def _depart(self) -> None:
        self._num_live -= 1
        # Lifts leave entries behind in the levels, starts leave them in `_ageing`.
        num_entries = max(self._num_entries, len(self._ageing))
        if num_entries > 64 and num_entries > 3 * self._num_live:
            self._rebuild()

    def _place(self, sequence: Sequence) -> None:
        number, sequence.ticket = sequence.level, self._next_ticket
        self._next_ticket += 1
        if number not in self._levels:
            self._levels[number] = _Level(self._ledger)
            insort(self._order, number)
        self._levels[number].push(sequence)
        lift_at = sequence.arrival + (number - sequence.request.priority + 1) * self._ageing_s
        heapq.heappush(self._ageing, (lift_at, sequence.ticket, sequence))
        self._num_entries += 1

    def _rebuild(self) -> None:
        """Drops the entries of those that have left, which would otherwise stay until they come up."""
        waiting = list(self)
        self._levels.clear()
        self._order.clear()
        self._ageing.clear()
        self._num_entries = 0
        for sequence in waiting:
            self._place(sequence)
