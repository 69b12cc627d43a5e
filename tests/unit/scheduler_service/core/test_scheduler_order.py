"""Who goes first: aged priority, tenants' shares, deadlines, and what is not started because it is hopeless."""

import pytest

from scheduler_service.core.request import FinishReason
from tests.support.scheduler_rig import SchedulerRig, planned, started


def one_at_a_time(**options: object) -> SchedulerRig:
    return SchedulerRig(max_running=1, max_in_flight=1, **options)  # type: ignore[arg-type]


def order_of_starts(rig: SchedulerRig) -> list[str]:
    names = []
    while not rig.scheduler.is_idle:
        names += [sequence.request.request_id for sequence in started(rig.step())]
    return names


def measured(rig: SchedulerRig, num_tokens: int, seconds: float) -> None:
    """Lets the scheduler see one step of so many tokens take so long."""
    rig.add("measured", num_tokens, max_tokens=1)
    rig.step(seconds)
    rig.step()


def test_of_those_with_a_deadline_the_shortest_starts_first() -> None:
    rig = SchedulerRig(max_running=1, block_size=4, num_blocks=64)
    rig.add_one("first", 4)
    rig.send()
    for name, length, patience in (("late", 12, 10.0), ("none", 2, None), ("early", 4, 90.0), ("middle", 8, 50.0)):
        deadline = None if patience is None else rig.now + 1000 * patience
        rig.add(name, length, max_tokens=1, deadline=deadline)
    assert order_of_starts(rig) == ["early", "middle", "late", "none"]


def test_a_request_that_waits_long_enough_goes_before_higher_priorities() -> None:
    rig = one_at_a_time(ageing_s=10.0)
    rig.add("old", 4, max_tokens=1)
    rig.now += 25
    rig.add("important", 4, max_tokens=1, priority=1)
    rig.add("most important", 4, max_tokens=1, priority=3)
    assert order_of_starts(rig) == ["most important", "old", "important"]


def test_age_gives_no_right_to_preempt() -> None:
    rig = one_at_a_time(ageing_s=10.0)
    rig.add("old", 4)
    rig.now += 100
    rig.add("running", 4)
    assert order_of_starts(rig) == ["old", "running"]
    assert rig.scheduler.stats.num_preemptions == 0


def test_an_aged_victim_does_not_take_its_place_back() -> None:
    rig = one_at_a_time(ageing_s=10.0)
    rig.add("old", 4)
    rig.step()
    rig.now += 100
    high = rig.add_one("high", 4, max_tokens=2, priority=1)
    assert started(rig.step()) == [high]
    assert rig.scheduler.stats.num_preemptions == 1
    rig.finish()


def test_tenants_take_turns_whoever_asks_for_more() -> None:
    rig = one_at_a_time()
    for i in range(4):
        rig.add(f"greedy {i}", 6, max_tokens=1, tenant="greedy")
    for i in range(2):
        rig.add(f"modest {i}", 6, max_tokens=1, tenant="modest")
    assert order_of_starts(rig) == ["greedy 0", "modest 0", "greedy 1", "modest 1", "greedy 2", "greedy 3"]


def test_a_weight_gives_a_larger_share() -> None:
    rig = one_at_a_time(tenant_weights={"heavy": 3.0})
    for i in range(6):
        rig.add(f"heavy {i}", 6, max_tokens=1, tenant="heavy")
        rig.add(f"plain {i}", 6, max_tokens=1, tenant="plain")
    first = order_of_starts(rig)[:8]
    assert sum(name.startswith("heavy") for name in first) == 6


def test_output_counts_twice_as_much_as_a_prompt() -> None:
    rig = one_at_a_time()
    for tenant, prompt, max_tokens in [("a talker", 2, 5), ("reader", 8, 1)]:
        for i in range(2):
            rig.add(f"{tenant} {i}", prompt, max_tokens=max_tokens, tenant=tenant)
    # The talker has had 2 + 2 x 5, the reader 8 + 2.
    assert order_of_starts(rig) == ["a talker 0", "reader 0", "reader 1", "a talker 1"]


