"""Steps that disagree with what the worker holds: each is refused, and changes nothing."""

import copy
import random
from collections import Counter

import numpy as np
import pytest
import torch

from tests.support.tiny_runner import Driver, make_runner
from worker_service.models.decoder import Decoder
from worker_service.runtime.checks import check_step
from worker_service.runtime.sequences import SequenceTable
from worker_service.runtime.step import NewSequence, Sampling, StateMismatch, StepInput


def step(**changes: object) -> StepInput:
    """What the state of `settled` expects next, with changes."""
    values: dict[str, object] = {
        "step_id": 9,
        "new_sequences": [],
        "sequence_ids": [1, 2],
        "scheduled_token_counts": [1, 1],
        "computed_token_counts": [7, 4],
        "new_block_counts": [0, 1],
        "new_block_ids": [20],
        "finished_sequence_ids": [],
        "preempted_sequence_ids": [],
    }
    return StepInput(**(values | changes))  # type: ignore[arg-type]


def new(**changes: object) -> dict[str, object]:
    """A step that brings a third sequence, with changes to that."""
    values: dict[str, object] = {
        "sequence_id": 3,
        "request_id": "c",
        "token_ids": [1, 2, 3, 4, 5],
        "prompt_token_count": 5,
        "sampling": Sampling(),
        "block_ids": [30, 31],
    }
    return {
        "new_sequences": [NewSequence(**(values | changes))],  # type: ignore[arg-type]
        "sequence_ids": [1, 2, 3],
        "scheduled_token_counts": [1, 1, 5],
        "computed_token_counts": [7, 4, 0],
        "new_block_counts": [0, 1, 0],
    }


@pytest.fixture
def settled(tiny_model: Decoder) -> Driver:
    driver = Driver(*make_runner(tiny_model, num_blocks=64, max_model_len=40))
    driver.free = [13, 12, 11, 10]
    driver.add(1, [1, 2, 3, 4, 5, 6, 7])
    driver.add(2, [5, 6, 7, 8])
    driver.step({1: 100, 2: 100})
    return driver


@pytest.mark.parametrize(
    "changes",
    [
        {"sequence_ids": [1]},
        {"sequence_ids": [1, 1]},
        {"sequence_ids": [1, 5]},
        {"scheduled_token_counts": [1]},
        {"scheduled_token_counts": [0, 1]},
        {"scheduled_token_counts": [-1, 1]},
        {"scheduled_token_counts": [2, 1]},
        {"scheduled_token_counts": [2**62, 1]},
        {"scheduled_token_counts": [2**80, 1]},
        {"scheduled_token_counts": ["a", 1]},
        {"computed_token_counts": [6, 4]},
        {"computed_token_counts": [8, 4]},
        {"computed_token_counts": [-1, 4]},
        {"computed_token_counts": [2**63 - 1, 4]},
        {"new_block_counts": [0, 0]},
        {"new_block_counts": [0, 2]},
        {"new_block_counts": [1, -1], "new_block_ids": []},
        {"new_block_counts": [0, 0], "new_block_ids": []},
        {"new_block_ids": [64]},
        {"new_block_ids": [-1]},
        {"new_block_ids": [2**70]},
        {"new_block_ids": [12]},
        {"new_block_counts": [0, 11], "new_block_ids": list(range(20, 31))},
        {"finished_sequence_ids": [1]},
        {"preempted_sequence_ids": [2]},
        new(sequence_id=1) | {"sequence_ids": [1, 2, 1]},
        new(sequence_id=2),
        new(sequence_id=4),
        {"new_sequences": [NewSequence(7, "", [1], 1, Sampling(), [40])]},
        new(token_ids=[]),
        new(token_ids=[1, 2, 3, 4]),
        new(token_ids=[1] * 41),
        new(prompt_token_count=0),
        new(prompt_token_count=6),
        new(block_ids=[30]),
        new(block_ids=[30, 30]),
        new(block_ids=[30, 64]),
        new(block_ids=[-1, 30]),
        new(block_ids=[30, 20]),
        new(block_ids=[30, 11]),
        new(block_ids=list(range(30, 41))),
        new() | {"new_block_counts": [0, 1, 1], "new_block_ids": [20, 21]},
        new() | {"computed_token_counts": [7, 4, 1]},
        new() | {"computed_token_counts": [7, 4, 5]},
    ],
)
def test_a_step_that_disagrees_changes_nothing(settled: Driver, changes: dict[str, object]) -> None:
    undisturbed = copy.deepcopy(settled.runner._table)
    cache = settled.runner._executor._cache._data.clone()
    with pytest.raises(StateMismatch) as refused:
        settled.runner.execute(step(**changes))
    assert str(refused.value)
    table = settled.runner._table
    assert table.row_of == undisturbed.row_of
    for name, column in vars(undisturbed).items():
        if isinstance(column, np.ndarray):
            np.testing.assert_array_equal(getattr(table, name), column, err_msg=name)
    assert torch.equal(settled.runner._executor._cache._data, cache)
    assert settled.runner.execute(step()).sequence_ids == [1, 2]


