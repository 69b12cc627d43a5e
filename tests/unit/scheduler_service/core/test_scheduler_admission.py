"""What the scheduler accepts, and what it says when it does not."""

import pytest

from scheduler_service.core.errors import DuplicateRequest, NeverFits, QueueFull
from scheduler_service.core.request import FinishReason, Request
from tests.support.scheduler_rig import SchedulerRig, started


def test_an_accepted_request_waits() -> None:
    rig = SchedulerRig()
    sequences = rig.add("a", 5, n=2)
    assert [(s.index, s.prompt_token_count, s.output_token_count) for s in sequences] == [(0, 5, 0), (1, 5, 0)]
    assert rig.scheduler.sequences_of("a") == sequences
    assert rig.scheduler.sequences_of("b") == []
    assert (rig.scheduler.num_waiting, rig.scheduler.num_running) == (2, 0)
    assert not rig.scheduler.is_idle


def test_sequence_ids_are_never_used_twice() -> None:
    rig = SchedulerRig()
    ids = [s.sequence_id for name in "abc" for s in rig.add(name, 5, n=3)]
    assert ids == list(range(1, 10))


def test_a_prompt_is_not_copied_while_it_waits_and_never_changed() -> None:
    rig = SchedulerRig()
    prompt = rig.prompt(5)
    sequence = rig.add_one("a", prompt, max_tokens=3)
    assert sequence.token_ids is prompt
    rig.step()
    assert len(prompt) == 5
    assert sequence.token_ids[:5] == prompt


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "fits"), [(40, 1, True), (41, 1, False), (1, 40, True), (1, 41, False)]
)
def test_prompt_and_output_must_fit_the_whole_cache(prompt: int, max_tokens: int, fits: bool) -> None:
    rig = SchedulerRig(num_blocks=10, block_size=4)
    if fits:
        rig.add("a", prompt, max_tokens)
        rig.finish()
        return
    with pytest.raises(NeverFits) as caught:
        rig.add("a", prompt, max_tokens)
    assert (caught.value.needed_blocks, caught.value.num_blocks) == (11, 10)
    assert rig.scheduler.is_idle


def test_what_never_fits_is_told_what_would() -> None:
    rig = SchedulerRig(num_blocks=10, block_size=4)
    with pytest.raises(NeverFits) as caught:
        rig.add("a", 100, 100)
    assert caught.value.largest_token_count == 41
    rig.add("a", 30, 11)
    with pytest.raises(NeverFits):
        rig.add("b", 30, 12)


def test_a_live_id_is_refused_and_free_again_afterwards() -> None:
    rig = SchedulerRig()
    first = rig.add_one("a", 5, max_tokens=1)
    with pytest.raises(DuplicateRequest) as caught:
        rig.add("a", 5)
    assert caught.value.request_id == "a"
    assert rig.scheduler.sequences_of("a") == [first]
    rig.step()
    assert rig.add_one("a", 5) is not first


def test_a_duplicate_is_told_so_even_if_it_would_not_fit() -> None:
    rig = SchedulerRig(num_blocks=4)
    rig.add("a", 5)
    with pytest.raises(DuplicateRequest):
        rig.add("a", 500)


def test_the_queue_is_bounded_by_sequences() -> None:
    rig = SchedulerRig(max_queued_requests=3)
    rig.add("a", 5)
    rig.add("b", 5, n=2)
    with pytest.raises(QueueFull) as caught:
        rig.add("c", 5)
    assert (caught.value.what, caught.value.limit) == ("sequences", 3)
    assert rig.scheduler.num_waiting == 3


def test_all_sequences_of_a_request_count_at_once() -> None:
    rig = SchedulerRig(max_queued_requests=3)
    rig.add("a", 5)
    with pytest.raises(QueueFull):
        rig.add("b", 5, n=3)
    assert rig.scheduler.sequences_of("b") == []
    rig.add("b", 5, n=2)


