"""Which replica takes a request."""

from dataclasses import dataclass

from scheduler_service.core.request import Request
from scheduler_service.engine.placing import Placing


@dataclass(eq=False)
class Spot:
    """A replica of a given load, and of a given gain for prompts that begin with `cached`."""

    load: int = 0
    cached: int = -1
    num_cached: int = 0
    is_healthy: bool = True

    def cost(self, request: Request) -> int:
        spared = self.num_cached if request.prompt_token_ids[0] == self.cached else 0
        return self.load + len(request.prompt_token_ids) - spared


def request(first: int, length: int = 200, salt: str = "") -> Request:
    return Request("r", [first] * length, 5, cache_salt=salt)


def test_the_least_loaded_takes_it_and_equals_take_turns() -> None:
    spots = [Spot(), Spot(), Spot(load=50)]
    placing = Placing()
    chosen = [placing.choose(request(i, 10), spots) for i in range(6)]
    assert chosen.count(spots[0]) == chosen.count(spots[1]) == 3


def test_a_cached_prefix_draws_a_request_as_far_as_it_spares_work() -> None:
    warm = Spot(load=100, cached=7, num_cached=160)
    spots = [Spot(), warm]
    assert Placing().choose(request(7), spots) is warm
    warm.load = 170
    assert Placing().choose(request(7), spots) is spots[0]
    assert Placing().choose(request(8), spots) is spots[0]


def test_requests_that_begin_alike_stay_together_before_anything_is_cached() -> None:
    spots, placing = [Spot(), Spot()], Placing()
    first = placing.choose(request(1), spots)
    assert all(placing.choose(request(1), spots) is first for _ in range(5))
    others = [placing.choose(request(2 + i), spots) for i in range(4)]
    assert {*others} == {*spots}


def test_beginnings_of_two_tenants_are_two() -> None:
    spots, placing = [Spot(), Spot()], Placing()
    chosen = {placing.choose(request(1, salt=f"tenant {i}"), spots) for i in range(8)}
    assert chosen == {*spots}


def test_one_that_recovers_is_chosen_only_when_no_other_serves() -> None:
    spots = [Spot(is_healthy=False), Spot(load=10_000)]
    assert Placing().choose(request(1), spots) is spots[1]
    spots[1].is_healthy = False
    assert Placing().choose(request(1), spots) is spots[0]


def test_one_that_is_gone_is_not_remembered() -> None:
    spots, placing = [Spot(), Spot()], Placing()
    first = placing.choose(request(1), spots)
    placing.forget(first)
    rest = [spot for spot in spots if spot is not first]
    assert placing.choose(request(1), rest) is rest[0]


def test_a_burst_that_spills_over_leaves_the_beginning_at_home() -> None:
    spots, placing = [Spot(), Spot()], Placing()
    home = placing.choose(request(1), spots)
    other = next(spot for spot in spots if spot is not home)
    home.load = 1000
    assert placing.choose(request(1), spots) is other
    home.load = 0
    assert placing.choose(request(1), spots) is home
