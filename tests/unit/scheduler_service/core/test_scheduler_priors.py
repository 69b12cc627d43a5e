"""Requests that go on from what an earlier call has brought."""

import pytest

from scheduler_service.core.request import FinishReason
from tests.support.scheduler_rig import SchedulerRig


def test_a_sequence_goes_on_at_its_position_with_the_tokens_of_an_undisturbed_run() -> None:
    rig = SchedulerRig()
    prompt = rig.prompt(9)
    whole = rig.add_one("a", prompt, max_tokens=12)
    rig.finish()
    for num in range(12):
        prior = rig.outputs[whole][:num]
        (sequence,) = rig.add(f"b{num}", prompt, max_tokens=12, priors={0: prior})
        assert sequence.token_ids == [*prompt, *prior]
        rig.finish()
        assert rig.outputs[sequence] == rig.outputs[whole][num:]


@pytest.mark.parametrize("order", [(0, 1, 2), (2,), (1, 2)])
def test_only_the_sequences_that_have_not_ended_run(order: tuple[int, ...]) -> None:
    rig = SchedulerRig()
    prompt = rig.prompt(9)
    whole = rig.add("a", prompt, max_tokens=8, n=3)
    rig.finish()
    priors = {index: rig.outputs[whole[index]][: 2 * index] for index in order}
    sequences = rig.add("b", prompt, max_tokens=8, n=3, priors=priors)
    assert [sequence.index for sequence in sequences] == list(order)
    rig.scheduler.check_integrity()
    rig.finish()
    for sequence in sequences:
        assert rig.outputs[sequence] == rig.outputs[whole[sequence.index]][2 * sequence.index :]


def test_a_continued_request_counts_with_all_its_tokens_and_can_be_cancelled() -> None:
    rig = SchedulerRig(max_running=1)
    rig.add_one("first", 5, max_tokens=30)
    rig.step()
    rig.add("b", rig.prompt(4), max_tokens=8, n=2, priors={0: [1, 2, 3], 1: []})
    rig.scheduler.check_integrity()
    assert rig.scheduler.num_queued_tokens == 4 + 3 + 4
    rig.scheduler.end_request("b", FinishReason.CANCELLED)
    rig.scheduler.check_integrity()
    assert rig.scheduler.num_queued_tokens == 0
