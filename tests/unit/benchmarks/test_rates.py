"""Rates from made-up times, prompts, and the table."""

import pytest

from benchmarks.peers.rates import (
    Answer,
    decode_rate,
    first_difference,
    make_prompts,
    output_rate,
    prompt_rate,
    ratio,
    table,
)

# The first sequence has its tokens at 1, 2, 3 and 4 s, the second one half a second later.
STAGGERED = Answer([[1, 2, 3, 4]] * 2, [[1.0, 2.0, 3.0, 4.0], [1.5, 2.5, 3.5, 4.5]])


def test_output_counts_all_tokens_over_the_whole_time() -> None:
    assert output_rate(STAGGERED) == 8 / 4.5


def test_prompts_are_over_when_the_last_first_token_is_there() -> None:
    assert prompt_rate(STAGGERED, 300) == 600 / 1.5


def test_decoding_counts_only_while_all_sequences_run() -> None:
    # Between 1.5 and 4 s: three tokens of the first, two of the second.
    assert decode_rate(STAGGERED) == 5 / 2.5


def test_a_batch_that_never_decodes_together_has_no_decode_rate() -> None:
    with pytest.raises(ValueError, match="more tokens"):
        decode_rate(Answer([[1, 2], [1, 2]], [[0.1, 0.2], [0.3, 0.4]]))


def test_the_ratio_is_that_of_the_medians() -> None:
    assert ratio([1.0, 6.0, 100.0], [2.0, 3.0, 4.0]) == 2.0
    assert ratio([1.0], []) is None
    assert ratio([], [1.0]) is None


def test_prompts_are_repeatable_and_begin_differently() -> None:
    prompts = [*make_prompts("b8 0", 8, 16, 1000), *make_prompts("b8 1", 8, 16, 1000)]
    assert prompts[:8] == make_prompts("b8 0", 8, 16, 1000)
    assert len({tuple(prompt[:4]) for prompt in prompts}) == 16
    assert all(len(prompt) == 16 and 0 <= min(prompt) <= max(prompt) < 1000 for prompt in prompts)


@pytest.mark.parametrize(("tokens", "num"), [([1, 2, 3], 3), ([1, 9, 3], 1), ([1, 2], 2), ([], 0)])
def test_the_first_difference(tokens: list[int], num: int) -> None:
    assert first_difference([1, 2, 3], tokens) == num


def test_the_table_aligns_and_marks_what_is_missing() -> None:
    rows = [{"row": "b1", "vllm": "12.5"}, {"row": "prefill", "x": 3}]
    assert table(["row", "vllm", "x"], rows).splitlines() == [
        "row      vllm  x",
        "b1       12.5  -",
        "prefill     -  3",
    ]
