"""The order of the waiting queue, its ageing, and what leaves it otherwise than by its turn."""

from collections.abc import Callable

import pytest

from scheduler_service.core.prefix import KeyChain
from scheduler_service.core.queue import WaitingQueue
from scheduler_service.core.request import Request, Sequence, SequenceState
from scheduler_service.core.tenants import TenantLedger

Make = Callable[..., Sequence]
AGEING_S = 10.0


@pytest.fixture
def ledger() -> TenantLedger:
    """The tenants' counts, which order those of one priority."""
    return TenantLedger({})


@pytest.fixture
def queue(ledger: TenantLedger) -> WaitingQueue:
    """An empty queue."""
    return WaitingQueue(ledger, AGEING_S)


@pytest.fixture
def make(ledger: TenantLedger) -> Make:
    """Makes sequences with ids from 1 on."""
    made: list[Sequence] = []

    def make_one(
        *, priority: int = 0, arrival: float = 0.0, tenant: str = "", deadline: float | None = None, length: int = 1
    ) -> Sequence:
        request = Request("r", [1] * length, 1, priority=priority, tenant=tenant, deadline=deadline)
        keys = KeyChain(block_size=4, adapter="", salt="")
        ledger.enter(tenant, 1)
        made.append(Sequence(len(made) + 1, 0, request, arrival, [1] * length, 1, keys))
        return made[-1]

    return make_one


def push(queue: WaitingQueue, *sequences: Sequence, now: float = 0.0) -> None:
    for sequence in sequences:
        queue.push(sequence, now)


def drain(queue: WaitingQueue) -> list[Sequence]:
    order = []
    while (sequence := queue.peek()) is not None:
        queue.pop()
        sequence.state = SequenceState.RUNNING
        order.append(sequence)
    return order


def leave(queue: WaitingQueue, sequence: Sequence) -> None:
    sequence.state = SequenceState.FINISHED
    queue.note_departure()


def num_entries(queue: WaitingQueue) -> int:
    """What the queue keeps in memory, live or not."""
    heaps = [heap for level in queue._levels.values() for heap in level._heaps.values()]
    return max(len(queue._ageing), sum(map(len, heaps)))


def test_an_empty_queue_has_no_head(queue: WaitingQueue) -> None:
    assert queue.peek() is None
    assert (len(queue), list(queue)) == (0, [])


def test_higher_priority_goes_first_then_earlier_arrival_then_lower_id(queue: WaitingQueue, make: Make) -> None:
    late, early, twin, urgent = make(arrival=2), make(arrival=1), make(arrival=1), make(priority=1, arrival=3)
    push(queue, late, twin, urgent, early)
    assert drain(queue) == [urgent, early, twin, late]


def test_of_those_with_a_deadline_the_shortest_goes_first_and_then_those_without(
    queue: WaitingQueue, make: Make
) -> None:
    long, none, short = make(deadline=50.0, length=9), make(arrival=1), make(arrival=2, deadline=90.0, length=3)
    push(queue, long, none, short)
    assert drain(queue) == [short, long, none]


def test_of_two_as_long_the_one_that_came_first_goes_first(queue: WaitingQueue, make: Make) -> None:
    late, early = make(arrival=2, deadline=5.0), make(arrival=1, deadline=9.0)
    push(queue, late, early)
    assert drain(queue) == [early, late]


def test_priority_goes_before_deadline(queue: WaitingQueue, make: Make) -> None:
    urgent, important = make(deadline=5.0), make(priority=1)
    push(queue, urgent, important)
    assert drain(queue) == [important, urgent]


def test_the_tenant_that_has_had_least_goes_first(queue: WaitingQueue, make: Make, ledger: TenantLedger) -> None:
    greedy, modest = make(tenant="greedy", deadline=1.0), make(tenant="modest", arrival=9)
    ledger.charge("greedy", 10)
    push(queue, greedy, modest)
    assert drain(queue) == [modest, greedy]


def test_what_a_tenant_is_charged_while_it_waits_counts(queue: WaitingQueue, make: Make, ledger: TenantLedger) -> None:
    first = [make(tenant="a", arrival=i) for i in range(2)]
    second = [make(tenant="b", arrival=i) for i in range(2)]
    push(queue, *first, *second)
    assert queue.peek() is first[0]
    queue.pop()
    first[0].state = SequenceState.RUNNING
    ledger.charge("a", 100)
    assert queue.peek() is second[0]
    ledger.charge("b", 50)
    assert queue.peek() is second[0]
    ledger.charge("b", 51)
    assert queue.peek() is first[1]


def test_priority_goes_before_a_tenants_share(queue: WaitingQueue, make: Make, ledger: TenantLedger) -> None:
    greedy, modest = make(tenant="greedy", priority=1), make(tenant="modest")
    ledger.charge("greedy", 10)
    push(queue, greedy, modest)
    assert drain(queue) == [greedy, modest]


