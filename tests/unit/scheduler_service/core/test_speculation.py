"""Plans for drafts, and what their answers change. Long random histories are in tests/property."""

import pytest

from scheduler_service.core.plan import StepResult, TokenEvent
from scheduler_service.core.request import FinishReason, Sequence
from tests.support.scheduler_rig import SchedulerRig, planned


def decoding(rig: SchedulerRig, *sequences: Sequence) -> None:
    """Brings sequences past their prompts, with nothing in flight."""
    while any(sequence.output_token_count < 1 for sequence in sequences):
        rig.step()


def answer(rig: SchedulerRig, sequence: Sequence, accepted: list[int], *, stop: bool = False) -> list[TokenEvent]:
    """Answers the oldest step by hand: the accepted tokens, then 99."""
    plan = rig.sent.popleft()
    stopped = frozenset([sequence.sequence_id] if stop else [])
    early = {sequence.sequence_id: [(token_id, f"lp{token_id}") for token_id in accepted]} if accepted else {}
    result = StepResult(plan.step_id, [sequence.sequence_id], [99], stopped, accepted=early, num_draft_tokens=4)
    events = rig.scheduler.apply(result)
    rig.scheduler.check_integrity()
    assert all(isinstance(event, TokenEvent) for event in events)
    return events  # type: ignore[return-value]


def test_a_plan_says_how_many_may_come_and_holds_blocks_for_all() -> None:
    rig = SchedulerRig(block_size=4)
    sequence = rig.add_one("r", 6, 40, max_draft_tokens=5)
    assert not rig.send().draft_counts
    plan = rig.send()  # 6 tokens are computed, one is sampled: it and 5 drafts make 12
    assert (plan.scheduled_token_counts, plan.computed_token_counts) == ([1], [6])
    assert plan.draft_counts == {sequence.sequence_id: 5}
    assert plan.num_tokens == 1
    assert len(sequence.block_ids) == 3
    rig.answer()
    plan = rig.send()  # what the step in flight brings is not known: 7 are computed for sure, 12 perhaps
    assert plan.computed_token_counts == [7]
    assert plan.applied_step_id == 1
    assert len(sequence.block_ids) == 5
    events = answer(rig, sequence, [50, 51, 52])
    assert [(e.token_id, e.position, e.logprobs) for e in events] == [
        (50, 1, "lp50"),
        (51, 2, "lp51"),
        (52, 3, "lp52"),
        (99, 4, None),
    ]
    plan = rig.send()
    assert (plan.computed_token_counts, plan.applied_step_id) == ([11], 2)
    stats = rig.scheduler.stats
    assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (4, 3)


def test_a_request_that_does_not_speculate_never_drafts() -> None:
    rig = SchedulerRig()
    plain, drafting = rig.add_one("plain", 5), rig.add_one("drafting", 5, max_draft_tokens=3)
    decoding(rig, plain, drafting)
    plan = rig.send()
    assert plan.draft_counts == {drafting.sequence_id: 3}
    rig.finish()
    assert rig.is_whole(plain) and rig.is_whole(drafting)


def test_the_prompt_comes_first() -> None:
    rig = SchedulerRig(max_step_tokens=9)
    sequence = rig.add_one("r", 11, max_draft_tokens=3)
    for _ in range(2):
        assert not rig.step().draft_counts
    assert rig.send().draft_counts == {sequence.sequence_id: 3}


def test_where_many_run_or_wait_nobody_drafts() -> None:
    rig = SchedulerRig(max_running=6, max_step_tokens=64)
    first, second = rig.add_one("a", 3, 30, max_draft_tokens=5), rig.add_one("b", 3, 30, max_draft_tokens=5)
    decoding(rig, first, second)
    assert set(rig.step().draft_counts.values()) == {2}
    rig.add("more", 3, 30, n=3)
    assert not rig.step().draft_counts
    rig.add("even more", 3, 30, n=3)
    assert not rig.step().draft_counts


def test_drafts_leave_every_other_sequence_its_token() -> None:
    rig = SchedulerRig(max_running=4, max_step_tokens=4)
    sequences = [rig.add_one(f"r{i}", 1, 30, max_draft_tokens=8) for i in range(3)]
    decoding(rig, *sequences)
    for _ in range(5):
        plan = rig.step()
        assert set(planned(plan).values()) == {1}
        assert len(plan.sequences) == 3
        assert sum(plan.draft_counts.values()) <= 1


