"""Holding: what runs ends or is preempted, nothing starts, and everything goes on after it."""

import pytest

from scheduler_service.core.request import FinishReason, SequenceState
from tests.support.scheduler_rig import SchedulerRig


def drained(rig: SchedulerRig) -> None:
    """Runs steps until there are no more to send."""
    while (plan := rig.scheduler.schedule()) is not None or rig.sent:
        if plan is not None:
            rig.sent.append(plan)
        if rig.sent and (plan is None or rig.scheduler.num_in_flight == rig.scheduler.config.max_in_flight):
            rig.answer()


@pytest.mark.parametrize("preempt", [False, True])
def test_nothing_starts_until_the_release(*, preempt: bool) -> None:
    rig = SchedulerRig(max_running=2)
    running = [rig.add_one(f"r{i}", 10) for i in range(2)]
    waiting = rig.add_one("w", 10)
    rig.send()
    rig.scheduler.hold(preempt=preempt)
    late = rig.add_one("late", 10, priority=5)
    assert not rig.scheduler.is_quiet
    drained(rig)
    assert rig.scheduler.is_quiet and not rig.worker.sequences
    assert rig.scheduler.num_free_blocks == rig.scheduler.config.num_blocks
    assert all(rig.is_whole(sequence) is not preempt for sequence in running if sequence in rig.outputs)
    assert waiting not in rig.outputs and late not in rig.outputs
    rig.scheduler.forget_content()
    rig.scheduler.check_integrity()
    assert rig.scheduler.num_cached_blocks == 0
    rig.scheduler.release()
    rig.finish()
    assert all(rig.is_whole(sequence) for sequence in [*running, waiting, late])


def test_a_sequence_that_must_make_room_waits_for_the_release() -> None:
    rig = SchedulerRig(num_blocks=6, max_running=2)
    first, second = rig.add_one("a", 8, 12), rig.add_one("b", 8, 12)
    rig.step()
    rig.scheduler.hold(preempt=False)
    drained(rig)
    assert rig.is_whole(first) and second.state is SequenceState.WAITING
    rig.scheduler.release()
    rig.finish()
    assert rig.is_whole(second)


def test_deadlines_and_cancels_are_seen_to_meanwhile() -> None:
    rig = SchedulerRig()
    rig.scheduler.hold(preempt=True)
    rig.add_one("due", 4, deadline=rig.now + 5)
    rig.add_one("gone", 4)
    rig.now += 6
    assert [event.finish_reason for event in rig.scheduler.expire()] == [FinishReason.DEADLINE]
    rig.scheduler.end_request("gone", FinishReason.CANCELLED)
    assert rig.scheduler.num_waiting == 0 and rig.scheduler.is_quiet


def test_an_epoch_that_ends_meanwhile_changes_nothing() -> None:
    rig = SchedulerRig()
    sequence = rig.add_one("a", 10)
    rig.send()
    rig.scheduler.hold(preempt=False)
    rig.lose_worker()
    assert rig.scheduler.schedule() is None and rig.scheduler.is_quiet
    rig.scheduler.release()
    rig.finish()
    assert rig.is_whole(sequence)
