"""The statistics of trace_cost."""

import math
import random
import time
from statistics import mean, median

from benchmarks.trace_cost import lower_bound, median_bounds


def test_the_bound_lies_below_the_mean_and_comes_closer_with_more_pairs() -> None:
    rng = random.Random(0)
    ratios = [rng.gauss(0.99, 0.02) for _ in range(24)]
    assert lower_bound(ratios[:6]) < lower_bound(ratios) < mean(ratios)
    assert lower_bound([0.98] * 20) == 0.98
    assert lower_bound([1.0]) == 0.0


def test_the_truth_is_below_the_bound_in_about_one_of_twenty() -> None:
    rng = random.Random(1)
    misses = sum(lower_bound([rng.gauss(0.98, 0.03) for _ in range(20)]) > 0.98 for _ in range(1000))
    assert 25 <= misses <= 75


def test_the_median_is_above_its_bound_in_less_than_one_of_twenty() -> None:
    rng = random.Random(1)
    # What disturbs a round only ever adds to it.
    misses = sum(
        median_bounds([1.0 + rng.expovariate(1.0) for _ in range(40)])[1] < 1.0 + math.log(2) for _ in range(1000)
    )
    assert 10 <= misses <= 55
    assert median_bounds([2.0, 1.0]) == (1.0, 2.0)
    values = [rng.random() for _ in range(400)]
    least, most = median_bounds(values)
    assert median(values) - 0.1 < least < median(values) < most < median(values) + 0.1


def test_the_clock_of_another_process_is_its_processor_time() -> None:
    import os

    mine = time.clock_gettime((~os.getpid() << 3) | 2)
    assert 0 <= time.process_time() - mine < 0.5
