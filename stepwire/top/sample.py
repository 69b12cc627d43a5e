"""Reads what a process tells Prometheus, and what changed between two readings."""

import math
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

_TIMEOUT_S = 2.0
_MAX_BYTES = 8 << 20

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """One reading of one process. `at` is monotonic, in seconds; `error` says why there is none."""

    url: str
    at: float
    values: Mapping[tuple[str, Labels], float] = field(default_factory=dict)
    error: str = ""

    def total(self, name: str, **labels: str) -> float:
        """The sum of a metric over all its series that have these labels; 0 where there is none."""
        wanted = labels.items()
        return sum(value for (metric, found), value in self.values.items() if metric == name and wanted <= set(found))

    def by(self, name: str, label: str) -> dict[str, float]:
        """A metric's sums by the values of a label."""
        sums: dict[str, float] = {}
        for (metric, found), value in self.values.items():
            if metric == name:
                key = dict(found).get(label, "")
                sums[key] = sums.get(key, 0.0) + value
        return sums


def read(url: str) -> Sample:
    """One reading; a process that does not answer gives one with an error."""
    now = time.monotonic()
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as response:
            text = response.read(_MAX_BYTES + 1)
        if len(text) > _MAX_BYTES:
            return Sample(url, now, error=f"answers more than {_MAX_BYTES} bytes")
        families = list(text_string_to_metric_families(text.decode()))
    except urllib.error.URLError as error:
        return Sample(url, now, error=str(error.reason))
    except (OSError, ValueError) as error:
        return Sample(url, now, error=f"does not answer as Prometheus expects: {error}")
    values = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }
    return Sample(url, now, values)


@dataclass(frozen=True, slots=True)
class Change:
    """Two readings of one process, one after the other."""

    before: Sample
    after: Sample

    def rate(self, name: str, **labels: str) -> float:
        """How much a counter grew a second; one that begins anew counts from 0."""
        seconds = self.after.at - self.before.at
        grown = self.after.total(name, **labels) - self.before.total(name, **labels)
        if grown < 0:
            grown = self.after.total(name, **labels)
        return grown / seconds if seconds > 0 else 0.0

    def mean(self, name: str, **labels: str) -> float | None:
        """The mean of a histogram's observations between the readings; None without any."""
        count = self._grown(f"{name}_count", labels)
        return self._grown(f"{name}_sum", labels) / count if count > 0 else None

    def quantile(self, name: str, q: float) -> float | None:
        """An upper bound of a histogram's quantile between the readings: a bucket's; None without observations."""
        grown = {
            float(bound): self._grown(f"{name}_bucket", {"le": bound})
            for bound in self.after.by(f"{name}_bucket", "le")
        }
        total = max(grown.values(), default=0.0)
        if total <= 0:
            return None
        return min(bound for bound, count in grown.items() if count >= q * total) if grown else math.inf

    def _grown(self, name: str, labels: Mapping[str, str]) -> float:
        return max(0.0, self.after.total(name, **labels) - self.before.total(name, **labels))


def changes(before: Iterable[Sample], after: Iterable[Sample]) -> list[Change]:
    """Readings in pairs; a process that has just come is compared with itself."""
    known = {sample.url: sample for sample in before if not sample.error}
    return [Change(known.get(sample.url, sample), sample) for sample in after]