def test_a_cached_prefix_is_not_charged() -> None:
    rig = one_at_a_time(block_size=4)
    prompt = rig.prompt(13)
    rig.add("warm", prompt, max_tokens=1)
    rig.finish()
    for i in range(2):
        rig.add(f"cached {i}", prompt, max_tokens=1, tenant="cached")
        rig.add(f"other {i}", 5, max_tokens=1, tenant="other")
    # One token of the first's prompt had to be computed, five of the other's.
    assert order_of_starts(rig) == ["cached 0", "other 0", "cached 1", "other 1"]


@pytest.mark.parametrize(("patience", "is_hopeless"), [(6.9, True), (7.1, False)])
def test_a_request_that_cannot_meet_its_deadline_is_not_started(patience: float, is_hopeless: bool) -> None:
    rig = SchedulerRig(max_step_tokens=20)
    measured(rig, 20, 2.0)
    # Fifty tokens take five seconds at ten a second, and one step two.
    sequence = rig.add_one("a", 50, deadline=rig.now + patience)
    events = rig.scheduler.expire()
    assert [(e.sequence, e.finish_reason) for e in events] == [(sequence, FinishReason.DEADLINE)] * is_hopeless
    assert rig.scheduler.stats.num_hopeless == is_hopeless


def test_a_waiting_request_is_ended_when_it_becomes_hopeless() -> None:
    rig = SchedulerRig(max_step_tokens=20, max_running=1)
    measured(rig, 20, 2.0)
    rig.add("hog", 5, max_tokens=100)
    rig.step(2.0)
    sequence = rig.add_one("a", 50, deadline=rig.now + 20)
    assert rig.scheduler.expire() == []
    due = rig.scheduler.next_deadline()
    assert due == pytest.approx(rig.now + 13)
    rig.now = due + 0.01
    assert [e.sequence for e in rig.scheduler.expire()] == [sequence]


def test_a_cached_prefix_makes_a_deadline_possible() -> None:
    rig = SchedulerRig(max_step_tokens=20, block_size=4)
    measured(rig, 20, 2.0)
    prompt = rig.prompt(50)
    rig.add("warm", prompt, max_tokens=1)
    while not rig.scheduler.is_idle:
        rig.step(2.0)
    rig.add("a", prompt, deadline=rig.now + 3)
    assert rig.scheduler.expire() == []
    # Two tokens are left to compute, and one step.
    assert rig.scheduler.next_deadline() == pytest.approx(rig.now + 3 - 2.2)


def test_what_has_started_is_ended_at_its_deadline_and_not_before() -> None:
    rig = SchedulerRig(max_step_tokens=20)
    measured(rig, 20, 2.0)
    sequence = rig.add_one("a", 50, deadline=rig.now + 8)
    rig.send()
    rig.now += 7.9
    assert rig.scheduler.expire() == []
    rig.now += 0.1
    assert [e.sequence for e in rig.scheduler.expire()] == [sequence]
    assert rig.scheduler.stats.num_hopeless == 0


def test_slow_small_steps_make_no_long_prompt_hopeless() -> None:
    rig = SchedulerRig(max_step_tokens=64)
    for _ in range(10):
        measured(rig, 1, 0.02)
    sequence = rig.add_one("long", 60, deadline=rig.now + 0.5)
    assert rig.scheduler.expire() == []
    assert planned(rig.send()) == {sequence: 60}


def test_time_between_steps_is_no_work() -> None:
    rig = SchedulerRig(max_step_tokens=20)
    measured(rig, 20, 2.0)
    rig.now += 1000
    measured(rig, 20, 2.0)
    assert rig.scheduler.stats.tokens_per_s == pytest.approx(10)


def test_a_step_in_flight_behind_another_took_from_that_ones_end() -> None:
    rig = SchedulerRig(max_step_tokens=20)
    rig.add("a", 40, max_tokens=1)
    rig.send()
    rig.send()
    for _ in range(2):
        rig.now += 2
        rig.answer()
    assert rig.scheduler.stats.tokens_per_s == pytest.approx(10)
    assert rig.scheduler.stats.best_step_s == pytest.approx(2)
