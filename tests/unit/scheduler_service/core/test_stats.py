"""Counters, and the rates that retry hints and hopeless deadlines rest on."""

import pytest

from scheduler_service.core.stats import SchedulerStats


def steps(stats: SchedulerStats, num: int, num_tokens: int, duration_s: float, *, is_full: bool = False) -> None:
    for _ in range(num):
        stats.count_step(num_tokens, duration_s, is_full=is_full)


def test_before_anything_is_measured_a_second_is_the_guess() -> None:
    stats = SchedulerStats()
    assert stats.tokens_per_s == 0
    assert stats.seconds_for(10**6) == 1.0
    assert stats.least_seconds_to_first_token(10**6) == 0


def test_the_rate_is_tokens_by_the_time_that_steps_took() -> None:
    stats = SchedulerStats()
    steps(stats, 2, 50, 0.5)
    assert stats.tokens_per_s == pytest.approx(100)
    assert stats.seconds_for(250) == pytest.approx(2.5)
    assert (stats.num_steps, stats.num_step_tokens) == (2, 100)


def test_two_answers_at_once_do_not_look_like_speed() -> None:
    stats = SchedulerStats()
    for _ in range(50):
        steps(stats, 1, 10, 2.0, is_full=True)
        steps(stats, 1, 10, 0.0, is_full=True)
    assert stats.tokens_per_s == pytest.approx(10, rel=0.1)
    assert stats.best_tokens_per_s == pytest.approx(10, rel=0.1)
    assert stats.best_step_s == pytest.approx(1, rel=0.1)


def test_the_rate_follows_a_change() -> None:
    stats = SchedulerStats()
    steps(stats, 100, 10, 1.0)
    steps(stats, 10, 100, 1.0)
    assert 60 < stats.tokens_per_s < 90


def test_a_step_without_tokens_says_nothing_of_speed() -> None:
    stats = SchedulerStats()
    steps(stats, 5, 0, 3.0)
    assert (stats.num_steps, stats.tokens_per_s, stats.best_step_s) == (5, 0, 0)
    steps(stats, 1, 10, 1.0)
    steps(stats, 5, 0, 3.0)
    assert stats.tokens_per_s == pytest.approx(10)


def test_a_clock_that_stands_still_gives_no_rate() -> None:
    stats = SchedulerStats()
    steps(stats, 1, 10, 0.0, is_full=True)
    assert stats.seconds_for(100) == 1.0
    assert stats.least_seconds_to_first_token(100) == 0


def test_a_hint_is_never_zero() -> None:
    stats = SchedulerStats()
    steps(stats, 1, 10**6, 1.0)
    assert stats.seconds_for(0) == pytest.approx(0.1)


def test_the_first_token_takes_at_least_its_prefill_and_one_step() -> None:
    stats = SchedulerStats()
    steps(stats, 1, 400, 0.5, is_full=True)
    assert stats.least_seconds_to_first_token(1600) == pytest.approx(2.0 + 0.5)


def test_the_best_is_remembered() -> None:
    stats = SchedulerStats()
    steps(stats, 1, 400, 0.5, is_full=True)
    steps(stats, 50, 400, 4.0, is_full=True)
    assert stats.tokens_per_s == pytest.approx(100, rel=0.1)
    assert (stats.best_tokens_per_s, stats.best_step_s) == (pytest.approx(800), pytest.approx(0.5))


def test_small_steps_do_not_say_how_slow_a_long_prompt_would_be() -> None:
    stats = SchedulerStats()
    steps(stats, 20, 1, 0.02)
    assert stats.tokens_per_s == pytest.approx(50)
    assert stats.least_seconds_to_first_token(4000) == pytest.approx(0.02)


def test_prefix_counts_add_up() -> None:
    stats = SchedulerStats()
    stats.count_prefix(100, 32)
    stats.count_prefix(50, 0)
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (150, 32)
