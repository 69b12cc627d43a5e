"""Prefixes that are not computed twice: by later requests, by the next turn, and by siblings."""

import pytest

from scheduler_service.core.request import FinishReason
from tests.support.scheduler_rig import SchedulerRig, planned, started


def test_a_later_request_starts_after_the_prefix_it_shares() -> None:
    rig = SchedulerRig(block_size=4)
    prompt = rig.prompt(10)
    rig.add("a", prompt, max_tokens=1)
    rig.finish()
    second = rig.add_one("b", [*prompt[:9], 5, 5])
    plan = rig.step()
    assert (plan.computed_token_counts, plan.scheduled_token_counts) == ([8], [3])
    assert second.cached == 8
    rig.finish()
    assert rig.is_whole(second)


def test_the_same_prompt_again_leaves_one_token_at_least() -> None:
    rig = SchedulerRig(block_size=4)
    prompt = rig.prompt(8)
    rig.add("a", prompt, max_tokens=1)
    rig.finish()
    rig.add("b", prompt)
    plan = rig.step()
    assert (plan.computed_token_counts, plan.scheduled_token_counts) == ([4], [4])


def test_a_prefix_is_shared_while_its_first_owner_runs() -> None:
    rig = SchedulerRig(block_size=4)
    prompt = rig.prompt(10)
    first = rig.add_one("a", prompt)
    rig.send()
    second = rig.add_one("b", prompt)
    plan = rig.send()
    assert planned(plan) == {first: 1, second: 2}
    assert second.block_ids[:2] == first.block_ids[:2]
    rig.finish()
    assert rig.is_whole(first)
    assert rig.is_whole(second)


def test_blocks_are_shared_within_the_step_that_fills_them() -> None:
    rig = SchedulerRig(block_size=4)
    prompt = rig.prompt(10)
    first, second = rig.add_one("a", prompt), rig.add_one("b", prompt)
    assert planned(rig.send()) == {first: 10, second: 2}
    assert second.block_ids[:2] == first.block_ids[:2]
    assert second.block_ids[2] != first.block_ids[2]
    rig.finish()
    assert rig.is_whole(first)
    assert rig.is_whole(second)


def test_the_next_turn_of_a_conversation_starts_after_the_last_answer() -> None:
    rig = SchedulerRig(block_size=4)
    prompt = rig.prompt(6)
    first = rig.add_one("a", prompt, max_tokens=7)
    rig.finish()
    # 13 tokens, of which the last one's KV was never needed: three full blocks.
    follow_up = rig.add_one("b", [*prompt, *rig.outputs[first], 9, 9, 9])
    assert rig.step().computed_token_counts == [12]
    assert follow_up.cached == 12
    rig.finish()
    assert rig.is_whole(follow_up)


def test_kv_of_a_stop_token_is_not_taken_for_computed() -> None:
    rig = SchedulerRig(block_size=4)
    prompt = rig.prompt(6)
    first = rig.add_one("a", prompt)
    rig.step()
    rig.send()
    rig.send()
    rig.answer(stop=[first])
    rig.answer()
    follow_up = rig.add_one("b", [*prompt, *rig.outputs[first], 9])
    assert len(follow_up.request.prompt_token_ids) == 9
    assert rig.step().computed_token_counts == [4]
    rig.finish()
    assert rig.is_whole(follow_up)


@pytest.mark.parametrize("fields", [{"adapter": "other"}, {"cache_salt": "other"}])
def test_another_adapter_or_salt_shares_nothing(fields: dict[str, str]) -> None:
    rig = SchedulerRig(block_size=4)
    prompt = rig.prompt(10)
    rig.add("a", prompt, max_tokens=1)
    rig.finish()
    rig.add("b", prompt, **fields)
    assert rig.step().computed_token_counts == [0]


def test_without_prefix_caching_nothing_is_shared() -> None:
    rig = SchedulerRig(block_size=4, prefix_caching=False)
    prompt = rig.prompt(10)
    rig.add("a", prompt, max_tokens=1)
    rig.finish()
    sequences = rig.add("b", prompt, n=2)
    assert planned(rig.step()) == dict.fromkeys(sequences, 10)
    assert rig.scheduler.num_cached_blocks == 0


def test_a_prompt_cut_short_leaves_what_was_computed() -> None:
    rig = SchedulerRig(block_size=4, max_step_tokens=10)
    prompt = rig.prompt(30)
    rig.add("a", prompt)
    rig.step()
    rig.scheduler.end_request("a", FinishReason.CANCELLED)
    assert rig.scheduler.num_cached_blocks == 2
    second = rig.add_one("b", prompt)
    assert rig.step().computed_token_counts == [8]
    rig.finish()
    assert rig.is_whole(second)


def test_hits_are_counted() -> None:
    rig = SchedulerRig(block_size=4)
    prompt = rig.prompt(10)
    for name in "ab":
        rig.add(name, prompt, max_tokens=1)
        rig.finish()
    assert (rig.scheduler.stats.prefix_query_tokens, rig.scheduler.stats.prefix_hit_tokens) == (20, 8)


