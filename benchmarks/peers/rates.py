"""Rates and ratios from the times of tokens. Standard library only."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine made of a batch of prompts: for each its tokens, and the seconds at which each token was there."""

    tokens: Sequence[Sequence[int]]
    times: Sequence[Sequence[float]]


def output_rate(answer: Answer) -> float:
    """Output tokens a second over the whole time, that of the prompts included."""
    return sum(map(len, answer.times)) / max(times[-1] for times in answer.times)


def prompt_rate(answer: Answer, prompt_len: int) -> float:
    """Prompt tokens a second until every sequence has its first token."""
    return len(answer.times) * prompt_len / max(times[0] for times in answer.times)


def decode_rate(answer: Answer) -> float:
    """Output tokens a second while every sequence decodes: after the last one's first token, until the first one's end.

    Raises ValueError when there is no such time.
    """
    begin = max(times[0] for times in answer.times)
    end = min(times[-1] for times in answer.times)
    if end <= begin:
        raise ValueError("the first sequence ended before the last one had begun: ask for more tokens")
    num = sum(begin < time <= end for times in answer.times for time in times)
    return num / (end - begin)


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    """Median over median; None when one of them was not measured."""
    return median(ours) / median(theirs) if ours and theirs else None


def make_prompts(seed: str, num: int, length: int, vocab_size: int) -> list[list[int]]:
    """Random token ids; no two calls with different seeds begin alike."""
    draws = random.Random(seed)
    return [[draws.randrange(vocab_size) for _ in range(length)] for _ in range(num)]


def first_difference(tokens: Sequence[int], others: Sequence[int]) -> int:
    """How many tokens two sequences have in common before they part."""
    for place, (mine, theirs) in enumerate(zip(tokens, others, strict=False)):
        if mine != theirs:
            return place
    return min(len(tokens), len(others))


def table(header: Sequence[str], rows: Sequence[Mapping[str, object]]) -> str:
    """Columns of text, the first to the left and the others to the right; a missing cell is a dash."""
    lines = [list(header), *([str(row.get(name, "-")) for name in header] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
