"""Figures over time, in a bounded number of points."""

from dataclasses import dataclass, field

_MAX_POINTS = 512


@dataclass(slots=True)
class Series:
    """Means of several figures over equal spans of time, which double when they become too many.

    `columns[name][i]` is the mean of that figure over span i, weighted by time.
    """

    names: tuple[str, ...]
    span_s: float = 1 / 64
    columns: dict[str, list[float]] = field(default_factory=dict)
    _now: float = 0.0

    def __post_init__(self) -> None:
        self.columns = {name: [] for name in self.names}

    @property
    def times_s(self) -> list[float]:
        """The middle of each span."""
        return [(i + 0.5) * self.span_s for i in range(len(self.columns[self.names[0]]))]

    def hold(self, until_s: float, values: tuple[float, ...]) -> None:
        """Says that each figure had this value from the last call's time on until `until_s`."""
        while until_s >= self.span_s * _MAX_POINTS:
            self._double()
        while self._now < until_s:
            place = int(self._now / self.span_s)
            if (place + 1) * self.span_s <= self._now:  # rounding put the border of two spans into the earlier one
                place += 1
            end = min(until_s, (place + 1) * self.span_s)
            share = (end - self._now) / self.span_s
            for name, value in zip(self.names, values, strict=True):
                column = self.columns[name]
                column.extend([0.0] * (place + 1 - len(column)))
                column[place] += value * share
            self._now = end

    def _double(self) -> None:
        self.span_s *= 2
        for name, column in self.columns.items():
            column.extend([0.0] * (len(column) % 2))
            self.columns[name] = [(column[i] + column[i + 1]) / 2 for i in range(0, len(column), 2)]
