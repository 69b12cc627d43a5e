"""The budget of a step: chunked prefill, no starvation, the running cap and the promised blocks."""

import pytest

from scheduler_service.core.request import FinishReason
from tests.support.scheduler_rig import SchedulerRig, planned, started


def test_a_long_prompt_is_computed_in_chunks_of_the_budget() -> None:
    rig = SchedulerRig(max_step_tokens=16)
    sequence = rig.add_one("a", 40)
    counts = [planned(rig.send())[sequence] for _ in range(2)]
    assert rig.answer() == []
    rig.answer()
    counts.append(planned(rig.send())[sequence])
    assert counts == [16, 16, 8]
    assert [e.sequence for e in rig.answer()] == [sequence]


def test_no_step_exceeds_its_budget() -> None:
    rig = SchedulerRig(max_step_tokens=10, max_running=8)
    sequences = [rig.add_one(str(i), 5 + 7 * i) for i in range(6)]
    num_full = 0
    while rig.scheduler.num_running + rig.scheduler.num_waiting:
        num = rig.step().num_tokens
        assert num <= 10
        num_full += num == 10
    assert num_full > 5
    assert all(rig.is_whole(sequence) for sequence in sequences)


def test_the_whole_budget_goes_to_a_prompt_that_is_alone() -> None:
    rig = SchedulerRig(max_step_tokens=16)
    long = rig.add_one("long", 100)
    assert planned(rig.step()) == {long: 16}
    assert planned(rig.step()) == {long: 16}


def test_a_short_prompt_starts_beside_a_long_one() -> None:
    rig = SchedulerRig(max_step_tokens=16)
    long = rig.add_one("long", 100)
    rig.step()
    short = rig.add_one("short", 5)
    assert planned(rig.send()) == {long: 8, short: 5}
    assert [e.sequence for e in rig.answer()] == [short]


def test_a_short_prompt_starts_in_the_same_step_as_a_long_one() -> None:
    rig = SchedulerRig(max_step_tokens=16)
    long, short = rig.add_one("long", 100), rig.add_one("short", 5)
    assert planned(rig.send()) == {long: 8, short: 5}


def test_a_chunk_is_at_least_a_block_where_the_budget_allows() -> None:
    rig = SchedulerRig(max_step_tokens=6, block_size=4, max_running=4)
    long, other = rig.add_one("long", 30), rig.add_one("other", 30)
    assert planned(rig.send()) == {long: 4, other: 2}


def test_a_prompt_of_two_tokens_is_cut_where_the_budget_ends() -> None:
    rig = SchedulerRig(max_step_tokens=3, max_running=3, block_size=1)
    sequences = [rig.add_one(name, 2) for name in "ab"]
    assert planned(rig.step()) == {sequences[0]: 1, sequences[1]: 2}
    assert planned(rig.step()) == dict.fromkeys(sequences, 1)
    rig = SchedulerRig(max_step_tokens=2, max_running=2, block_size=1)
    sequences = [rig.add_one(name, 3) for name in "ab"]
    for _ in range(3):
        assert planned(rig.step()) == dict.fromkeys(sequences, 1)


def test_a_long_prefill_delays_no_decode() -> None:
    rig = SchedulerRig(max_step_tokens=16, num_blocks=200)
    long, short = rig.add_one("long", 300), rig.add_one("short", 5, max_tokens=10)
    rig.step()
    for _ in range(9):
        assert planned(rig.step()) == {long: 15, short: 1}
    assert short.finish_reason is FinishReason.LENGTH
    assert long.output_token_count == 0


def test_a_prefill_of_higher_priority_delays_no_decode_either() -> None:
    rig = SchedulerRig(max_step_tokens=8)
    decoding = [rig.add_one(str(i), 2, max_tokens=20) for i in range(3)]
    rig.step()
    urgent = rig.add_one("urgent", 60, priority=1)
    rig.step()
    assert planned(rig.step()) == {urgent: 5, **dict.fromkeys(decoding, 1)}


