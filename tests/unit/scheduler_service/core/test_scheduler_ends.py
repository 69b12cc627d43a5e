"""Ends that are no token: cancelled, expired, failed on the worker, and the end of an epoch."""

import pytest

from scheduler_service.core.plan import EndEvent, StepResult
from scheduler_service.core.request import FinishReason, SequenceState
from tests.support.scheduler_rig import SchedulerRig, planned, started


def test_a_cancelled_request_is_free_with_the_next_step_and_its_answers_are_ignored() -> None:
    rig = SchedulerRig()
    sequence, other = rig.add_one("a", 5), rig.add_one("b", 5)
    rig.send()
    rig.send()
    assert rig.scheduler.end_request("a", FinishReason.CANCELLED) == [EndEvent(sequence, FinishReason.CANCELLED, "")]
    assert rig.scheduler.num_free_blocks == 62
    rig.answer()
    plan = rig.send()
    assert plan.finished_sequence_ids == [sequence.sequence_id]
    assert list(planned(plan)) == [other]
    rig.finish()
    assert sequence not in rig.outputs
    assert rig.is_whole(other)


def test_cancelling_ends_every_sequence_of_a_request() -> None:
    rig = SchedulerRig(block_size=4)
    sequences = rig.add("a", 10, n=3)
    rig.send()
    rig.send()
    assert [event.sequence for event in rig.scheduler.end_request("a", FinishReason.CANCELLED)] == sequences
    assert all(s.finish_reason is FinishReason.CANCELLED for s in sequences)
    assert rig.scheduler.sequences_of("a") == []


def test_cancelling_what_is_unknown_or_over_does_nothing() -> None:
    rig = SchedulerRig()
    assert rig.scheduler.end_request("a", FinishReason.CANCELLED) == []
    sequence = rig.add_one("a", 5, max_tokens=1)
    rig.step()
    assert rig.scheduler.end_request("a", FinishReason.CANCELLED) == []
    rig.scheduler.end_sequence(sequence.sequence_id, FinishReason.STOP)
    assert sequence.finish_reason is FinishReason.LENGTH


def test_a_waiting_request_that_is_cancelled_is_never_sent() -> None:
    rig = SchedulerRig()
    rig.add("a", 5)
    rig.scheduler.end_request("a", FinishReason.CANCELLED)
    assert rig.scheduler.schedule() is None
    assert rig.scheduler.is_idle


def test_a_stop_string_ends_one_sequence_and_not_its_sibling() -> None:
    rig = SchedulerRig(block_size=4)
    first, second = rig.add("a", 3, n=2)
    rig.step()
    rig.scheduler.end_sequence(first.sequence_id, FinishReason.STOP)
    assert first.finish_reason is FinishReason.STOP
    assert rig.scheduler.sequences_of("a") == [second]
    rig.finish()
    assert rig.is_whole(second)
    assert len(rig.outputs[first]) == 1


def test_a_waiting_request_expires_at_its_deadline() -> None:
    rig = SchedulerRig(max_running=1)
    rig.add("runs", 5)
    rig.step()
    waits = rig.add_one("waits", 5, deadline=rig.now + 2)
    assert rig.scheduler.expire() == []
    assert rig.scheduler.next_deadline() == rig.now + 2
    rig.now += 1.9
    assert rig.scheduler.expire() == []
    rig.now = 102.0
    assert rig.scheduler.expire() == [EndEvent(waits, FinishReason.DEADLINE, "")]
    assert rig.scheduler.next_deadline() is None
    assert rig.scheduler.num_waiting == 0


def test_a_running_request_expires_and_its_blocks_are_free() -> None:
    rig = SchedulerRig()
    sequence = rig.add_one("a", 5, deadline=rig.now + 2)
    rig.send()
    rig.send()
    rig.now += 2
    assert [event.finish_reason for event in rig.scheduler.expire()] == [FinishReason.DEADLINE]
    assert rig.scheduler.num_free_blocks == 64
    assert rig.answer() == []
    assert rig.send().finished_sequence_ids == [sequence.sequence_id]


def test_several_requests_expire_together_in_the_order_of_their_deadlines() -> None:
    rig = SchedulerRig()
    for name, patience in [("a", 3), ("b", 1), ("c", None), ("d", 2), ("e", 9)]:
        rig.add(name, 5, deadline=None if patience is None else rig.now + patience)
    rig.scheduler.expire()
    rig.now += 3
    assert [event.sequence.request.request_id for event in rig.scheduler.expire()] == ["b", "d", "a"]
    assert rig.scheduler.next_deadline() == 109.0


