"""Failures that users of other engines reported, one test a row of the list of such reports.

The numbers are those of the list; each test names what was reported of which engine.
"""

import pytest

from scheduler_service.core.errors import DuplicateRequest, NeverFits, QueueFull
from scheduler_service.core.request import FinishReason
from tests.support.scheduler_rig import SchedulerRig, planned, started


def test_row_17_request_that_can_never_fit_is_refused() -> None:
    """vLLM #56028: a request larger than the cache preempted itself for ever."""
    rig = SchedulerRig(num_blocks=10, block_size=4)
    with pytest.raises(NeverFits):
        rig.add("a", 20, max_tokens=22)
    largest = rig.add_one("b", 20, max_tokens=21)
    assert rig.finish() <= 23
    assert rig.scheduler.stats.num_preemptions == 0
    assert rig.is_whole(largest)


def test_row_17_request_that_just_fits_gets_through_a_full_house() -> None:
    """vLLM #52530: what fits alone must end however much else is there."""
    rig = SchedulerRig(num_blocks=10, block_size=4, max_step_tokens=12)
    sequences = [rig.add_one(str(i), 12, max_tokens=29) for i in range(4)]
    rig.finish()
    assert all(rig.is_whole(s) for s in sequences)


def test_row_19_prompts_under_way_do_not_deadlock_on_each_other() -> None:
    """vLLM #45388: two prompts each held a part of the blocks and waited for the other's."""
    rig = SchedulerRig(num_blocks=12, block_size=4, max_step_tokens=8)
    sequences = [rig.add_one(str(i), 32, max_tokens=8) for i in range(3)]
    most_prefilling = 0
    for _ in range(200):
        if rig.scheduler.is_idle:
            break
        rig.step()
        prefilling = [s for s in sequences if s.block_ids and s.output_token_count == 0]
        most_prefilling = max(most_prefilling, len(prefilling))
    assert most_prefilling == 1
    assert all(rig.is_whole(s) for s in sequences)


def test_row_19_a_cached_prefix_is_not_taken_for_free_room() -> None:
    """vLLM #45388: blocks that a start revives were counted as free for its own rest."""
    rig = SchedulerRig(num_blocks=6, block_size=4)
    prompt = rig.prompt(17)
    rig.add("a", prompt, max_tokens=1)
    rig.finish()
    rig.add("b", 5, max_tokens=4)
    rig.step()
    # Four cached blocks are free; the prompt revives them and needs one more.
    rig.add("c", [*prompt, 1], max_tokens=2)
    assert started(rig.send()) == []
    rig.finish()
    assert rig.scheduler.stats.num_preemptions == 0


def test_row_31_duplicate_request_id_is_refused_and_the_first_goes_on() -> None:
    """vLLM #15041: a duplicate id crashed the engine."""
    rig = SchedulerRig(block_size=4)
    first, other = rig.add_one("same", 5), rig.add_one("other", 5)
    for _ in range(3):
        rig.step()
        with pytest.raises(DuplicateRequest):
            rig.add("same", 7)
    rig.finish()
    assert rig.is_whole(first)
    assert rig.is_whole(other)


def test_row_31_an_id_is_taken_until_the_last_sequence_of_its_request_ends() -> None:
    """vLLM #15041, with n > 1: one of two sequences is enough to keep the id."""
    rig = SchedulerRig(block_size=4)
    first, second = rig.add("same", 3, n=2)
    rig.scheduler.end_sequence(first.sequence_id, FinishReason.STOP)
    with pytest.raises(DuplicateRequest):
        rig.add("same", 3)
    rig.scheduler.end_sequence(second.sequence_id, FinishReason.STOP)
    rig.add("same", 3)


@pytest.mark.parametrize("bad_index", range(8))
def test_row_32_one_bad_sequence_does_not_touch_the_others_of_its_step(bad_index: int) -> None:
    """vLLM #55546: one bad item killed eight data-parallel ranks."""
    rig = SchedulerRig(block_size=4)
    shared = rig.prompt(8)
    sequences = [rig.add_one(str(i), [*shared, i], max_tokens=6) for i in range(8)]
    rig.send()
    rig.send()
    bad = sequences.pop(bad_index)
    rig.answer(fail=bad)
    rig.finish()
    assert [event.sequence for event in rig.ends] == [bad]
    assert all(rig.is_whole(s) for s in sequences)