def test_siblings_start_after_the_step_that_fills_the_last_full_prompt_block() -> None:
    rig = SchedulerRig(block_size=4, max_step_tokens=8, max_in_flight=3)
    leader, *siblings = rig.add("a", 14, n=3)
    assert planned(rig.send()) == {leader: 8}
    assert planned(rig.send()) == {leader: 6}
    # Its twelve shared tokens are planned: the others compute only what is left of the prompt.
    assert planned(rig.send()) == {leader: 1, **dict.fromkeys(siblings, 2)}
    assert all(s.block_ids[:3] == leader.block_ids[:3] for s in siblings)
    assert len({s.block_ids[3] for s in [leader, *siblings]}) == 3
    rig.finish()
    assert all(rig.is_whole(s) for s in [leader, *siblings])


def test_siblings_start_when_shared_blocks_are_filled_though_the_prompt_is_not_done() -> None:
    rig = SchedulerRig(block_size=4, max_step_tokens=8, max_in_flight=3)
    leader, sibling = rig.add("a", 11, n=2)
    assert planned(rig.send()) == {leader: 8}
    assert planned(rig.send()) == {leader: 3, sibling: 3}


def test_siblings_of_a_prompt_of_whole_blocks_share_all_but_the_last() -> None:
    rig = SchedulerRig(block_size=4)
    leader, sibling = rig.add("a", 8, n=2)
    rig.send()
    assert planned(rig.send()) == {leader: 1, sibling: 4}
    assert sibling.block_ids[0] == leader.block_ids[0]
    assert sibling.block_ids[1] != leader.block_ids[1]


def test_siblings_of_a_prompt_shorter_than_a_block_start_at_once() -> None:
    rig = SchedulerRig(block_size=4)
    sequences = rig.add("a", 3, n=3)
    assert started(rig.send()) == sequences
    rig.finish()
    assert all(rig.is_whole(s) for s in sequences)


def test_siblings_sample_their_own_continuations() -> None:
    rig = SchedulerRig()
    sequences = rig.add("a", 10, n=3)
    rig.finish()
    assert [s.index for s in sequences] == [0, 1, 2]
    assert len({tuple(rig.outputs[s]) for s in sequences}) == 3


def test_siblings_start_at_once_when_the_prefix_is_cached() -> None:
    rig = SchedulerRig(block_size=4, max_step_tokens=8)
    prompt = rig.prompt(14)
    rig.add("a", prompt, max_tokens=1)
    rig.finish()
    leader, sibling = rig.add("b", prompt, n=2)
    assert planned(rig.send()) == {leader: 2}
    assert planned(rig.send()) == {leader: 1, sibling: 2}


@pytest.mark.parametrize("how", ["cancelled", "failed", "epoch", "deadline"])
def test_siblings_are_not_left_behind_by_their_leader(how: str) -> None:
    rig = SchedulerRig(block_size=4, max_step_tokens=8)
    leader, *siblings = rig.add("a", 14, n=3, deadline=rig.now + 5)
    rig.send()
    if how == "cancelled":
        rig.scheduler.end_sequence(leader.sequence_id, FinishReason.CANCELLED)
    elif how == "failed":
        rig.answer(fail=leader)
    elif how == "epoch":
        rig.lose_worker()
    else:
        rig.now += 5
        assert [event.sequence for event in rig.scheduler.expire()] == [leader, *siblings]
    rig.scheduler.check_integrity()
    rig.finish()
    if how != "deadline":
        assert all(rig.is_whole(s) for s in siblings)


def test_a_leader_cancelled_before_it_ran_hands_over() -> None:
    rig = SchedulerRig(block_size=4)
    leader, *siblings = rig.add("a", 14, n=3)
    rig.scheduler.end_sequence(leader.sequence_id, FinishReason.CANCELLED)
    assert started(rig.send()) == siblings


def test_a_preempted_leader_keeps_its_siblings_waiting() -> None:
    rig = SchedulerRig(block_size=4, max_step_tokens=8, max_running=1, max_in_flight=1)
    leader, sibling = rig.add("a", 14, n=2, max_tokens=2)
    rig.step()
    urgent = rig.add_one("urgent", 3, max_tokens=2, priority=1)
    assert planned(rig.step()) == {urgent: 3}
    assert rig.scheduler.num_waiting == 2
    rig.step()
    assert planned(rig.step()) == {leader: 6}
    rig.finish()
    assert rig.is_whole(leader)
    assert rig.is_whole(sibling)


def test_a_sibling_can_end_before_it_ran() -> None:
    rig = SchedulerRig(block_size=4)
    leader, first, second = rig.add("a", 14, n=3)
    rig.scheduler.end_sequence(first.sequence_id, FinishReason.STOP)
    rig.send()
    assert started(rig.send()) == [second]
    rig.finish()
    assert rig.is_whole(leader)
    assert first not in rig.outputs