def test_an_id_used_again_does_not_inherit_the_old_deadline() -> None:
    rig = SchedulerRig()
    rig.add("a", 5, deadline=rig.now + 1)
    rig.scheduler.end_request("a", FinishReason.CANCELLED)
    again = rig.add_one("a", 5, deadline=rig.now + 10)
    rig.now += 5
    assert rig.scheduler.expire() == []
    assert rig.scheduler.next_deadline() == 110.0
    rig.now += 5
    assert [event.sequence for event in rig.scheduler.expire()] == [again]


def test_ended_requests_with_deadlines_far_away_are_not_kept() -> None:
    rig = SchedulerRig()
    for i in range(300):
        rig.add(str(i), 2, max_tokens=1, deadline=rig.now + 10**9)
        rig.scheduler.end_request(str(i), FinishReason.CANCELLED)
    assert len(rig.scheduler._deadlines) <= 64


def test_an_error_ends_its_sequence_alone() -> None:
    rig = SchedulerRig()
    bad, good = rig.add_one("bad", 5), rig.add_one("good", 5)
    rig.send()
    rig.send()
    end, token = rig.answer(fail=bad)
    assert end == EndEvent(bad, FinishReason.ERROR, "made to fail")
    assert token.sequence is good
    assert bad.finish_reason is FinishReason.ERROR
    assert rig.send().finished_sequence_ids == [bad.sequence_id]
    rig.finish()
    assert rig.is_whole(good)
    assert bad not in rig.outputs


def test_what_a_failed_sequence_was_to_fill_is_not_found_again() -> None:
    rig = SchedulerRig(block_size=4)
    prompt = rig.prompt(13)
    bad = rig.add_one("bad", prompt)
    rig.send()
    rig.answer(fail=bad)
    assert rig.scheduler.num_cached_blocks == 0
    again = rig.add_one("again", prompt)
    assert rig.step().computed_token_counts == [0]
    rig.finish()
    assert rig.is_whole(again)


def test_what_a_failed_sequence_had_filled_before_is_still_found() -> None:
    rig = SchedulerRig(block_size=4, max_step_tokens=8)
    prompt = rig.prompt(17)
    bad = rig.add_one("bad", prompt)
    rig.step()
    rig.send()
    rig.answer(fail=bad)
    assert rig.scheduler.num_cached_blocks == 2
    again = rig.add_one("again", prompt)
    assert rig.step().computed_token_counts == [8]
    rig.finish()
    assert rig.is_whole(again)


def test_a_block_spoiled_in_part_is_not_found() -> None:
    rig = SchedulerRig(block_size=4, max_step_tokens=6, max_running=4)
    prompt = rig.prompt(9)
    bad = rig.add_one("bad", prompt)
    rig.step()
    rig.send()
    rig.answer(fail=bad)
    assert rig.scheduler.num_cached_blocks == 1


def test_sequences_that_share_spoiled_blocks_start_again_under_a_new_id() -> None:
    rig = SchedulerRig(block_size=4, max_in_flight=3)
    prompt = rig.prompt(9)
    bad, bystander = rig.add_one("bad", prompt), rig.add_one("bystander", 9)
    rig.send()
    sharer = rig.add_one("sharer", [*prompt, 5, 5, 5, 5])
    assert planned(rig.send())[sharer] == 5
    # It rests on blocks of both.
    second_sharer = rig.add_one("second", [*prompt, 5, 5, 5, 5, 6])
    assert planned(rig.send())[second_sharer] == 2
    old_ids = [sharer.sequence_id, second_sharer.sequence_id]
    events = rig.answer(fail=bad)
    assert [e.sequence for e in events] == [bad, bystander]
    for sequence in (sharer, second_sharer):
        assert sequence.state is SequenceState.WAITING
        assert sequence.sequence_id not in old_ids
    plan = rig.send()
    assert sorted(plan.preempted_sequence_ids) == sorted(old_ids)
    assert plan.finished_sequence_ids == [bad.sequence_id]
    assert started(plan) == [sharer, second_sharer]
    # The second holds what the first fills in this very step.
    assert plan.computed_token_counts[-2:] == [0, 12]
    rig.finish()
    assert all(rig.is_whole(s) for s in (sharer, second_sharer, bystander))


def test_what_shares_blocks_with_a_failed_sequence_within_its_step_starts_again() -> None:
    rig = SchedulerRig(block_size=4)
    prompt = rig.prompt(9)
    bad, sharer = rig.add_one("bad", prompt), rig.add_one("sharer", [*prompt, 5])
    assert planned(rig.send()) == {bad: 9, sharer: 2}
    events = rig.answer(fail=bad)
    assert [e.sequence for e in events] == [bad]
    assert sharer.state is SequenceState.WAITING
    assert rig.send().computed_token_counts == [0]
    rig.finish()
    assert rig.is_whole(sharer)


