"""Prompts that are scored: which tokens are computed for it, and when siblings start."""

import pytest

from scheduler_service.core.plan import PromptLogprobs, StepResult
from tests.support.model_worker import prompt_scores
from tests.support.scheduler_rig import SchedulerRig, planned, started

PROMPT = [1000 + i for i in range(30)]


def test_a_scored_prompt_is_not_looked_up_and_is_there_for_others() -> None:
    rig = SchedulerRig(max_step_tokens=64)
    rig.add_one("warm", PROMPT)
    rig.step()
    scored = rig.add_one("scored", PROMPT, scores_prompt=True)
    assert planned(rig.step())[scored] == 30
    assert scored.cached == 0 and rig.scores[scored] == prompt_scores(PROMPT)
    other = rig.add_one("other", PROMPT)
    assert planned(rig.step())[other] == 2
    rig.finish()
    assert all(rig.is_whole(sequence) for sequence in (scored, other))


def test_siblings_start_when_the_whole_prompt_is_computed_and_share_its_blocks() -> None:
    rig = SchedulerRig(max_step_tokens=16)
    first, second, third = rig.add("r", PROMPT, n=3, scores_prompt=True)
    assert [started(rig.send()), started(rig.send())] == [[first], []]
    rig.answer()
    # Thirty tokens are 16 and 14: the step after them is the first with the others.
    assert started(rig.send()) == [second, third]
    assert second.block_ids[:7] == first.block_ids[:7]
    while rig.sent:
        rig.answer()
    rig.finish()
    assert rig.scores == {first: prompt_scores(PROMPT)}
    assert all(rig.is_whole(sequence) for sequence in (first, second, third))


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("length", [1, 2, 3])
def test_short_prompts_are_scored_before_siblings_speak(length: int, *, prefix_caching: bool) -> None:
    rig = SchedulerRig(prefix_caching=prefix_caching)
    first, second = rig.add("r", PROMPT[:length], n=2, scores_prompt=True)
    assert started(rig.send()) == ([first, second] if length == 1 else [first])
    rig.answer()
    rig.finish()
    assert rig.scores.get(first, []) == prompt_scores(PROMPT[:length])
    assert rig.is_whole(first) and rig.is_whole(second)


def test_a_preempted_prompt_goes_on_where_it_was_and_takes_what_it_has_told_of_from_the_cache() -> None:
    rig = SchedulerRig(num_blocks=8, max_step_tokens=13, max_in_flight=1)
    scored = rig.add_one("scored", PROMPT[:26], 4, scores_prompt=True)
    rig.step()
    assert scored.scored == 14
    rig.add_one("urgent", 20, 1, priority=1)
    rig.step()
    assert scored.num_preemptions == 1
    while scored not in started(plan := rig.send()):
        rig.answer()
    new = plan.new_sequences[0]
    # Token 14 is scored by computing token 13, so blocks of the first 13 tokens may be taken, if they are there still.
    assert new.sequence is scored and planned(plan)[scored] and plan.computed_token_counts[0] <= 12
    rig.answer()
    rig.finish()
    assert rig.scores[scored] == prompt_scores(PROMPT[:26])
    assert rig.is_whole(scored)


def test_the_end_of_an_epoch_repeats_only_what_was_not_told() -> None:
    rig = SchedulerRig(max_step_tokens=10)
    scored = rig.add_one("scored", PROMPT, scores_prompt=True)
    rig.send()
    rig.send()
    rig.answer()
    assert scored.scored == 11
    rig.lose_worker()
    rig.finish()
    assert rig.scores[scored] == prompt_scores(PROMPT)
    assert rig.is_whole(scored)


def test_a_position_out_of_turn_is_a_workers_fault() -> None:
    rig = SchedulerRig()
    sequence = rig.add_one("scored", PROMPT, scores_prompt=True)
    plan = rig.send()
    part = (sequence.sequence_id, PromptLogprobs(2, 1, None))
    with pytest.raises(ValueError, match="prompt position 2 is told of; 1 is next"):
        rig.scheduler.apply(StepResult(plan.step_id, [], [], prompt_logprobs=[part]))
