"""Deadlines: the next live request to look at, and no memory of ended ones."""

from collections.abc import Iterator

from scheduler_service.core.deadlines import Deadlines
from scheduler_service.core.request import Request


def request(request_id: str, check_at: float) -> Request:
    return Request(request_id, [1], 1, deadline=check_at)


def ids(requests: Iterator[Request]) -> list[str]:
    return [one.request_id for one in requests]


class Live:
    """The requests that live, and the check that `Deadlines` asks for."""

    def __init__(self, *requests: Request) -> None:
        self.requests = list(requests)

    def __call__(self, request: Request) -> bool:
        return any(request is other for other in self.requests)


def deadlines(live: Live) -> Deadlines:
    made = Deadlines()
    for one in live.requests:
        made.add(one, one.deadline or 0.0, live)
    return made


def test_without_requests_nothing_is_due() -> None:
    live = Live()
    assert deadlines(live).next(live) is None
    assert ids(deadlines(live).due(1e9, live)) == []


def test_the_earliest_comes_first() -> None:
    live = Live(request("late", 30.0), request("early", 10.0), request("middle", 20.0))
    due = deadlines(live)
    assert due.next(live) == 10.0
    assert ids(due.due(25.0, live)) == ["early", "middle"]
    assert due.next(live) == 30.0


def test_a_request_is_due_at_its_very_moment() -> None:
    live = Live(request("a", 10.0))
    due = deadlines(live)
    assert ids(due.due(9.999, live)) == []
    assert ids(due.due(10.0, live)) == ["a"]
    assert ids(due.due(10.0, live)) == []


def test_equal_times_come_in_the_order_of_arrival() -> None:
    live = Live(*(request(str(i), 5.0) for i in range(5)))
    assert ids(deadlines(live).due(5.0, live)) == ["0", "1", "2", "3", "4"]


def test_an_ended_request_is_never_due() -> None:
    live = Live(request("ended", 10.0), request("alive", 20.0))
    due = deadlines(live)
    del live.requests[0]
    assert due.next(live) == 20.0
    assert ids(due.due(50.0, live)) == ["alive"]


def test_a_request_can_be_looked_at_again() -> None:
    live = Live(request("a", 10.0))
    due = deadlines(live)
    (first,) = due.due(10.0, live)
    assert due.next(live) is None
    due.add(first, 20.0, live)
    assert due.next(live) == 20.0


def test_ended_requests_with_deadlines_far_away_are_forgotten() -> None:
    keeper = request("keeper", 1e12)
    live = Live(keeper)
    due = deadlines(live)
    for i in range(2000):
        passing = request(str(i), 1e9 + i)
        live.requests.append(passing)
        due.add(passing, 1e9 + i, live)
        live.requests.remove(passing)
        assert len(due) <= 64
    assert due.next(live) == 1e12


def test_live_requests_are_not_gone_through_again_and_again() -> None:
    live = Live()
    num_asked = 0

    def is_live(_: Request) -> bool:
        nonlocal num_asked
        num_asked += 1
        return True

    due = deadlines(live)
    for i in range(2000):
        due.add(request(str(i), float(i)), float(i), is_live)
    assert len(due) == 2000
    assert num_asked < 3 * 2000


def test_a_sweep_keeps_every_live_deadline_in_order() -> None:
    live = Live(*(request(str(i), float((i * 37) % 300)) for i in range(300)))
    due = deadlines(live)
    assert len(due) == 300
    assert ids(due.due(1e9, live)) == [r.request_id for r in sorted(live.requests, key=lambda r: r.deadline or 0)]