def test_nobody_is_preempted_for_drafts() -> None:
    rig = SchedulerRig(num_blocks=4, block_size=4, prefix_caching=False)
    first = rig.add_one("a", 4, 9, max_draft_tokens=6)
    other = rig.add_one("b", 6, 3)
    decoding(rig, first, other)
    # The one free block is for the token that comes for sure.
    assert rig.scheduler.num_free_blocks == 1
    assert not rig.send().draft_counts
    assert (len(first.block_ids), rig.scheduler.num_free_blocks) == (2, 0)
    rig.finish()
    assert rig.scheduler.stats.num_preemptions == 0
    assert rig.is_whole(first) and rig.is_whole(other)


def test_no_more_is_planned_than_the_length_allows() -> None:
    rig = SchedulerRig(block_size=4)
    sequence = rig.add_one("r", 5, 4, max_draft_tokens=8)
    decoding(rig, sequence)  # 6 of 9 tokens are there
    assert rig.send().draft_counts == {sequence.sequence_id: 2}
    assert len(sequence.block_ids) == 2  # the last token's own KV is never needed
    assert rig.send().draft_counts == {sequence.sequence_id: 1}
    (*_, last) = answer(rig, sequence, [50, 51])
    assert last.finish_reason is FinishReason.LENGTH
    assert rig.scheduler.num_free_blocks == 64
    # The step that is in flight finds the sequence at its limit.
    rig.scheduler.apply(StepResult(rig.sent.popleft().step_id, [], []))


def test_a_stop_token_ends_at_the_last_of_several_tokens() -> None:
    rig = SchedulerRig()
    sequence = rig.add_one("r", 5, 40, max_draft_tokens=4)
    decoding(rig, sequence)
    rig.send()
    events = answer(rig, sequence, [50, 51], stop=True)
    assert [event.finish_reason for event in events] == [None, None, FinishReason.STOP]
    assert rig.scheduler.num_free_blocks == 64


def test_accepted_tokens_fill_blocks_that_others_find() -> None:
    rig = SchedulerRig(block_size=4)
    sequence = rig.add_one("r", 4, 40, max_draft_tokens=4)
    decoding(rig, sequence)
    rig.send()
    answer(rig, sequence, [50, 51, 52, 53])
    follower = rig.add_one("next", [*sequence.token_ids, 7], 4)
    plan = rig.send()
    assert follower in plan.sequences
    assert follower.cached == 8  # the prompt's block, and the one that the first output and three drafts filled


def test_a_preempted_sequence_keeps_what_was_accepted() -> None:
    rig = SchedulerRig(num_blocks=6, block_size=4, prefix_caching=False)
    sequence = rig.add_one("r", 5, 18, max_draft_tokens=4)
    decoding(rig, sequence)
    rig.send()
    rig.add("urgent", 20, 2, priority=1)
    plan = rig.scheduler.schedule()
    assert plan is not None and plan.preempted_sequence_ids == [sequence.sequence_id]
    rig.sent.append(plan)
    answer(rig, sequence, [50, 51])
    assert sequence.token_ids[-3:] == [50, 51, 99]
    assert (sequence.computed, sequence.pending, sequence.possible) == (0, 0, 0)


@pytest.mark.parametrize(
    ("accepted", "last"),
    [
        ({1: [(5, None)] * 4}, [1]),
        ({1: [(5, None)]}, []),
        ({7: [(5, None)]}, [1]),
    ],
)
def test_more_than_was_planned_is_refused_and_changes_nothing(
    accepted: dict[int, list[tuple[int, object]]], last: list[int]
) -> None:
    rig = SchedulerRig()
    sequence = rig.add_one("r", 5, 40, max_draft_tokens=3)
    assert sequence.sequence_id == 1
    decoding(rig, sequence)
    plan = rig.send()
    before = list(sequence.token_ids)
    with pytest.raises(ValueError, match="draft tokens of sequence"):
        rig.scheduler.apply(StepResult(plan.step_id, last, [9] * len(last), accepted=accepted))
    assert sequence.token_ids == before
    rig.finish()
    assert rig.is_whole(sequence)


def test_tenants_are_charged_for_what_is_accepted() -> None:
    rig = SchedulerRig()
    sequence = rig.add_one("r", 5, 40, max_draft_tokens=3, tenant="a")
    rig.add("other", 5, 40, tenant="b")
    decoding(rig, sequence)
    ledger = rig.scheduler._roster.tenants
    before = ledger.served("a")
    rig.send()
    answer(rig, sequence, [50, 51])
    assert ledger.served("a") == before + 2 * 3
