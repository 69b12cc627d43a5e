"""Stop strings in streamed text, wherever token boundaries fall."""

from collections.abc import Sequence


class StopStrings:
    """The stop strings of one request, prepared once for all its sequences. Never changes."""

    __slots__ = ("failures", "first_characters", "strings")

    def __init__(self, strings: Sequence[str]) -> None:
        self.strings = tuple(dict.fromkeys(strings))
        self.failures = tuple(_failure_table(string) for string in self.strings)
        self.first_characters = frozenset(string[0] for string in self.strings)


class StopFinder:
    """Looks for the stop strings of one sequence, character by character.

    Text that may be the start of a stop string is held back. What counts is the stop string that
    is complete first; of several complete at the same character, the longest.
    """

    __slots__ = ("_held", "_matched", "_min_tokens", "_stops")

    def __init__(self, stops: StopStrings, min_tokens: int) -> None:
        self._stops = stops
        self._min_tokens = min_tokens
        self._matched = [0] * len(stops.strings)
        self._held = ""

    def feed(self, text: str, num_tokens: int) -> tuple[str, str | None]:
        """Takes the text of one more token, the `num_tokens`-th; answers (text to deliver, stop string or None).

        A stop string that one of the first `min_tokens` tokens completes does not count. After a
        stop string was answered, nothing may be fed any more.
        """
        if not self._held and self._stops.first_characters.isdisjoint(text):
            return text, None
        offset = len(self._held)
        window = self._held + text
        counts = num_tokens > self._min_tokens
        for position, character in enumerate(text):
            found = self._advance(character)
            if found is not None and counts:
                end = offset + position + 1
                self._held = ""
                return window[: end - len(found)], found
        kept = max(self._matched)
        self._held = window[len(window) - kept :]
        return window[: len(window) - kept], None

    def flush(self) -> str:
        """The text held back, now that no more will come."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> str | None:
        """Moves every automaton by one character; the longest string complete with it, or None."""
        found: str | None = None
        matched = self._matched
        for i, string in enumerate(self._stops.strings):
            failure = self._stops.failures[i]
            state = matched[i]
            while state and string[state] != character:
                state = failure[state]
            if string[state] == character:
                state += 1
            if state == len(string):
                if found is None or len(string) > len(found):
                    found = string
                state = failure[state]
            matched[i] = state
        return found


def _failure_table(string: str) -> list[int]:
    """Knuth, Morris and Pratt: entry k is the length of the longest proper border of string[:k]."""
    table = [0] * (len(string) + 1)
    border = 0
    for k in range(1, len(string)):
        while border and string[k] != string[border]:
            border = table[border]
        if string[k] == string[border]:
            border += 1
        table[k + 1] = border
    return table
