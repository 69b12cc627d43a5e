"""Requests that were in flight when epochs ended by a fault: suspected, tried alone, cleared or convicted."""

from scheduler_service.core.plan import EndEvent
from scheduler_service.core.request import FinishReason, Sequence
from tests.support.scheduler_rig import SchedulerRig, started


def fault(rig: SchedulerRig) -> list[EndEvent]:
    """A fault inside the worker ends the epoch."""
    return rig.lose_worker(by_fault=True)


def running(rig: SchedulerRig) -> set[Sequence]:
    """The sequences of the next step, which is then answered."""
    plan = rig.send()
    while rig.sent:
        rig.answer()
    return set(plan.sequences)


def rig_with_suspects(num: int, **config: int) -> tuple[SchedulerRig, list[Sequence]]:
    rig = SchedulerRig(**config)
    sequences = []
    for i in range(num):
        sequences.append(rig.add_one(str(i), 5, max_tokens=20))
        rig.now += 1
    for _ in range(2):
        rig.step()
        rig.send()
        assert fault(rig) == []
    return rig, sequences


def test_one_fault_makes_no_suspects() -> None:
    rig = SchedulerRig()
    sequences = {rig.add_one(str(i), 5, max_tokens=20) for i in range(3)}
    rig.send()
    assert fault(rig) == []
    assert running(rig) == sequences


def test_kills_make_no_suspects() -> None:
    rig = SchedulerRig()
    sequences = {rig.add_one(str(i), 5, max_tokens=20) for i in range(3)}
    for _ in range(5):
        rig.send()
        rig.lose_worker()
    assert running(rig) == sequences


def test_requests_that_were_not_in_flight_are_not_suspected() -> None:
    rig = SchedulerRig()
    rig.add_one("a", 5, max_tokens=20)
    for _ in range(4):
        rig.step()
        # Nothing is in flight when the worker breaks.
        fault(rig)
    other = rig.add_one("b", 5, max_tokens=20)
    assert other in running(rig)


def test_suspects_run_alone_the_newest_first_until_each_got_past_its_place() -> None:
    rig, sequences = rig_with_suspects(3)
    rig.add_one("innocent", 5, max_tokens=20)
    order: list[Sequence] = []
    while True:
        now = running(rig)
        if len(now) > 1:
            break
        order += [sequence for sequence in now if sequence not in order]
    assert order == sequences[::-1]
    rig.finish()
    assert all(rig.is_whole(sequence) for sequence in sequences)


def test_a_suspect_that_ends_an_epoch_alone_is_ended_and_the_others_finish() -> None:
    rig, sequences = rig_with_suspects(3)
    rig.send()
    events = fault(rig)
    assert [(event.sequence, event.finish_reason) for event in events] == [(sequences[2], FinishReason.ERROR)]
    rig.finish()
    assert all(rig.is_whole(sequence) for sequence in sequences[:2])


def test_a_fault_while_one_makes_way_for_the_next_convicts_nobody() -> None:
    rig, sequences = rig_with_suspects(2)
    rig.step()
    rig.send()
    rig.send()
    rig.answer()
    assert rig.scheduler.num_in_flight == 1
    assert fault(rig) == []
    rig.finish()
    assert all(rig.is_whole(sequence) for sequence in sequences)


def test_the_next_suspect_waits_for_the_steps_of_the_one_before() -> None:
    rig, sequences = rig_with_suspects(2)
    rig.step()
    rig.send()
    second = rig.scheduler.schedule()
    assert second is not None
    rig.sent.append(second)
    assert set(second.sequences) == {sequences[1]}
    rig.answer()
    assert rig.scheduler.num_in_flight == 1
    while rig.scheduler.num_in_flight:
        assert rig.scheduler.schedule() is None or rig.scheduler.num_in_flight == 2
        rig.answer()
    assert sequences[0] in running(rig)


def test_a_suspect_that_is_cancelled_makes_way() -> None:
    rig, sequences = rig_with_suspects(2)
    assert running(rig) == {sequences[1]}
    rig.scheduler.end_request("1", FinishReason.CANCELLED)
    assert running(rig) == {sequences[0]}
    rig.finish()


def test_a_cleared_suspect_is_suspected_again_after_one_more_fault() -> None:
    rig, sequences = rig_with_suspects(1)
    other = rig.add_one("other", 5, max_tokens=20)
    while other not in running(rig):
        pass
    rig.send()
    fault(rig)
    assert running(rig) == {sequences[0]}
    rig.finish()
    assert rig.is_whole(other)


def test_all_sequences_of_a_request_are_tried_together() -> None:
    rig = SchedulerRig(block_size=4)
    siblings = rig.add("many", 9, max_tokens=12, n=3)
    other = rig.add_one("other", 5, max_tokens=30)
    for _ in range(2):
        for _ in range(3):
            rig.step()
        rig.send()
        fault(rig)
    tried = set()
    while other not in (now := running(rig)) or len(now) == 1:
        tried |= now
    rig.finish()
    assert all(rig.is_whole(sequence) for sequence in [*siblings, other])


def test_a_request_may_come_while_another_is_on_trial() -> None:
    rig, sequences = rig_with_suspects(1)
    late = rig.add_one("late", 5, priority=5, max_tokens=4)
    plan = rig.send()
    assert started(plan) == sequences
    while rig.sent:
        rig.answer()
    rig.finish()
    assert rig.is_whole(late)
