"""Requests that go from one scheduler to another: nothing is lost, nothing comes twice."""

import random
from collections.abc import Iterable

import pytest

from scheduler_service.core.errors import DuplicateRequest, NeverFits
from scheduler_service.core.request import FinishReason, Sequence
from tests.support.scheduler_rig import SchedulerRig


def move(request_ids: Iterable[str], source: SchedulerRig, target: SchedulerRig) -> None:
    """From one rig to another, with what was delivered."""
    for sequences in source.scheduler.withdraw(request_ids):
        target.scheduler.adopt(sequences)
        for sequence in sequences:
            if sequence in source.outputs:
                target.outputs[sequence] = source.outputs.pop(sequence)
    for rig in (source, target):
        rig.scheduler.check_integrity()


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 5])
def test_a_moved_request_goes_on_where_it_was(num_steps: int) -> None:
    source, target = SchedulerRig(), SchedulerRig()
    moved, stays = source.add_one("a", 21), source.add_one("b", 5)
    for _ in range(num_steps):
        source.step()
    move(["a", "unknown"], source, target)
    source.finish()
    target.finish()
    assert target.is_whole(moved) and source.is_whole(stays)
    assert moved.num_preemptions == (num_steps > 0)


def test_answers_that_are_in_flight_are_ignored_and_the_worker_forgets() -> None:
    source, target = SchedulerRig(), SchedulerRig()
    sequence = source.add_one("a", 5)
    old_id = sequence.sequence_id
    source.send()
    source.send()
    move(["a"], source, target)
    assert source.answer() == [] and source.answer() == []
    assert source.send().finished_sequence_ids == [old_id]
    source.finish()
    target.finish()
    assert target.is_whole(sequence) and source.scheduler.is_idle


def test_siblings_move_together_whether_held_back_or_not() -> None:
    for num_steps in (0, 1, 3):
        source, target = SchedulerRig(max_step_tokens=8), SchedulerRig()
        sequences = source.add("a", 14, n=3)
        for _ in range(num_steps):
            source.step()
        move(["a"], source, target)
        assert target.scheduler.num_waiting == 3 and source.scheduler.num_waiting == 0
        target.finish()
        assert all(target.is_whole(sequence) for sequence in sequences)


def test_what_left_a_queue_is_not_taken_for_what_waits_elsewhere() -> None:
    """Tickets of two queues may be equal."""
    source, target = SchedulerRig(max_running=1), SchedulerRig(max_running=1)
    source.add("runs", 5, max_tokens=30)
    target.add("runs too", 5, max_tokens=30)
    source.step()
    target.step()
    waits = source.add_one("a", 5)
    move(["a"], source, target)
    source.finish()
    assert waits not in source.outputs
    target.finish()
    assert target.is_whole(waits)


def test_what_cannot_be_adopted_changes_nothing() -> None:
    source, small = SchedulerRig(), SchedulerRig(num_blocks=4, block_size=4)
    source.add("a", 30, max_tokens=8)
    ((sequence,),) = source.scheduler.withdraw(["a"])
    with pytest.raises(NeverFits):
        small.scheduler.adopt([sequence])
    other = SchedulerRig()
    other.add("a", 3)
    with pytest.raises(DuplicateRequest):
        other.scheduler.adopt([sequence])
    for rig in (small, other):
        rig.scheduler.check_integrity()
    source.scheduler.adopt([sequence])
    source.finish()
    assert source.is_whole(sequence)


def test_a_full_queue_adopts_all_the_same_and_deadlines_hold() -> None:
    source, target = SchedulerRig(), SchedulerRig(max_queued_requests=1, max_running=1)
    target.add("runs", 5, max_tokens=50)
    target.step()
    target.add("waits", 5)
    moved = source.add_one("a", 5, deadline=source.now + 5)
    source.step()
    move(["a"], source, target)
    target.now += 6
    assert [event.sequence for event in target.scheduler.expire()] == [moved]
    assert moved.finish_reason is FinishReason.DEADLINE


def test_cached_tokens_are_told_without_a_change() -> None:
    rig = SchedulerRig(block_size=4)
    prompt = rig.prompt(14)
    rig.add("a", prompt, max_tokens=2)
    rig.finish()
    request = SchedulerRig().add_one("b", prompt).request
    before = rig.scheduler.num_free_blocks, rig.scheduler.num_cached_blocks
    assert rig.scheduler.num_cached_tokens(request) == 12
    assert SchedulerRig(block_size=4).scheduler.num_cached_tokens(request) == 0
    assert (rig.scheduler.num_free_blocks, rig.scheduler.num_cached_blocks) == before


@pytest.mark.parametrize("seed", range(20))
def test_moves_at_any_time_between_three(seed: int) -> None:
    rng = random.Random(seed)
    rigs = [SchedulerRig(num_blocks=20, max_running=4, max_step_tokens=12) for _ in range(3)]
    where: dict[str, int] = {}
    sequences: list[Sequence] = []
    for turn in range(150):
        number = rng.randrange(3)
        rig = rigs[number]
        if rng.random() < 0.3:
            sequences += rig.add(f"r{turn}", rng.randrange(1, 20), rng.randrange(1, 12), n=rng.randrange(1, 3))
            where[f"r{turn}"] = number
        if rng.random() < 0.25 and where:
            names = rng.sample(sorted(where), min(len(where), 3))
            target = rng.randrange(3)
            move([n for n in names if where[n] == number], rig, rigs[target]) if target != number else None
            where.update({n: target for n in names if where[n] == number})
        if (plan := rig.scheduler.schedule()) is not None:
            rig.sent.append(plan)
        if rig.sent and rng.random() < 0.8:
            rig.answer()
    for rig in rigs:
        rig.finish()
    outputs = {sequence: tokens for rig in rigs for sequence, tokens in rig.outputs.items()}
    assert outputs.keys() == set(sequences)
    rigs[0].outputs = outputs
    assert all(rigs[0].is_whole(sequence) for sequence in sequences)
