"""Preemption: who must go, what is kept of its work, and how it comes back."""

import pytest

from scheduler_service.core.plan import StepPlan
from scheduler_service.core.request import FinishReason, Sequence, SequenceState
from tests.support.scheduler_rig import SchedulerRig, planned, started


def preempted(plan: StepPlan, *sequences: Sequence) -> list[Sequence]:
    """Which of these sequences a plan preempts, in its order."""
    by_id = {sequence.sequence_id: sequence for sequence in sequences}
    return [by_id[sequence_id] for sequence_id in plan.preempted_sequence_ids]


def crowded(rig: SchedulerRig, *lengths: int, priorities: tuple[int, ...] = (0, 0, 0)) -> list[Sequence]:
    """Sequences that together hold all six blocks, the first of which needs one more in the next step."""
    sequences = []
    for index, (length, priority) in enumerate(zip(lengths, priorities, strict=True)):
        rig.now += 1
        sequences.append(rig.add_one(str(index), length, priority=priority))
    rig.step()
    assert rig.scheduler.num_free_blocks == 0
    return sequences


def small_rig(**limits: int) -> SchedulerRig:
    return SchedulerRig(num_blocks=6, block_size=4, **limits)


def test_nobody_is_preempted_while_blocks_are_free() -> None:
    rig = SchedulerRig(num_blocks=7, block_size=4)
    for index in range(3):
        rig.add(str(index), 7, max_tokens=2)
    rig.finish()
    assert rig.scheduler.stats.num_preemptions == 0


def test_a_preempted_sequence_gives_its_blocks_and_waits() -> None:
    rig = small_rig()
    first, second, third = crowded(rig, 8, 5, 7)
    plan = rig.send()
    assert preempted(plan, first, second, third) == [second]
    assert planned(plan) == {first: 1, third: 1}
    assert (second.state, second.block_ids, second.computed) == (SequenceState.WAITING, [], 0)
    assert (rig.scheduler.num_running, rig.scheduler.num_waiting) == (2, 1)
    assert rig.scheduler.num_free_blocks == 1
    assert rig.scheduler.stats.num_preemptions == second.num_preemptions == 1


def test_the_victim_costs_least_recomputation_for_each_block_freed() -> None:
    rig = small_rig()
    first, second, third = crowded(rig, 8, 7, 5)
    assert preempted(rig.send(), first, second, third) == [third]
    rig = small_rig()
    first, second, third = crowded(rig, 8, 5, 7)
    assert preempted(rig.send(), first, second, third) == [second]


def test_of_equal_cost_the_youngest_goes() -> None:
    rig = small_rig()
    first, second, third = crowded(rig, 8, 6, 6)
    assert preempted(rig.send(), first, second, third) == [third]


def test_of_equal_arrival_the_last_accepted_goes() -> None:
    rig = small_rig()
    sequences = [rig.add_one(str(index), length) for index, length in enumerate([8, 6, 6])]
    rig.step()
    assert preempted(rig.send(), *sequences) == [sequences[2]]


def test_the_lowest_priority_goes_first_whatever_it_costs() -> None:
    rig = small_rig()
    first, second, third = crowded(rig, 8, 5, 7, priorities=(2, 1, 0))
    assert preempted(rig.send(), first, second, third) == [third]


def test_one_that_has_not_regained_its_loss_is_spared() -> None:
    rig = small_rig()
    first, second, third = crowded(rig, 8, 5, 7)
    second.protected_until = 6
    assert preempted(rig.send(), first, second, third) == [third]
    rig = small_rig()
    first, second, third = crowded(rig, 8, 5, 7)
    second.protected_until = 5
    assert preempted(rig.send(), first, second, third) == [second]


def test_protection_does_not_outweigh_priority() -> None:
    rig = small_rig()
    first, second, third = crowded(rig, 8, 5, 7, priorities=(1, 0, 1))
    second.protected_until = 100
    assert preempted(rig.send(), first, second, third) == [second]


def test_a_preempted_sequence_is_protected_until_it_gained_what_it_lost() -> None:
    rig = small_rig()
    _, second, _ = crowded(rig, 8, 5, 7)
    rig.send()
    assert second.protected_until == 10


def test_a_sequence_gives_way_itself_when_another_would_lose_more() -> None:
    rig = SchedulerRig(num_blocks=6, block_size=4)
    prompt = rig.prompt(8)
    rig.add("a", prompt, max_tokens=10)
    rig.step()
    older, sharer = rig.add_one("b", 8), rig.add_one("c", [*prompt, 1])
    rig.step()
    assert (rig.scheduler.num_free_blocks, sharer.computed, len(sharer.block_ids)) == (0, 9, 3)
    # To free its only block that nobody shares, the younger would lose nine tokens.
    plan = rig.send()
    assert preempted(plan, older, sharer) == [older]
    assert planned(plan)[sharer] == 1


def test_only_as_many_go_as_are_needed() -> None:
    rig = SchedulerRig(num_blocks=8, block_size=4)
    for index, length in enumerate([8, 5, 5, 5]):
        rig.add(str(index), length)
    rig.step()
    assert len(rig.send().preempted_sequence_ids) == 1


def test_a_preempted_sequence_keeps_its_answers_in_flight() -> None:
    rig = small_rig(max_in_flight=3)
    first, second, third = rig.add_one("a", 8), rig.add_one("b", 5), rig.add_one("c", 7)
    rig.send()
    plan = rig.send()
    assert preempted(plan, first, second, third) == [second]
    assert second.state is SequenceState.PREEMPTED
    rig.scheduler.end_request("a", FinishReason.CANCELLED)
    # There is room, but its first token is not known yet.
    assert started(rig.send()) == []
    assert [event.sequence for event in rig.answer()] == [second, third]
    plan = rig.send()
    assert started(plan) == [second]
    assert plan.new_sequences[0].token_ids == [*second.request.prompt_token_ids, *rig.outputs[second]]
    assert len(plan.new_sequences[0].token_ids) == 6
    rig.finish()
    assert rig.is_whole(second)