def test_a_restarted_leader_takes_its_siblings_along() -> None:
    rig = SchedulerRig(block_size=4, max_step_tokens=12, num_blocks=100)
    prompt = rig.prompt(9)
    bad = rig.add_one("bad", prompt)
    rig.send()
    leader, sibling = rig.add("b", [*prompt, *rig.prompt(30)], n=2)
    assert started(rig.send()) == [leader]
    rig.answer(fail=bad)
    rig.finish()
    assert rig.is_whole(leader)
    assert rig.is_whole(sibling)


def test_a_sharer_that_ended_meanwhile_is_left_in_peace() -> None:
    rig = SchedulerRig(block_size=4)
    prompt = rig.prompt(9)
    bad = rig.add_one("bad", prompt)
    rig.send()
    sharer = rig.add_one("sharer", [*prompt, 5, 5, 5, 5])
    rig.send()
    rig.scheduler.end_request("sharer", FinishReason.CANCELLED)
    assert [e.sequence for e in rig.answer(fail=bad)] == [bad]
    assert sharer.state is SequenceState.FINISHED
    # What it left in the cache rests on spoiled blocks.
    assert rig.scheduler.num_cached_blocks == 0
    rig.finish()


def test_an_error_of_a_cancelled_sequence_is_not_told_but_its_blocks_are_not_found() -> None:
    rig = SchedulerRig(block_size=4)
    bad = rig.add_one("bad", 9)
    rig.send()
    rig.scheduler.end_request("bad", FinishReason.CANCELLED)
    assert rig.scheduler.num_cached_blocks == 2
    assert rig.answer(fail=bad) == []
    assert rig.scheduler.num_cached_blocks == 0


def test_an_error_of_a_sequence_that_was_in_no_such_step_is_ignored() -> None:
    rig = SchedulerRig()
    rig.add("a", 5)
    rig.send()
    waits = rig.add_one("b", 5)
    assert rig.scheduler.apply(StepResult(1, [], [], errors={waits.sequence_id: "?", 99: "?"})) == []
    assert waits.state is SequenceState.WAITING


def test_the_end_of_an_epoch_costs_a_pause_and_no_token() -> None:
    rig = SchedulerRig(max_running=2)
    sequences = [rig.add_one(name, 5) for name in "abc"]
    rig.step()
    rig.send()
    rig.send()
    rig.lose_worker()
    assert (rig.scheduler.num_in_flight, rig.scheduler.num_running, rig.scheduler.num_waiting) == (0, 0, 3)
    plan = rig.send()
    assert plan.step_id == 1
    assert (plan.finished_sequence_ids, plan.preempted_sequence_ids) == ([], [])
    assert started(plan) == sequences[:2]
    assert plan.new_sequences[0].token_ids == [*sequences[0].request.prompt_token_ids, *rig.outputs[sequences[0]]]
    rig.finish()
    assert all(rig.is_whole(s) for s in sequences)


def test_the_end_of_an_epoch_empties_the_prefix_cache() -> None:
    rig = SchedulerRig(block_size=4)
    prompt = rig.prompt(9)
    rig.add("a", prompt, max_tokens=1)
    rig.step()
    assert rig.scheduler.num_cached_blocks == 2
    rig.lose_worker()
    assert rig.scheduler.num_cached_blocks == 0
    rig.add("b", prompt)
    assert rig.step().computed_token_counts == [0]


def test_a_new_epoch_is_not_told_of_the_dead_ones_sequences() -> None:
    rig = SchedulerRig(max_running=1)
    rig.add("a", 5)
    rig.step()
    rig.add("b", 5, priority=1)
    rig.send()
    rig.scheduler.end_request("b", FinishReason.CANCELLED)
    rig.lose_worker()
    plan = rig.send()
    assert (plan.finished_sequence_ids, plan.preempted_sequence_ids) == ([], [])


@pytest.mark.parametrize("max_in_flight", [2, 3])
def test_a_preempted_sequence_survives_the_end_of_an_epoch(max_in_flight: int) -> None:
    rig = SchedulerRig(num_blocks=6, block_size=4, max_in_flight=max_in_flight)
    sequences = [rig.add_one(str(i), length) for i, length in enumerate([8, 5, 7])]
    rig.send()
    rig.send()
    assert SequenceState.PREEMPTED in {s.state for s in sequences}
    rig.lose_worker()
    assert rig.scheduler.num_waiting == 3
    rig.finish()
    assert all(rig.is_whole(s) for s in sequences)


def test_an_epoch_that_ends_when_nothing_is_left_leaves_nothing_to_send() -> None:
    rig = SchedulerRig()
    rig.add("a", 5, max_tokens=1)
    rig.step()
    assert not rig.scheduler.is_idle
    rig.lose_worker()
    assert rig.scheduler.is_idle
