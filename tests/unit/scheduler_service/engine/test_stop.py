"""Stop strings: whatever the token boundaries, the text is that of a search over the whole."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_service.engine.stop import StopFinder, StopStrings


def reference(parts: list[str], stops: list[str], min_tokens: int) -> tuple[str, str | None]:
    """All the text before the stop string that is complete first, and that string, by trying every end."""
    text = "".join(parts)
    ignored = len("".join(parts[:min_tokens]))
    for end in range(ignored + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def streamed(parts: list[str], stops: list[str], min_tokens: int) -> tuple[str, str | None, list[str]]:
    finder = StopFinder(StopStrings(stops), min_tokens)
    delivered: list[str] = []
    for number, part in enumerate(parts, 1):
        text, found = finder.feed(part, number)
        delivered.append(text)
        if found is not None:
            return "".join(delivered), found, delivered
    return "".join(delivered) + finder.flush(), None, delivered


TEXT = st.text(alphabet="ab", max_size=4)


@given(
    st.lists(TEXT, max_size=12),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_a_stream_is_cut_where_the_whole_text_is(parts: list[str], stops: list[str]) -> None:
    text, found, _ = streamed(parts, stops, 0)
    assert (text, found) == reference(parts, stops, 0)


@given(
    st.lists(TEXT, max_size=12),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=3),
    st.integers(0, 8),
)
def test_stop_strings_of_the_first_tokens_do_not_count(parts: list[str], stops: list[str], min_tokens: int) -> None:
    text, found, _ = streamed(parts, stops, min_tokens)
    expected = reference(parts, stops, min_tokens)
    assert found == expected[1]
    # A stop string may begin in text that was delivered while none counted; that text stays delivered.
    assert expected[0].startswith(text) or text.startswith(expected[0])
    if min_tokens == 0 or found is None:
        assert text == expected[0]


@given(st.lists(TEXT, max_size=12), st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=3))
def test_no_more_is_held_back_than_may_be_the_start_of_a_stop_string(parts: list[str], stops: list[str]) -> None:
    finder = StopFinder(StopStrings(stops), 0)
    seen = given_out = ""
    for number, part in enumerate(parts, 1):
        seen += part
        text, found = finder.feed(part, number)
        if found is not None:
            return
        given_out += text
        held = seen[len(given_out) :]
        assert not held or any(stop.startswith(held) for stop in stops)
        longest = max((n for stop in stops for n in range(len(stop)) if seen.endswith(stop[:n])), default=0)
        assert len(held) == longest


def test_the_longest_of_several_complete_at_once_counts() -> None:
    assert streamed(["xx", "end"], ["d", "xend", "nd"], 0)[:2] == ("x", "xend")


@pytest.mark.parametrize("stops", [["a" * 1024] * 16, ["a" * (1000 + i) + "b" for i in range(16)]])
def test_hostile_stop_strings_cost_little(stops: list[str]) -> None:
    finder = StopFinder(StopStrings(stops), 10_000)
    began = time.perf_counter()
    for number in range(1, 2001):
        finder.feed("aaaa", number)
    assert time.perf_counter() - began < 2.0