def test_a_preempted_sequence_can_end_by_an_answer_in_flight() -> None:
    rig = small_rig()
    rig.add_one("a", 8)
    second = rig.add_one("b", 5)
    rig.add_one("c", 7)
    rig.send()
    rig.send()
    assert second.state is SequenceState.PREEMPTED
    events = rig.answer(stop=[second])
    assert (second, FinishReason.STOP) in [(e.sequence, e.finish_reason) for e in events]
    assert second.state is SequenceState.FINISHED
    plan = rig.send()
    assert second.sequence_id not in [*plan.finished_sequence_ids, *plan.sequence_ids]


def test_a_preempted_sequence_can_be_cancelled() -> None:
    rig = small_rig()
    rig.add("a", 8)
    second = rig.add_one("b", 5)
    rig.add("c", 7)
    rig.send()
    rig.send()
    assert second.state is SequenceState.PREEMPTED
    assert [e.sequence for e in rig.scheduler.end_request("b", FinishReason.CANCELLED)] == [second]
    rig.finish()
    assert second not in rig.outputs


def test_a_preempted_sequence_goes_on_where_it_was_and_counts_its_cached_tokens_once() -> None:
    rig = SchedulerRig(num_blocks=8, block_size=4, max_running=1)
    prompt = rig.prompt(9)
    rig.add("warm", prompt, max_tokens=1)
    rig.finish()
    low = rig.add_one("low", prompt, max_tokens=12)
    for _ in range(6):
        rig.step()
    assert low.cached == 8
    rig.add("high", 5, max_tokens=2, priority=1)
    rig.finish()
    assert low.num_preemptions == 1
    assert low.cached == 8
    assert rig.is_whole(low)


def test_a_waiting_sequence_of_higher_priority_preempts_for_blocks() -> None:
    rig = SchedulerRig(num_blocks=4, block_size=4)
    low = rig.add_one("low", 13, max_tokens=4)
    rig.step()
    high = rig.add_one("high", 5, max_tokens=2, priority=1)
    plan = rig.send()
    assert preempted(plan, low) == [low]
    assert planned(plan) == {high: 5}
    rig.finish()
    assert rig.is_whole(low)


def test_a_waiting_sequence_of_higher_priority_preempts_for_a_place() -> None:
    rig = SchedulerRig(max_running=2)
    older = rig.add_one("older", 6)
    rig.now += 1
    younger = rig.add_one("younger", 6)
    rig.step()
    high = rig.add_one("high", 5, priority=1)
    plan = rig.send()
    assert preempted(plan, older, younger) == [younger]
    assert started(plan) == [high]
    assert list(planned(plan)) == [older, high]


def test_equal_priority_never_preempts_to_start() -> None:
    rig = SchedulerRig(max_running=1)
    rig.add("a", 6, priority=1)
    rig.step()
    rig.add("b", 5, priority=1)
    rig.add("c", 5)
    plan = rig.send()
    assert (plan.preempted_sequence_ids, started(plan)) == ([], [])


def test_what_the_victims_free_may_be_just_enough() -> None:
    rig = SchedulerRig(num_blocks=4, block_size=4)
    low = rig.add_one("low", 13, max_tokens=4)
    rig.step()
    high = rig.add_one("high", 16, max_tokens=1, priority=1)
    plan = rig.send()
    assert preempted(plan, low) == [low]
    assert planned(plan) == {high: 16}


def test_nobody_is_preempted_for_a_sequence_that_still_could_not_start() -> None:
    rig = SchedulerRig(num_blocks=8, block_size=4)
    rig.add("peer", 17, max_tokens=3, priority=1)
    low = rig.add_one("low", 6)
    rig.step()
    rig.add("high", 20, max_tokens=2, priority=1)
    plan = rig.send()
    assert preempted(plan, low) == []
    assert low in planned(plan)


def test_a_prompt_under_way_gives_back_the_blocks_it_was_promised() -> None:
    rig = SchedulerRig(num_blocks=10, block_size=4, max_step_tokens=8)
    low = rig.add_one("low", 40, max_tokens=1)
    rig.step()
    # Two blocks are held and eight promised: all ten are lost to it otherwise.
    high = rig.add_one("high", 16, priority=1)
    plan = rig.send()
    assert preempted(plan, low) == [low]
    assert planned(plan) == {high: 8}
    rig.finish()
    assert rig.is_whole(low)
    assert rig.is_whole(high)


def test_only_lower_priorities_are_preempted_and_only_as_many_as_needed() -> None:
    rig = SchedulerRig(num_blocks=6, block_size=4)
    peer, low, lower = crowded(rig, 7, 7, 7, priorities=(2, 1, 0))
    high = rig.add_one("high", 6, max_tokens=2, priority=2)
    plan = rig.send()
    assert preempted(plan, peer, low, lower) == [lower]
    assert planned(plan) == {peer: 1, low: 1, high: 6}


@pytest.mark.parametrize("seed", range(5))
def test_a_cache_of_one_sequences_size_serves_all_in_the_end(seed: int) -> None:
    rig = SchedulerRig(num_blocks=6, block_size=4, max_running=4, max_step_tokens=8, max_in_flight=1 + seed % 3)
    sequences = [rig.add_one(str(i), 3 + (i * 5 + seed) % 9, max_tokens=12, priority=i % 2) for i in range(8)]
    rig.finish()
    assert rig.scheduler.stats.num_preemptions > 0
    assert all(rig.is_whole(sequence) for sequence in sequences)
