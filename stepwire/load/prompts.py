"""Prompts of exact lengths, as token ids."""

import random

from stepwire.simulation.arrivals import Arrival


class PromptMaker:
    """Makes prompts of random token ids; those with the same shared prefix begin alike, and no two go on alike.

    Ids below `first_id` are left out: most tokenizers
    keep their special tokens there.
    """

    def __init__(self, vocab_size: int, seed: int, *, first_id: int = 256) -> None:
        self._first = first_id if vocab_size > 2 * first_id else 0
        self._last = vocab_size - 1
        self._seed = seed
        self._prefixes: dict[tuple[int, int], list[int]] = {}

    def make(self, index: int, arrival: Arrival) -> list[int]:
        """The prompt of request number `index`: the same at every run with the same seed."""
        num_own = arrival.num_prompt_tokens - arrival.num_prefix_tokens
        return self._prefix(arrival) + self._draw(f"{self._seed} request {index}", num_own)

    def _prefix(self, arrival: Arrival) -> list[int]:
        if not arrival.num_prefix_tokens:
            return []
        key = (arrival.prefix, arrival.num_prefix_tokens)
        if key not in self._prefixes:
            self._prefixes[key] = self._draw(f"{self._seed} prefix {arrival.prefix}", arrival.num_prefix_tokens)
        return self._prefixes[key]

    def _draw(self, seed: str, num: int) -> list[int]:
        return random.Random(seed).choices(range(self._first, self._last + 1), k=num)
