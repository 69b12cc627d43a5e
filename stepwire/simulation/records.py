"""What became of requests, and what that says of a service."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

PERCENTILES = (50, 90, 99)


@dataclass(slots=True)
class RequestRecord:
    """One request as its client saw it; times in seconds of one clock.

    `error` is the reason of its failure, None when it finished. `num_output_tokens` counts delivered
    tokens. `deadline_s` is how long its client was ready to wait.
    """

    arrival_s: float
    priority: int = 0
    deadline_s: float | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    started_s: float | None = None
    first_token_s: float | None = None
    end_s: float | None = None
    error: str | None = None

    @property
    def is_finished(self) -> bool:
        """Whether it got its whole answer."""
        return self.end_s is not None and self.error is None

    @property
    def ttft_s(self) -> float | None:
        """Time to its first token."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time from one token to the next; None with fewer than two tokens, or before the end."""
        if self.first_token_s is None or self.end_s is None or self.num_output_tokens < 2:
            return None
        return (self.end_s - self.first_token_s) / (self.num_output_tokens - 1)

    @property
    def latency_s(self) -> float | None:
        """Time from arrival to end."""
        return None if self.end_s is None else self.end_s - self.arrival_s

    @property
    def wait_s(self) -> float | None:
        """Time until its first step."""
        return None if self.started_s is None else self.started_s - self.arrival_s


@dataclass(frozen=True, slots=True)
class Slo:
    """What counts as good: bounds in seconds on time to first token and on time per output token, None for no bound.

    A request's own deadline always counts.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None

    def is_met(self, record: RequestRecord) -> bool:
        """Whether a request finished, and in time."""
        if not record.is_finished:
            return False
        pairs = (
            (record.ttft_s, self.ttft_s),
            (record.tpot_s, self.tpot_s),
            (record.latency_s, record.deadline_s),
        )
        return all(value is None or bound is None or value <= bound for value, bound in pairs)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Mean, percentiles and largest of some values; all 0 when there are none."""

    num: int
    mean: float
    percentiles: dict[int, float]
    largest: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> "Distribution":
        """The distribution of the values that are there."""
        known = sorted(value for value in values if value is not None)
        if not known:
            return cls(0, 0.0, dict.fromkeys(PERCENTILES, 0.0), 0.0)
        return cls(len(known), sum(known) / len(known), {p: percentile(known, p) for p in PERCENTILES}, known[-1])


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The value that `percent` of the ordered values do not exceed, between two of them by their distance."""
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one run. Rates are per second of `duration_s`; `goodput` counts requests that met the SLO."""

    duration_s: float
    num_requests: int
    num_finished: int
    num_good: int
    errors: dict[str, int]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    ttft_s: Distribution
    tpot_s: Distribution
    latency_s: Distribution
    wait_s: Distribution

    @property
    def requests_per_s(self) -> float:
        """Finished requests a second."""
        return self._rate(self.num_finished)

    @property
    def output_tokens_per_s(self) -> float:
        """Delivered tokens a second, those of requests that failed later included."""
        return self._rate(self.num_output_tokens)

    @property
    def goodput(self) -> float:
        """Requests a second that met the SLO."""
        return self._rate(self.num_good)

    def _rate(self, num: int) -> float:
        return num / self.duration_s if self.duration_s > 0 else 0.0

    def as_json(self) -> dict[str, object]:
        """Everything, for programs."""
        return {
            "duration_s": self.duration_s,
            "requests": self.num_requests,
            "finished": self.num_finished,
            "good": self.num_good,
            "errors": self.errors,
            "prompt_tokens": self.num_prompt_tokens,
            "cached_tokens": self.num_cached_tokens,
            "output_tokens": self.num_output_tokens,
            "requests_per_s": self.requests_per_s,
            "output_tokens_per_s": self.output_tokens_per_s,
            "goodput_per_s": self.goodput,
            **{
                name: {
                    "mean": distribution.mean,
                    **{f"p{p}": value for p, value in distribution.percentiles.items()},
                    "max": distribution.largest,
                }
                for name, distribution in self.distributions().items()
            },
        }

    def distributions(self) -> dict[str, Distribution]:
        """The distributions by name."""
        return {"ttft_s": self.ttft_s, "tpot_s": self.tpot_s, "latency_s": self.latency_s, "wait_s": self.wait_s}


def summarise(records: Sequence[RequestRecord], slo: Slo | None = None, duration_s: float | None = None) -> Summary:
    """The figures of some requests; by default over the time from the first arrival to the last end."""
    if duration_s is None:
        ends = [record.end_s for record in records if record.end_s is not None]
        duration_s = max(ends) - min(record.arrival_s for record in records) if ends else 0.0
    bound = slo or Slo()
    finished = [record for record in records if record.is_finished]
    return Summary(
        duration_s=duration_s,
        num_requests=len(records),
        num_finished=len(finished),
        num_good=sum(map(bound.is_met, finished)),
        errors=dict(Counter(record.error for record in records if record.error is not None).most_common()),
        num_prompt_tokens=sum(record.num_prompt_tokens for record in records),
        num_cached_tokens=sum(record.num_cached_tokens for record in records),
        num_output_tokens=sum(record.num_output_tokens for record in records),
        ttft_s=Distribution.of(record.ttft_s for record in records),
        tpot_s=Distribution.of(record.tpot_s for record in finished),
        latency_s=Distribution.of(record.latency_s for record in finished),
        wait_s=Distribution.of(record.wait_s for record in records),
    )