def test_waiting_lifts_by_one_priority_for_each_period(queue: WaitingQueue, make: Make) -> None:
    old, important = make(), make(priority=2, arrival=15.0)
    push(queue, old)
    push(queue, important, now=15.0)
    queue.age(19.9)
    assert (old.level, queue.peek()) == (1, important)
    queue.age(20.0)
    assert (old.level, queue.peek()) == (2, old)
    queue.age(30.0)
    assert (old.level, important.level) == (3, 3)
    assert queue.peek() is old


def test_a_lift_comes_at_its_very_moment(queue: WaitingQueue, make: Make) -> None:
    old = make(arrival=5.0)
    push(queue, old, now=5.0)
    queue.age(14.999)
    assert old.level == 0
    queue.age(15.0)
    assert old.level == 1
    queue.age(15.0)
    assert old.level == 1


def test_a_sequence_comes_back_at_the_level_of_its_age(queue: WaitingQueue, make: Make) -> None:
    preempted = make(priority=1, arrival=0.0)
    push(queue, preempted, now=25.0)
    assert (preempted.level, preempted.state) == (3, SequenceState.WAITING)
    queue.age(29.9)
    assert preempted.level == 3
    queue.age(30.0)
    assert preempted.level == 4


def test_one_that_left_is_not_lifted(queue: WaitingQueue, make: Make) -> None:
    gone = make()
    push(queue, gone)
    leave(queue, gone)
    queue.age(100.0)
    assert (gone.level, queue.peek(), len(queue)) == (0, None, 0)


def test_one_that_started_and_came_back_waits_in_one_place_only(queue: WaitingQueue, make: Make) -> None:
    again, other = make(), make(arrival=1.0)
    push(queue, again, other)
    queue.pop()
    again.state = SequenceState.PREEMPTED
    push(queue, again, now=12.0)
    assert sorted(s.sequence_id for s in queue) == [1, 2]
    queue.age(12.0)
    assert again.level == 1
    assert drain(queue) == [again, other]


def test_a_burst_is_lifted_a_part_at_a_time_the_oldest_first(queue: WaitingQueue, make: Make) -> None:
    burst = [make(arrival=i / 1000) for i in range(300)]
    push(queue, *reversed(burst))
    queue.age(11.0)
    assert [s.level for s in burst] == [1] * 256 + [0] * 44
    queue.age(11.0)
    assert {s.level for s in burst} == {1}
    assert drain(queue) == burst


def test_one_can_be_put_before_all_others(queue: WaitingQueue, make: Make) -> None:
    top, low = make(priority=7), make()
    push(queue, top, low)
    queue.put_first(low)
    assert len(queue) == 2
    assert drain(queue) == [low, top]


def test_looking_takes_nothing(queue: WaitingQueue, make: Make) -> None:
    push(queue, make())
    assert queue.peek() is queue.peek()
    assert len(queue) == 1
    queue.pop()
    assert len(queue) == 0


def test_what_left_is_skipped_and_not_counted(queue: WaitingQueue, make: Make) -> None:
    gone, stays = make(arrival=1), make(arrival=2)
    push(queue, gone, stays)
    leave(queue, gone)
    assert (len(queue), list(queue)) == (1, [stays])
    assert drain(queue) == [stays]


def test_departures_do_not_pile_up_in_memory(queue: WaitingQueue, make: Make) -> None:
    stays = make(arrival=0.5)
    push(queue, stays)
    for _ in range(1000):
        gone = make(arrival=1)
        push(queue, gone)
        leave(queue, gone)
        assert num_entries(queue) <= 65
    assert drain(queue) == [stays]


def test_starts_do_not_pile_up_in_memory(queue: WaitingQueue, make: Make) -> None:
    stays = make()
    push(queue, stays)
    for _ in range(1000):
        starts = make(priority=1)
        push(queue, starts)
        assert queue.peek() is starts
        queue.pop()
        starts.state = SequenceState.RUNNING
        assert num_entries(queue) <= 65
    assert drain(queue) == [stays]


def test_lifts_do_not_pile_up_in_memory(queue: WaitingQueue, make: Make) -> None:
    sequences = [make(arrival=i / 100) for i in range(100)]
    push(queue, *sequences)
    for period in range(1, 50):
        queue.age(1.0 + period * AGEING_S)
        passing = make(priority=1000)
        push(queue, passing)
        leave(queue, passing)
        assert num_entries(queue) <= 500
    assert drain(queue) == sequences


def test_a_sweep_keeps_the_order(queue: WaitingQueue, make: Make) -> None:
    sequences = [make(arrival=(i * 37) % 50 / 10, priority=i % 3) for i in range(200)]
    push(queue, *sequences, now=5.0)
    for sequence in sequences[::2] + sequences[1::4]:
        leave(queue, sequence)
    left = sequences[3::4]
    # Were what the sweep dropped still counted, each departure would sweep again.
    assert queue._num_entries <= 3 * len(left)
    assert len(queue) == len(left) == 50
    assert num_entries(queue) < 200
    assert drain(queue) == sorted(left, key=lambda s: (-s.request.priority, s.arrival, s.sequence_id))
