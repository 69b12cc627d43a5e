"""No step that passes can index past what the worker holds, whatever its numbers."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwire.rpc.errors import StepwireError
from worker_service.rpc.limits import StepLimits, check_number, check_step, sequence_problem, without_sequences
from worker_service.runtime.step import NewSequence, Sampling, StepInput

LIMITS = StepLimits(max_step_tokens=8, max_sequences=3, max_model_len=12, num_blocks=5, block_size=4, vocab_size=50)
NUMBERS = st.one_of(st.integers(-2, 13), st.sampled_from([2**31 - 1, -(2**31)]))
COLUMN = st.lists(NUMBERS, max_size=4)


def new(**changes: Any) -> NewSequence:
    values: dict[str, Any] = {
        "sequence_id": 1,
        "request_id": "r",
        "token_ids": [1, 2, 3],
        "prompt_token_count": 3,
        "sampling": Sampling(),
        "block_ids": [0],
        **changes,
    }
    return NewSequence(**values)


def step(**changes: Any) -> StepInput:
    values: dict[str, Any] = {
        "step_id": 1,
        "new_sequences": [],
        "sequence_ids": [1, 2],
        "scheduled_token_counts": [1, 3],
        "computed_token_counts": [4, 0],
        "new_block_counts": [1, 0],
        "new_block_ids": [4],
        "finished_sequence_ids": [7],
        "preempted_sequence_ids": [],
        **changes,
    }
    return StepInput(**values)


@given(ids=COLUMN, scheduled=COLUMN, computed=COLUMN, counts=COLUMN, blocks=COLUMN, finished=COLUMN, new_blocks=COLUMN)
def test_what_passes_is_in_bounds(
    ids: list[int],
    scheduled: list[int],
    computed: list[int],
    counts: list[int],
    blocks: list[int],
    finished: list[int],
    new_blocks: list[int],
) -> None:
    values = step(
        new_sequences=[new(sequence_id=ids[0], block_ids=new_blocks)] if ids else [],
        sequence_ids=ids,
        scheduled_token_counts=scheduled,
        computed_token_counts=computed,
        new_block_counts=counts,
        new_block_ids=blocks,
        finished_sequence_ids=finished,
    )
    try:
        check_step(values, LIMITS)
    except StepwireError as error:
        assert error.reason in {"FIELD_OUT_OF_RANGE", "FIELD_INVALID"}
        assert error.metadata["field"]
        return
    assert len(ids) == len(set(ids)) == len(scheduled) == len(computed) == len(counts) <= LIMITS.max_sequences
    assert all(count >= 1 for count in scheduled) and sum(scheduled) <= LIMITS.max_step_tokens
    assert all(c >= 0 and c + s <= LIMITS.max_model_len for c, s in zip(computed, scheduled, strict=True))
    assert sum(counts) == len(blocks) and all(count >= 0 for count in counts)
    assert all(0 <= block < LIMITS.num_blocks for block in blocks)
    if ids:
        assert all(0 <= block < LIMITS.num_blocks for block in new_blocks) and len(new_blocks) <= 3
        assert counts[0] == 0
    assert all(sequence_id >= 0 for sequence_id in (*ids, *finished))


def test_a_good_step_passes() -> None:
    check_step(step(), LIMITS)
    check_step(step(new_sequences=[new(sequence_id=2)]), LIMITS)
    empty: list[int] = []
    check_step(
        step(
            sequence_ids=empty,
            scheduled_token_counts=empty,
            computed_token_counts=empty,
            new_block_counts=empty,
            new_block_ids=empty,
        ),
        LIMITS,
    )


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"draft_token_counts": [1]}, "draft_token_counts"),
        ({"draft_token_counts": [0, -1]}, "draft_token_counts"),
        ({"draft_token_counts": [2**31 - 1, 2**31 - 1]}, "draft_token_counts"),
        # Two sequences leave one more place to sample at, and four tokens four more to compute.
        ({"draft_token_counts": [2, 0]}, "draft_token_counts"),
        ({"draft_token_counts": [1, 0], "scheduled_token_counts": [5, 3]}, "draft_token_counts"),
        ({"applied_step_id": -1}, "applied_step_id"),
        ({"applied_step_id": 1}, "applied_step_id"),
    ],
)
def test_drafts_out_of_bounds_are_refused(changes: dict[str, Any], field: str) -> None:
    check_step(step(draft_token_counts=[1, 0]), LIMITS)
    with pytest.raises(StepwireError) as raised:
        check_step(step(**changes), LIMITS)
    assert raised.value.metadata["field"] == field


def test_a_refused_sequence_takes_its_drafts_along() -> None:
    kept = without_sequences(step(draft_token_counts=[1, 4]), {1})
    assert (kept.sequence_ids, kept.draft_token_counts) == ([2], [4])
    assert without_sequences(step(), {1}).draft_token_counts == ()


def test_a_new_sequence_twice_or_with_appended_blocks_is_refused() -> None:
    with pytest.raises(StepwireError, match="named once"):
        check_step(step(new_sequences=[new(), new()], new_block_counts=[0, 0], new_block_ids=[]), LIMITS)
    with pytest.raises(StepwireError, match="must be 0"):
        check_step(step(new_sequences=[new()]), LIMITS)
    with pytest.raises(StepwireError, match="request_id"):
        check_step(step(new_sequences=[new(sequence_id=2, request_id="r" * 2000)]), LIMITS)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"token_ids": []}, "no tokens"),
        ({"token_ids": [1, 50, 2]}, "token id 50 "),
        ({"token_ids": [-1]}, "token id -1 "),
        ({"token_ids": [1] * 13}, "13 tokens"),
        ({"prompt_token_count": 0}, "prompt_token_count 0"),
        ({"prompt_token_count": 4}, "prompt_token_count 4"),
        ({"token_limit": 3}, "token_limit 3"),
        ({"token_limit": -1}, "token_limit -1"),
        ({"token_limit": 13}, "token_limit 13"),
        ({"sampling": Sampling(temperature=float("inf"))}, "finite"),
        ({"sampling": Sampling(temperature=-0.1)}, "temperature"),
        ({"sampling": Sampling(top_k=-1)}, "top_k"),
        ({"sampling": Sampling(top_p=0.0)}, "top_p"),
        ({"sampling": Sampling(top_p=1.5)}, "top_p"),
        ({"sampling": Sampling(min_p=1.5)}, "min_p"),
        ({"sampling": Sampling(repetition_penalty=0.0)}, "repetition_penalty"),
        ({"sampling": Sampling(presence_penalty=float("nan"))}, "finite"),
        ({"sampling": Sampling(frequency_penalty=float("-inf"))}, "finite"),
        ({"sampling": Sampling(min_tokens=-1)}, "min_tokens"),
        ({"sampling": Sampling(sequence_index=-1)}, "sequence_index"),
        ({"sampling": Sampling(logprobs=-1)}, "logprobs"),
        ({"sampling": Sampling(logprobs=10**6)}, "logprobs"),
        ({"sampling": Sampling(stop_token_ids=(50,))}, "stop_token_ids"),
        ({"sampling": Sampling(typical_p=0.0)}, "typical_p"),
        ({"sampling": Sampling(biased_token_ids=(1,), biases=())}, "biases"),
        ({"sampling": Sampling(biased_token_ids=(1,), biases=(math.inf,))}, "finite"),
        ({"sampling": Sampling(biased_token_ids=(1, 1), biases=(1.0, 1.0))}, "twice"),
        ({"sampling": Sampling(allowed_token_ids=(-1,))}, "allowed_token_ids"),
        ({"sampling": Sampling(banned_token_ids=(50,))}, "banned_token_ids"),
        ({"sampling": Sampling(stop_token_ids=(1,) * 5000)}, "stop_token_ids"),
    ],
)
def test_what_makes_one_sequence_impossible(changes: dict[str, Any], problem: str) -> None:
    found = sequence_problem(new(**changes), LIMITS)
    assert found is not None and problem in found


def test_a_good_sequence_has_no_problem() -> None:
    assert sequence_problem(new(), LIMITS) is None
    assert sequence_problem(new(sampling=Sampling(logprobs=0, stop_token_ids=(0, 49), top_p=1e-9)), LIMITS) is None


def test_leaving_out_a_sequence_leaves_the_others_as_they_are() -> None:
    whole = StepInput(
        step_id=3,
        new_sequences=[new(sequence_id=2)],
        sequence_ids=[1, 2, 3],
        scheduled_token_counts=[1, 3, 2],
        computed_token_counts=[4, 0, 6],
        new_block_counts=[1, 0, 2],
        new_block_ids=[10, 11, 12],
        finished_sequence_ids=[7, 8],
        preempted_sequence_ids=[8, 9],
    )
    assert without_sequences(whole, {2, 8}) == replace(
        whole,
        new_sequences=[],
        sequence_ids=[1, 3],
        scheduled_token_counts=[1, 2],
        computed_token_counts=[4, 6],
        new_block_counts=[1, 2],
        finished_sequence_ids=[7],
        preempted_sequence_ids=[9],
    )
    assert without_sequences(whole, {1}).new_block_ids == [11, 12]
    assert without_sequences(whole, {3}).new_block_ids == [10]


def test_check_number_names_field_value_and_bounds() -> None:
    check_number("x", 1, 1, 1)
    with pytest.raises(StepwireError) as caught:
        check_number("block_count", 9, 1, 8)
    assert caught.value.metadata == {"field": "block_count", "found": "9", "expected": "1..8"}
