import random

import pytest

from stepwire.simulation.series import Series


def test_points_are_means_over_time() -> None:
    series = Series(("a",), span_s=1.0)
    series.hold(0.5, (4.0,))
    series.hold(2.0, (8.0,))
    assert series.columns["a"] == [6.0, 8.0]
    assert series.times_s == [0.5, 1.5]


def test_the_number_of_points_is_bounded_and_the_mean_kept() -> None:
    rng = random.Random(1)
    series, now, total = Series(("a", "b")), 0.0, 0.0
    for _ in range(5000):
        span, value = rng.expovariate(1.0), rng.random()
        now += span
        total += span * value
        series.hold(now, (value, 1.0))
    assert 200 < len(series.columns["a"]) <= 512
    assert sum(series.columns["a"]) * series.span_s == pytest.approx(total)
    assert sum(series.columns["b"]) * series.span_s == pytest.approx(now)