def test_running_sequences_do_not_count_as_queued() -> None:
    rig = SchedulerRig(max_queued_requests=1)
    for name in "abcd":
        rig.add(name, 5)
        rig.step()
    assert (rig.scheduler.num_running, rig.scheduler.num_waiting) == (4, 0)


def test_the_queue_is_bounded_by_prompt_tokens() -> None:
    rig = SchedulerRig(max_queued_tokens=20)
    rig.add("a", 5, n=2)
    with pytest.raises(QueueFull) as caught:
        rig.add("b", 11)
    assert (caught.value.what, caught.value.limit) == ("prompt tokens", 20)
    rig.add("b", 10)


def test_all_prompts_of_a_request_count_towards_the_tokens() -> None:
    rig = SchedulerRig(max_queued_tokens=20)
    rig.add("a", 5)
    with pytest.raises(QueueFull):
        rig.add("b", 8, n=2)


def test_an_empty_queue_takes_any_request_that_fits() -> None:
    tokens, sequences = SchedulerRig(max_queued_tokens=20), SchedulerRig(max_queued_requests=2)
    tokens.add("a", 50)
    sequences.add("a", 5, n=3)
    with pytest.raises(QueueFull):
        tokens.add("b", 1)
    with pytest.raises(QueueFull):
        sequences.add("b", 1)


def test_place_in_the_queue_is_free_when_its_holder_starts_or_goes() -> None:
    rig = SchedulerRig(max_queued_requests=1, max_queued_tokens=10)
    rig.add("a", 10)
    rig.scheduler.end_request("a", FinishReason.CANCELLED)
    rig.add("b", 10)
    rig.step()
    rig.add("c", 10)
    with pytest.raises(QueueFull):
        rig.add("d", 1)


def test_held_back_siblings_give_their_place_back_when_cancelled() -> None:
    rig = SchedulerRig(max_queued_tokens=40)
    sibling = rig.add("a", 10, n=4)[2]
    rig.scheduler.end_sequence(sibling.sequence_id, FinishReason.STOP)
    rig.scheduler.check_integrity()
    rig.add("b", 10)
    with pytest.raises(QueueFull):
        rig.add("c", 1)


def test_the_retry_hint_is_the_time_that_the_queue_takes() -> None:
    rig = SchedulerRig(max_queued_requests=2, max_step_tokens=10)
    rig.add("a", 10)
    rig.send()
    rig.now += 0.5
    rig.answer()
    rig.scheduler.end_request("a", FinishReason.CANCELLED)
    rig.add("b", 60)
    rig.add("c", 20)
    with pytest.raises(QueueFull) as caught:
        rig.add("d", 5)
    assert caught.value.retry_after_s == pytest.approx(80 / 20)


def test_higher_priority_starts_first_then_earlier_arrival() -> None:
    rig = SchedulerRig(max_running=1, max_in_flight=1)
    for name, priority in [("a", 0), ("b", 1), ("c", 1), ("d", 2)]:
        rig.now += 1
        rig.add(name, 4, max_tokens=1, priority=priority)
    order = [started(rig.step())[0].request.request_id for _ in range(4)]
    assert order == ["d", "b", "c", "a"]


def test_the_core_never_looks_at_sampling_and_trace() -> None:
    rig = SchedulerRig()
    sampling = object()
    rig.scheduler.add_request(Request("a", [1, 2], 2, sampling=sampling, trace="t"))
    new = rig.send().new_sequences[0]
    assert new.sequence.request.sampling is sampling
    assert new.sequence.request.trace == "t"


def test_those_about_to_be_added_count_as_waiting() -> None:
    rig = SchedulerRig(max_queued_requests=3)
    rig.scheduler.check_queue(3, num_arriving=0)
    rig.scheduler.check_queue(2, num_arriving=1)
    with pytest.raises(QueueFull):
        rig.scheduler.check_queue(3, num_arriving=1)
    # Only when nothing is ahead may more come than the limit says.
    rig.scheduler.check_queue(4, num_arriving=0)