def test_what_is_finished_is_forgotten_before_anything_else(settled: Driver) -> None:
    again = new(sequence_id=2) | {
        "sequence_ids": [1, 2],
        "scheduled_token_counts": [1, 5],
        "computed_token_counts": [7, 0],
        "new_block_counts": [0, 0],
        "new_block_ids": [],
        "preempted_sequence_ids": [2],
        "finished_sequence_ids": [77],
    }
    output = settled.runner.execute(step(**again))
    assert sorted(output.sequence_ids) == [1, 2]
    assert settled.runner.num_sequences == 2


def test_a_step_may_only_end_sequences(settled: Driver) -> None:
    output = settled.runner.execute(StepInput(9, [], [], [], [], [], [], [1], [2]))
    assert output.sequence_ids == [] and settled.runner.num_sequences == 0


def blocks_agree(step: StepInput, table: SequenceTable) -> bool:
    """Whether nobody writes, or gets, a block that another one holds: sequence by sequence, block by block."""
    ended = {*step.finished_sequence_ids, *step.preempted_sequence_ids}
    holders = Counter(
        block
        for sequence_id, row in table.row_of.items()
        if sequence_id not in ended
        for block in table.held_blocks(row).tolist()
    )
    new, given, blocks = {each.sequence_id: each for each in step.new_sequences}, list[int](), [*step.new_block_ids]
    columns = zip(step.sequence_ids, step.computed_token_counts, step.new_block_counts, strict=True)
    for sequence_id, computed, count in columns:
        first = computed // table.block_size
        given += [blocks.pop(0) for _ in range(count)]
        if sequence_id in new:
            given += list(new[sequence_id].block_ids)[first:]
        elif not table.skipped[table.row_of[sequence_id]]:
            held = table.held_blocks(table.row_of[sequence_id]).tolist()
            if any(holders[block] > 1 for block in held[first:]):
                return False
    return not any(holders[block] for block in given) and len(set(given)) == len(given)


def test_blocks_are_checked_as_one_by_one() -> None:
    refused = 0
    for seed in range(400):
        draws = random.Random(seed)
        table = SequenceTable(vocab_size=10, max_model_len=64, num_blocks=40, block_size=4)
        free = list(range(40))
        draws.shuffle(free)
        shared = [free.pop(), free.pop()]
        held: dict[int, tuple[int, int]] = {}
        for sequence_id in range(1, draws.randint(2, 6)):
            num = draws.randint(1, 14)
            computed = draws.randint(0, num - 1)
            blocks = [free.pop() for _ in range(-(-num // 4))]
            blocks[: draws.randint(0, 2)] = shared[: min(len(blocks), draws.randint(0, 2))]
            if len(blocks) * 4 < num or len(set(blocks)) < len(blocks):
                continue
            sequence = NewSequence(sequence_id, "r", [1] * num, num, Sampling(), blocks)
            row = table.add(sequence, computed, failed=draws.random() < 0.1)
            held[sequence_id] = (num, computed)
            assert table.held_blocks(row).tolist() == blocks
        ended = [each for each in held if draws.random() < 0.2]
        ids = [each for each in held if each not in ended and draws.random() < 0.9]
        counts = [draws.choice([0, 0, 0, 1, 2]) for _ in ids]
        any_block = [*free, *(draws.randrange(40) for _ in range(draws.choice([0, 0, 1])))]
        new_blocks = [draws.choice(any_block) for _ in range(sum(counts))]
        fresh = []
        if draws.random() < 0.4:
            fresh = [NewSequence(9, "n", [1] * 5, 5, Sampling(), [*shared[:1], draws.choice(any_block)])]
        step = StepInput(
            1,
            fresh,
            [*ids, *(9 for _ in fresh)],
            [*(held[each][0] - held[each][1] for each in ids), *(1 for _ in fresh)],
            [*(held[each][1] for each in ids), *(4 for _ in fresh)],
            [*counts, *(0 for _ in fresh)],
            new_blocks,
            ended,
            [],
        )
        if blocks_agree(step, table):
            check_step(step, table)
        else:
            refused += 1
            with pytest.raises(StateMismatch, match="block"):
                check_step(step, table)
    assert 50 < refused < 350
