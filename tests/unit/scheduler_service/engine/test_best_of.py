"""Which sequences win, and what is held back for how long."""

import random
from dataclasses import dataclass

import pytest

from scheduler_service.core.request import FinishReason
from scheduler_service.engine.best_of import BestOf, BestOfRule
from scheduler_service.engine.output import MAX_BACKLOG, MAX_MERGED_TOKENS
from scheduler_service.engine.values import Output
from stepwire.rpc.errors import StepwireError


@dataclass
class Token:
    logprob: float


@dataclass
class Position:
    sampled: Token


def outputs(index: int, logprobs: list[float]) -> list[Output]:
    """A whole sequence, a message for each token; token ids tell index and position."""
    last = len(logprobs) - 1
    return [
        Output(
            index,
            p,
            [100 * index + p],
            f"{index}.{p} ",
            [Position(Token(value))],
            FinishReason.STOP if p == last else None,
        )
        for p, value in enumerate(logprobs)
    ]


def by_place(delivered: list[Output]) -> list[list[int]]:
    texts: dict[int, list[int]] = {}
    for output in delivered:
        assert output.position == len(texts.setdefault(output.sequence_index, []))
        texts[output.sequence_index] += output.token_ids
    assert list(texts) == list(range(len(texts)))
    return list(texts.values())


@pytest.mark.parametrize("seed", range(40))
def test_the_winners_are_those_of_sorting_whole_sequences(seed: int) -> None:
    rng = random.Random(seed)
    num, num_best = rng.randint(2, 9), rng.randint(1, 3)
    logprobs = [[-rng.randint(0, 40) / 8 for _ in range(rng.randint(1, 12))] for _ in range(num)]
    best_of = BestOf(BestOfRule(num_best, has_logprobs=bool(seed % 2)))
    waiting = {index: outputs(index, values) for index, values in enumerate(logprobs)}
    num_beaten = 0
    while waiting:
        index = rng.choice(list(waiting))
        is_beaten = best_of.take(waiting[index].pop(0))
        num_beaten += is_beaten
        # A message that was on its way when its sequence was beaten changes nothing.
        assert not (is_beaten and waiting[index] and best_of.take(waiting[index].pop(0)))
        if is_beaten or not waiting[index]:
            del waiting[index]
    expected = sorted(range(num), key=lambda i: (-sum(logprobs[i]), i))[:num_best]
    delivered = best_of.best()
    assert by_place(delivered) == [[100 * i + p for p in range(len(logprobs[i]))] for i in expected]
    assert best_of.num_best_tokens == sum(len(logprobs[i]) for i in expected)
    assert all(bool(output.logprobs) == bool(seed % 2) for output in delivered)


def test_a_sequence_that_cannot_win_any_more_is_beaten_and_an_equal_one_is_not() -> None:
    best_of = BestOf(BestOfRule(1, has_logprobs=False))
    ended, equal, worse = outputs(2, [-1.0]), outputs(0, [-1.0, 0.0]), outputs(1, [-1.125, 0.0])
    assert not best_of.take(worse[0]), "nothing has ended yet"
    assert not best_of.take(ended[0])
    assert not best_of.take(equal[0])
    assert best_of.take(worse[1]) is False, "it has ended: nothing is left to end"
    assert best_of.take(outputs(3, [-1.125, 0.0])[0])
    assert not best_of.take(equal[1])
    assert by_place(best_of.best()) == [[0, 1]], "of equal ones the first"


def test_rounding_above_zero_lets_no_sequence_rise() -> None:
    best_of = BestOf(BestOfRule(1, has_logprobs=False))
    best_of.take(outputs(0, [1e-7])[0])
    best_of.take(outputs(1, [0.0])[0])
    assert by_place(best_of.best()) == [[0]]


def test_messages_are_merged_but_not_without_end() -> None:
    best_of = BestOf(BestOfRule(1, has_logprobs=False))
    for output in outputs(0, [0.0] * 1200):
        best_of.take(output)
    delivered = best_of.best()
    assert max(len(output.token_ids) for output in delivered) == MAX_MERGED_TOKENS
    assert delivered[-1].finish_reason is FinishReason.STOP
    assert [len(by_place(delivered)[0]), len(delivered)] == [1200, 3]


def test_what_may_be_held_back_is_bounded() -> None:
    BestOfRule(1, has_logprobs=False).check_size(2, MAX_BACKLOG // 2)
    BestOfRule(1, has_logprobs=True).check_size(2, MAX_BACKLOG // 50)
    for has_logprobs, num in ((False, MAX_BACKLOG // 2 + 1), (True, MAX_BACKLOG // 50 + 1)):
        with pytest.raises(StepwireError, match=f"max_tokens to at most {num - 1}") as caught:
            BestOfRule(1, has_logprobs=has_logprobs).check_size(2, num)
        assert (caught.value.reason, caught.value.metadata["field"]) == ("FIELD_OUT_OF_RANGE", "best_of")
