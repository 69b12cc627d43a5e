"""What is drafted, and when nothing is."""

import random

import numpy as np
import pytest

from worker_service.runtime.drafting import LEAST_MATCH, Drafter, look_up
from worker_service.runtime.sequences import SequenceTable
from worker_service.runtime.step import NewSequence, Sampling


def drafted(tokens: list[int], most: int = 4) -> list[int]:
    return look_up(np.array(tokens, np.int32), most).tolist()


def slow_look_up(tokens: list[int], most: int) -> list[int]:
    """The definition, written out."""
    best, follows = 0, 0
    for start in range(1, len(tokens)):
        length = 0
        while length < min(start, 8) and tokens[start - 1 - length] == tokens[-1 - length]:
            length += 1
        if length >= max(best, LEAST_MATCH):
            best, follows = length, start
    if not best:
        return []
    loop = tokens[follows:]
    return [loop[i % len(loop)] for i in range(most)]


def test_what_followed_the_longest_match_is_drafted_the_latest_of_several() -> None:
    assert drafted([1, 2, 3, 4, 5, 9, 1, 2]) == [3, 4, 5, 9]
    assert drafted([1, 2, 30, 8, 8, 5, 2, 40, 8, 8, 1, 2]) == [30, 8, 8, 5]
    assert drafted([1, 2, 30, 0, 0, 1, 2, 40, 0, 0, 1, 2], 2) == [40, 0]


def test_one_token_alike_is_no_match() -> None:
    assert drafted([1, 2, 3, 2]) == []
    assert drafted([7]) == []
    assert drafted([7, 7]) == []


def test_a_loop_is_taken_round() -> None:
    assert drafted([5, 1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]
    assert drafted([4, 4, 4], 3) == [4, 4, 4]


def test_it_is_what_the_definition_says() -> None:
    rng = random.Random(1)
    for _ in range(3000):
        tokens = [rng.randrange(rng.choice((2, 3, 6))) for _ in range(rng.randrange(1, 30))]
        most = rng.randrange(1, 9)
        assert drafted(tokens, most) == slow_look_up(tokens, most), tokens


# A table's sequences.


def table_of(*prompts: list[int], token_limit: int = 40) -> SequenceTable:
    table = SequenceTable(vocab_size=50, max_model_len=64, num_blocks=16, block_size=4)
    for number, prompt in enumerate(prompts):
        new = NewSequence(number, "r", prompt, len(prompt), Sampling(), [], token_limit=token_limit)
        table.add(new, 0, failed=False)
    return table


LOOP = [1, 2, 3, 1, 2, 3, 1, 2]


CHEAP, DEAR = 0.02, 0.25


def draft(drafter: Drafter, table: SequenceTable, most: int = 5, num_spare: int = 100) -> list[int]:
    rows = np.array([table.row_of[i] for i in sorted(table.row_of)])
    return drafter.draft(rows, np.full(len(rows), most), num_spare).tolist()


def test_drafts_lie_behind_the_tokens() -> None:
    table = table_of(LOOP, [9, 8, 7])
    assert draft(Drafter(table, CHEAP), table) == [5, 0]
    row = table.row_of[0]
    assert table.token_ids[row, :13].tolist() == [*LOOP, 3, 1, 2, 3, 1]
    assert table.num_tokens[row] == 8


@pytest.mark.parametrize(("token_limit", "expected"), [(40, 5), (14, 5), (13, 4), (10, 1), (9, 0)])
def test_a_token_is_left_to_be_sampled_behind_the_drafts(token_limit: int, expected: int) -> None:
    table = table_of(LOOP, token_limit=token_limit)
    assert draft(Drafter(table, CHEAP), table) == [expected]


def test_what_is_to_spare_is_shared() -> None:
    table = table_of(LOOP, LOOP, LOOP)
    drafter = Drafter(table, CHEAP)
    assert draft(drafter, table, num_spare=7) == [2, 2, 3]
    assert draft(drafter, table, num_spare=2) == [0, 1, 1]
    assert draft(drafter, table, num_spare=0) == draft(drafter, table, num_spare=-3) == [0, 0, 0]
    table.skipped[table.row_of[1]] = True
    assert draft(drafter, table, num_spare=7) == [3, 0, 4]


@pytest.mark.parametrize("cost", [CHEAP, DEAR])
def test_a_sequence_whose_drafts_are_wrong_rests_longer_and_longer(cost: float) -> None:
    table = table_of(LOOP, LOOP)
    drafter, row = Drafter(table, cost), table.row_of[0]
    drafts = []
    for _ in range(1000):
        num, other = draft(drafter, table)
        assert other > 0
        drafts.append(num)
        if num:
            drafter.learn(row, num, 0)
        drafter.learn(table.row_of[1], other, other)
    rests = [len(run) for run in "".join("x" if num else "." for num in drafts).split("x") if run]
    assert rests[:5] == [8, 16, 32, 64, 128]
    # In the time of how many tokens: three of a hundred at first, and less than one later.
    assert cost * sum(drafts[:250]) < 0.03 * 250
    assert cost * sum(drafts[250:]) < 0.01 * 750


def test_one_that_comes_to_repeat_itself_drafts_again() -> None:
    table = table_of(LOOP)
    drafter, row = Drafter(table, CHEAP), table.row_of[0]
    for _ in range(200):
        if (num := draft(drafter, table)[0]) > 0:
            drafter.learn(row, num, 0)
    while draft(drafter, table) == [0]:
        pass
    for _ in range(20):
        drafter.learn(row, 5, 5)
        assert draft(drafter, table) == [5]
    drafter.remove(row)
    assert draft(drafter, table) == [5]


def test_where_drafts_are_dear_more_are_tried_only_after_right_ones() -> None:
    table = table_of(LOOP, token_limit=60)
    drafter, row = Drafter(table, DEAR), table.row_of[0]
    widths = []
    for num_right in (9, 9, 4, 9, 0, 9):
        (num,) = draft(drafter, table, most=8)
        widths.append(num)
        drafter.learn(row, num, min(num, num_right))
    assert widths == [2, 4, 8, 5, 8, 1]