def test_row_35_the_queue_is_bounded_and_says_when_to_come_back() -> None:
    """vLLM #2901: the queue had no bound."""
    rig = SchedulerRig(max_running=2, max_queued_requests=5)
    accepted = [rig.add_one(str(i), 4) for i in range(5)]
    rig.step()
    accepted += [rig.add_one(str(i), 4) for i in range(5, 7)]
    for i in range(100):
        with pytest.raises(QueueFull) as caught:
            rig.add(f"late {i}", 4)
        assert caught.value.retry_after_s > 0
    assert rig.scheduler.num_waiting == 5
    rig.finish()
    assert all(rig.is_whole(s) for s in accepted)


def test_row_35_what_is_in_flight_is_capped() -> None:
    """Triton-TRT-LLM #412: the number of requests under way could not be capped."""
    rig = SchedulerRig(max_running=3, max_step_tokens=100)
    for i in range(20):
        rig.add(str(i), 2)
    while not rig.scheduler.is_idle:
        assert len(planned(rig.step())) <= 3


def test_row_36_a_waiting_request_times_out_without_ever_running() -> None:
    """vLLM #16391: nothing timed out while it waited."""
    rig = SchedulerRig(max_running=1)
    rig.add("hog", 5, max_tokens=100)
    rig.step()
    impatient = rig.add_one("impatient", 5, deadline=rig.now + 3)
    rig.now += 3
    assert [event.sequence for event in rig.scheduler.expire()] == [impatient]
    rig.finish()
    assert impatient not in rig.outputs


@pytest.mark.parametrize("when", ["waiting", "prefill", "decode", "preempted", "held back"])
def test_row_38_cancel_and_deadline_are_honoured_wherever_a_sequence_stands(when: str) -> None:
    """Triton #6920: cancellation and deadlines reached the scheduler only from one client, or never."""
    for how in ("cancel", "deadline"):
        rig = SchedulerRig(num_blocks=8, block_size=4, max_step_tokens=8, max_running=2)
        target = rig.add("target", 14, n=2 if when == "held back" else 1, deadline=rig.now + 5)[-1]
        if when != "waiting":
            rig.send()
        if when in ("decode", "preempted"):
            rig.send()
            rig.answer()
        if when == "preempted":
            rig.add("high", 24, max_tokens=2, priority=1)
            rig.send()
            assert target.num_preemptions == 1
        num_outputs = len(rig.outputs.get(target, []))
        if how == "cancel":
            ends = rig.scheduler.end_request("target", FinishReason.CANCELLED)
        else:
            rig.now += 5
            ends = rig.scheduler.expire()
        assert target in [event.sequence for event in ends]
        assert target.block_ids == []
        rig.finish()
        assert len(rig.outputs.get(target, [])) == num_outputs


def test_row_39_an_overflow_leaves_no_request_hanging() -> None:
    """SGLang #33858: when the queue overflowed, requests hung and health said all was well."""
    rig = SchedulerRig(max_running=2, max_queued_requests=4, max_step_tokens=8)
    accepted, refused = [], 0
    for i in range(60):
        try:
            accepted.append(rig.add_one(str(i), 1 + i % 9, max_tokens=1 + i % 5))
        except QueueFull:
            refused += 1
        if i % 3 == 0:
            rig.step()
    rig.finish()
    assert refused > 5
    assert all(rig.is_whole(s) for s in accepted)


def test_row_40_what_was_accepted_ends_whole_when_nothing_more_comes() -> None:
    """vLLM #24885: a shutdown cut off what ran; a drain needs only that the accepted requests end."""
    rig = SchedulerRig(max_running=3, max_step_tokens=12)
    sequences = [rig.add_one(str(i), 3 + i, max_tokens=5) for i in range(12)]
    rig.step()
    rig.finish()
    assert all(rig.is_whole(s) for s in sequences)
    assert rig.scheduler.is_idle


def test_row_47_priority_preempts_when_the_running_cap_is_what_stops_it() -> None:
    """vLLM #40004: with all places taken, priority waited."""
    rig = SchedulerRig(max_running=2)
    low = [rig.add_one(name, 5, max_tokens=50) for name in "ab"]
    rig.step()
    high = rig.add_one("high", 5, max_tokens=2, priority=5)
    assert high in planned(rig.send())
    rig.finish()
    assert all(rig.is_whole(s) for s in [*low, high])


def test_row_47_a_preempted_request_keeps_its_place_in_the_queue() -> None:
    """vLLM #41951: a preempted request went behind those that came after it."""
    rig = SchedulerRig(max_running=1, max_in_flight=1)
    first = rig.add_one("first", 5)
    rig.step()
    rig.now += 1
    rig.add("later", 5)
    rig.add("high", 5, max_tokens=1, priority=1)
    rig.step()
    assert first.num_preemptions == 1
    assert started(rig.step()) == [first]
