"""Steps: planned before the last answer is known, exact in length, applied in order."""

import pytest

from scheduler_service.core.plan import StepResult, TokenEvent
from scheduler_service.core.request import FinishReason
from tests.support.scheduler_rig import SchedulerRig, planned, started


def test_nothing_to_do_plans_nothing() -> None:
    rig = SchedulerRig()
    assert rig.scheduler.schedule() is None
    assert rig.scheduler.is_idle


def test_a_first_step_carries_the_whole_sequence() -> None:
    rig = SchedulerRig(block_size=4)
    prompt = rig.prompt(6)
    sequence = rig.add_one("a", prompt)
    plan = rig.send()
    (new,) = plan.new_sequences
    assert (plan.step_id, plan.sequence_ids, plan.scheduled_token_counts) == (1, [sequence.sequence_id], [6])
    assert (plan.computed_token_counts, plan.new_block_counts, plan.new_block_ids) == ([0], [0], [])
    assert (new.sequence_id, new.token_ids) == (sequence.sequence_id, prompt)
    assert new.block_ids == sequence.block_ids
    assert len(new.block_ids) == 2
    assert plan.num_tokens == 6


def test_what_was_sent_does_not_change_afterwards() -> None:
    rig = SchedulerRig(block_size=4)
    rig.add("a", 4)
    new = rig.send().new_sequences[0]
    rig.answer()
    rig.step()
    assert len(new.token_ids) == 4
    assert len(new.block_ids) == 1


def test_a_decode_step_carries_only_what_changed() -> None:
    rig = SchedulerRig(block_size=4)
    sequence = rig.add_one("a", 7)
    rig.step()
    plan = rig.step()
    assert plan.new_sequences == []
    assert (plan.computed_token_counts, plan.scheduled_token_counts, plan.new_block_counts) == ([7], [1], [0])
    plan = rig.step()
    assert (plan.computed_token_counts, plan.new_block_counts) == ([8], [1])
    assert plan.new_block_ids == sequence.block_ids[2:]


def test_the_next_step_is_planned_before_the_answer() -> None:
    rig = SchedulerRig()
    sequence = rig.add_one("a", 5)
    rig.send()
    plan = rig.send()
    assert (plan.computed_token_counts, plan.scheduled_token_counts) == ([5], [1])
    assert sequence.token_ids == sequence.request.prompt_token_ids
    (event,) = rig.answer()
    assert isinstance(event, TokenEvent)
    assert (event.sequence, event.position, event.finish_reason) == (sequence, 0, None)
    assert sequence.token_ids[5:] == [event.token_id]


@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
def test_no_more_steps_than_allowed_are_in_flight(max_in_flight: int) -> None:
    rig = SchedulerRig(max_in_flight=max_in_flight)
    rig.add("a", 5, max_tokens=20)
    for _ in range(max_in_flight):
        rig.send()
    assert rig.scheduler.schedule() is None
    assert rig.scheduler.num_in_flight == max_in_flight
    rig.answer()
    assert rig.send().step_id == max_in_flight + 1


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7])
@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
def test_length_is_planned_exactly(max_tokens: int, max_in_flight: int) -> None:
    rig = SchedulerRig(max_in_flight=max_in_flight)
    sequence = rig.add_one("a", 5, max_tokens)
    num_steps = 0
    while not sequence.finish_reason:
        while plan := rig.scheduler.schedule():
            rig.sent.append(plan)
            num_steps += 1
        rig.answer()
    assert num_steps == max_tokens
    assert sequence.finish_reason is FinishReason.LENGTH
    assert rig.is_whole(sequence)


def test_positions_count_the_output_and_the_last_carries_the_reason() -> None:
    rig = SchedulerRig()
    rig.add("a", 5, max_tokens=3)
    events = []
    while rig.scheduler.num_running + rig.scheduler.num_waiting:
        rig.send()
        events += rig.answer()
    assert [(e.position, e.finish_reason) for e in events if isinstance(e, TokenEvent)] == [
        (0, None),
        (1, None),
        (2, FinishReason.LENGTH),
    ]