def test_with_a_budget_of_the_running_cap_every_sequence_gets_a_token() -> None:
    rig = SchedulerRig(max_step_tokens=4, max_running=4, num_blocks=200)
    sequences = [rig.add_one(str(i), 40, max_tokens=120) for i in range(4)]
    while rig.scheduler.num_running < 4:
        rig.step()
    for _ in range(20):
        assert planned(rig.step()) == dict.fromkeys(sequences, 1)


def test_two_long_prompts_share_the_budget() -> None:
    rig = SchedulerRig(max_step_tokens=16, num_blocks=100)
    first, second = rig.add_one("a", 100), rig.add_one("b", 100)
    assert planned(rig.step()) == {first: 8, second: 8}
    assert planned(rig.step()) == {first: 8, second: 8}


def test_a_prompt_with_little_left_takes_little_from_another() -> None:
    rig = SchedulerRig(max_step_tokens=32, num_blocks=100)
    long, other = rig.add_one("long", 200), rig.add_one("other", 20)
    assert planned(rig.step()) == {long: 16, other: 16}
    # The other has four tokens, a block, to go.
    assert planned(rig.step()) == {long: 28, other: 4}


def test_a_waiting_sequence_that_cannot_start_takes_no_budget() -> None:
    rig = SchedulerRig(max_step_tokens=16, max_running=1)
    long = rig.add_one("long", 60)
    rig.add("short", 5)
    assert planned(rig.send()) == {long: 16}
    assert planned(rig.send()) == {long: 16}


def test_no_more_sequences_run_than_the_cap_allows() -> None:
    rig = SchedulerRig(max_running=2, max_in_flight=1)
    first, second, third = (rig.add_one(name, 4, max_tokens=num) for name, num in [("a", 3), ("b", 2), ("c", 1)])
    assert started(rig.step()) == [first, second]
    assert started(rig.step()) == []
    assert second.finish_reason is FinishReason.LENGTH
    assert started(rig.step()) == [third]
    assert rig.scheduler.num_running == 0


def test_a_prompt_starts_only_when_blocks_for_all_of_it_are_free() -> None:
    rig = SchedulerRig(num_blocks=4, block_size=4, max_step_tokens=8)
    rig.add("a", 8, max_tokens=2)
    rig.step()
    waits = rig.add_one("b", 9, max_tokens=2)
    assert started(rig.step()) == []
    assert started(rig.step()) == [waits]


def test_two_long_prompts_are_not_started_when_both_cannot_finish_prefill() -> None:
    rig = SchedulerRig(num_blocks=10, block_size=4, max_step_tokens=8)
    first, second = rig.add_one("a", 24, max_tokens=2), rig.add_one("b", 24, max_tokens=2)
    assert planned(rig.step()) == {first: 8}
    # Eight blocks are free, more than the second needs; four of them are promised.
    assert rig.scheduler.num_free_blocks == 8
    assert planned(rig.step()) == {first: 8}
    rig.finish()
    assert rig.scheduler.stats.num_preemptions == 0
    assert rig.is_whole(first)
    assert rig.is_whole(second)


def test_a_head_that_must_wait_holds_back_those_behind_it() -> None:
    rig = SchedulerRig(num_blocks=6, block_size=4)
    rig.add("a", 12, max_tokens=2)
    rig.step()
    big, small = rig.add_one("big", 16, max_tokens=2), rig.add_one("small", 2, max_tokens=2)
    rig.send()
    assert rig.scheduler.num_running == 1
    rig.answer()
    assert started(rig.step()) == [big, small]


@pytest.mark.parametrize("num_waiting", [0, 50])
def test_a_long_queue_changes_nothing_for_those_that_run(num_waiting: int) -> None:
    rig = SchedulerRig(max_running=2, num_blocks=20)
    running = [rig.add_one(name, 4) for name in "ab"]
    rig.step()
    for i in range(num_waiting):
        rig.add(str(i), 4)
    assert planned(rig.step()) == dict.fromkeys(running, 1)
