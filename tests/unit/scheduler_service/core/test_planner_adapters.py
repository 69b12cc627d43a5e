"""Adapters as the plan sees them: few places for them on workers, and a prefix cache for each content."""

from scheduler_service.core.adapters import has_adapter_place
from scheduler_service.core.request import FinishReason
from tests.support.scheduler_rig import SchedulerRig, started


def test_one_without_a_place_waits_for_one() -> None:
    rig = SchedulerRig(max_running_adapters=2)
    first = rig.add_one("a", 5, adapter="x", max_tokens=2)
    others = [rig.add_one("b", 5, adapter="y"), rig.add_one("c", 5, adapter="x"), rig.add_one("d", 5)]
    late = rig.add_one("e", 5, adapter="z")
    assert started(rig.step()) == [first, *others]
    assert started(rig.step()) == []
    rig.scheduler.end_request("b", FinishReason.CANCELLED)
    assert started(rig.step()) == [late]
    rig.finish()
    assert rig.is_whole(late) and rig.is_whole(first)


def test_its_own_adapter_needs_no_second_place() -> None:
    rig = SchedulerRig(max_running_adapters=1)
    same = [rig.add_one(name, 5, adapter="x") for name in "ab"]
    rig.add_one("c", 5, adapter="y")
    assert started(rig.step()) == same
    assert has_adapter_place(same[0], same, 1)


def test_a_higher_priority_takes_the_place_of_a_lower_one() -> None:
    rig = SchedulerRig(max_running_adapters=1)
    low = rig.add_one("low", 5, adapter="x", max_tokens=20)
    rig.step()
    high = rig.add_one("high", 5, adapter="y", priority=1)
    plan = rig.step()
    assert started(plan) == [high] and low not in plan.sequences
    rig.finish()
    assert rig.is_whole(low) and rig.is_whole(high)


def test_nobody_is_preempted_for_a_place_that_this_does_not_give() -> None:
    rig = SchedulerRig(max_running_adapters=1)
    high = rig.add_one("high", 5, adapter="x", priority=2, max_tokens=20)
    low = rig.add_one("low", 5, max_tokens=20)
    rig.step()
    rig.add_one("middle", 5, adapter="y", priority=1)
    rig.step()
    assert (low.num_preemptions, high.num_preemptions) == (0, 0)


def test_without_a_limit_any_number_runs() -> None:
    rig = SchedulerRig()
    sequences = [rig.add_one(str(number), 5, adapter=str(number)) for number in range(8)]
    assert started(rig.step()) == sequences


def test_an_adapter_has_a_prefix_cache_of_its_own() -> None:
    rig = SchedulerRig(block_size=4)
    prompt = rig.prompt(9)
    cached = []
    for number, adapter in enumerate(("x", "", "y", "x")):
        sequence = rig.add_one(str(number), prompt, adapter=adapter)
        rig.finish()
        cached.append(sequence.cached)
    assert cached == [0, 0, 0, 8]
