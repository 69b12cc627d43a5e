"""What arrives when: traces of real services, and random arrivals."""

import csv
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request as the world sends it: how long its prompt is, and how long its answer will be, which nobody knows yet.

    `time_s` counts from the start. The first `num_prefix_tokens` of its prompt are those of shared prefix
    number `prefix`. `deadline_s` is the patience of its client, from its arrival on; None for no end of it.
    """

    time_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    priority: int = 0
    tenant: str = ""
    deadline_s: float | None = None
    prefix: int = 0
    num_prefix_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of lengths in tokens, at least 1 each. `text` is how it was given."""

    text: str
    draw: Callable[[random.Random], int]


def parse_lengths(text: str) -> Lengths:
    """`N` or `fixed:N`, `uniform:LOW:HIGH` (both included), `lognormal:MEDIAN:SIGMA[:MAX]`.

    Raises ValueError saying what is wrong.
    """
    kind, _, rest = text.partition(":")
    if not rest and kind.isdecimal():
        kind, rest = "fixed", kind
    try:
        numbers = [float(part) for part in rest.split(":")] if rest else []
        return Lengths(text, _drawer(kind, numbers))
    except ValueError as error:
        raise ValueError(
            f"{text!r} is no distribution of lengths ({error}): give N, fixed:N, uniform:LOW:HIGH or "
            "lognormal:MEDIAN:SIGMA[:MAX]"
        ) from error


def _drawer(kind: str, numbers: Sequence[float]) -> Callable[[random.Random], int]:
    if any(not 0 <= number <= 2**24 for number in numbers):
        raise ValueError(f"a number lies outside 0 to {2**24}")
    if kind == "fixed" and len(numbers) == 1 and numbers[0] >= 1:
        return lambda _rng: int(numbers[0])
    if kind == "uniform" and len(numbers) == 2 and 1 <= numbers[0] <= numbers[1]:
        return lambda rng: rng.randint(int(numbers[0]), int(numbers[1]))
    if kind == "lognormal" and len(numbers) in (2, 3) and numbers[0] >= 1:
        median, sigma, most = numbers[0], numbers[1], numbers[2] if len(numbers) == 3 else 2**24
        return lambda rng: max(1, int(min(most, median * rng.lognormvariate(0.0, sigma))))
    raise ValueError("its numbers are too few, too many or out of order" if kind in _KINDS else "unknown kind")


_KINDS = ("fixed", "uniform", "lognormal")


def read_trace(path: Path, *, max_requests: int | None = None) -> list[Arrival]:
    """The arrivals of a trace file: CSV with the columns TIMESTAMP, ContextTokens and GeneratedTokens.

    That is the form of the Azure LLM inference traces. A timestamp is a date and time, or seconds; the first
    arrival is at 0, and arrivals are in order of time. Raises ValueError naming file, line and what is wrong.
    """
    arrivals: list[Arrival] = []
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if reader.fieldnames is None or not set(_COLUMNS) <= set(reader.fieldnames):
            raise ValueError(f"{path} lacks the columns {', '.join(_COLUMNS)}: it has {reader.fieldnames or 'none'}")
        for row in reader:
            if max_requests is not None and len(arrivals) >= max_requests:
                break
            try:
                time_s, prompt, output = _seconds(row[_COLUMNS[0]]), int(row[_COLUMNS[1]]), int(row[_COLUMNS[2]])
            except (ValueError, TypeError) as error:
                raise ValueError(f"{path}, line {reader.line_num}: {error}") from error
            if prompt < 0 or output < 0:
                raise ValueError(f"{path}, line {reader.line_num}: a number of tokens is negative")
            # Some services count neither an empty prompt nor an empty answer; ours needs a token of each.
            arrivals.append(Arrival(time_s, max(1, prompt), max(1, output)))
    if not arrivals:
        raise ValueError(f"{path} holds no arrivals")
    arrivals.sort(key=lambda arrival: arrival.time_s)
    begin = arrivals[0].time_s
    return [replace(arrival, time_s=arrival.time_s - begin) for arrival in arrivals]


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        # Seven digits of a second are one too many for datetime.
        whole, _, fraction = text.strip().partition(".")
        instant = datetime.fromisoformat(whole)
        return (instant - datetime(1970, 1, 1)).total_seconds() + float(f"0.{fraction or 0}")


def poisson_arrivals(rate: float, prompt: Lengths, output: Lengths, rng: random.Random) -> Iterator[Arrival]:
    """Arrivals without end, `rate` a second on average, each independent of all others. Raises ValueError."""
    if not rate > 0:
        raise ValueError(f"rate must be above 0, not {rate}")
    now = 0.0
    while True:
        now += rng.expovariate(rate)
        yield Arrival(now, prompt.draw(rng), output.draw(rng))


def speed_up(arrivals: Iterable[Arrival], factor: float) -> list[Arrival]:
    """The same arrivals, `factor` times as dense. Raises ValueError."""
    if not factor > 0:
        raise ValueError(f"the factor of a speed-up must be above 0, not {factor}")
    return [replace(arrival, time_s=arrival.time_s / factor) for arrival in arrivals]


@dataclass(frozen=True, slots=True)
class Mix:
    """What some of the arrivals have: a higher priority, a shared prefix; and what all have: a deadline.

    `num_prefix_tokens` are put before the prompt of a `prefix_share` of requests, one of `num_prefixes` equally
    likely prefixes. Raises ValueError for a share outside 0 to 1, or prefixes without length or number.
    """

    high_share: float = 0.0
    high_priority: int = 1
    deadline_s: float | None = None
    prefix_share: float = 0.0
    num_prefixes: int = 1
    num_prefix_tokens: int = 0

    def __post_init__(self) -> None:
        for name in ("high_share", "prefix_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must lie between 0 and 1, not {getattr(self, name)}")
        if self.prefix_share and (self.num_prefixes < 1 or self.num_prefix_tokens < 1):
            raise ValueError("shared prefixes need a number and a length of at least 1")

    def apply(self, arrivals: Iterable[Arrival], rng: random.Random) -> Iterator[Arrival]:
        """The arrivals with what the mix gives them."""
        for arrival in arrivals:
            is_high, is_shared = rng.random() < self.high_share, rng.random() < self.prefix_share
            num_prefix = self.num_prefix_tokens if is_shared else 0
            yield replace(
                arrival,
                priority=self.high_priority if is_high else arrival.priority,
                deadline_s=arrival.deadline_s if self.deadline_s is None else self.deadline_s,
                prefix=rng.randrange(self.num_prefixes) if is_shared else 0,
                num_prefix_tokens=num_prefix,
                num_prompt_tokens=arrival.num_prompt_tokens + num_prefix,
            )