def test_a_stop_token_ends_it_while_one_more_step_is_in_flight() -> None:
    rig = SchedulerRig()
    sequence, other = rig.add_one("a", 5), rig.add_one("b", 5)
    rig.send()
    rig.send()
    events = rig.answer(stop=[sequence])
    assert [(e.sequence, e.finish_reason) for e in events] == [(sequence, FinishReason.STOP), (other, None)]
    assert sequence.block_ids == []
    plan = rig.send()
    assert plan.finished_sequence_ids == [sequence.sequence_id]
    assert list(planned(plan)) == [other]
    assert [e.sequence for e in rig.answer()] == [other]


def test_a_stop_token_that_is_also_the_last_one_is_a_stop() -> None:
    rig = SchedulerRig()
    sequence = rig.add_one("a", 5, max_tokens=1)
    rig.send()
    (event,) = rig.answer(stop=[sequence])
    assert event.finish_reason is FinishReason.STOP
    assert sequence.finish_reason is FinishReason.STOP


def test_workers_are_told_once_what_finished_even_when_nothing_else_is_left() -> None:
    rig = SchedulerRig()
    sequence = rig.add_one("a", 5, max_tokens=1)
    rig.step()
    assert not rig.scheduler.is_idle
    plan = rig.send()
    assert (plan.finished_sequence_ids, plan.sequences, plan.is_empty) == ([sequence.sequence_id], [], False)
    assert not rig.scheduler.is_idle
    rig.answer()
    assert rig.scheduler.is_idle
    assert rig.scheduler.schedule() is None


def test_blocks_of_an_ended_sequence_are_given_out_in_the_next_step_sent() -> None:
    rig = SchedulerRig(num_blocks=2, block_size=4)
    rig.add("a", 4, max_tokens=5)
    rig.send()
    rig.send()
    rig.scheduler.end_request("a", FinishReason.CANCELLED)
    second = rig.add_one("b", 8, max_tokens=1)
    rig.answer()
    assert started(rig.send()) == [second]
    rig.finish()
    assert rig.is_whole(second)


def test_log_probabilities_are_carried_through_untouched() -> None:
    rig = SchedulerRig()
    first, second = rig.add_one("a", 5), rig.add_one("b", 5)
    rig.send()
    value = object()
    ids = [first.sequence_id, second.sequence_id]
    events = rig.scheduler.apply(StepResult(1, ids, [3, 4], logprobs={second.sequence_id: value}))
    assert [e.logprobs for e in events if isinstance(e, TokenEvent)] == [None, value]


def test_an_answer_out_of_order_changes_nothing() -> None:
    rig = SchedulerRig()
    sequence = rig.add_one("a", 5)
    with pytest.raises(ValueError, match="the answer is to step 1; the oldest in flight is none"):
        rig.scheduler.apply(StepResult(1, [], []))
    rig.send()
    rig.send()
    with pytest.raises(ValueError, match="the answer is to step 2; the oldest in flight is 1"):
        rig.scheduler.apply(StepResult(2, [sequence.sequence_id], [3]))
    assert sequence.output_token_count == 0
    assert rig.scheduler.num_in_flight == 2


def test_answers_to_unknown_sequences_are_ignored() -> None:
    rig = SchedulerRig()
    rig.add("a", 5)
    rig.send()
    assert rig.scheduler.apply(StepResult(1, [99], [3])) == []


def test_steps_and_tokens_are_counted() -> None:
    rig = SchedulerRig()
    rig.add("a", 5)
    rig.add("b", 3)
    rig.send()
    rig.now += 2
    rig.answer()
    stats = rig.scheduler.stats
    assert (stats.num_steps, stats.num_step_tokens, stats.tokens_per_s) == (1, 8, 4.0)


def test_many_sequences_end_whole_and_leave_no_block_behind() -> None:
    rig = SchedulerRig(num_blocks=40, max_running=6, max_step_tokens=12)
    sequences = [rig.add_one(str(i), 1 + i * 3 % 17, 1 + i * 5 % 13) for i in range(25)]
    rig.finish()
    assert all(rig.is_whole(sequence) for sequence in sequences)
