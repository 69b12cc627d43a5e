"""The offset of a worker's clock, against exchanges whose truth is known."""

import random

from scheduler_service.engine.clock_offset import ClockOffset
from scheduler_service.engine.ports import StepTimings

START_NS = 1_800_000_000_000_000_000


def exchange(clock: ClockOffset, at_ns: int, ahead_ns: int, there_ns: int, back_ns: int) -> None:
    """A step sent at `at_ns`, by a clock that the worker's is ahead of."""
    wait_ns, busy_ns, held_ns = 5_000, 800_000, 40_000
    arrived = at_ns + there_ns + ahead_ns
    answered = arrived + wait_ns + busy_ns + held_ns
    timings = StepTimings(arrived + wait_ns, wait_ns, 100_000, 600_000, 100_000, answered)
    clock.note(at_ns, timings, answered - ahead_ns + back_ns)


def test_nothing_is_known_before_the_first_step() -> None:
    clock = ClockOffset()
    assert (clock.is_known, clock.offset_s, clock.error_s) == (False, 0.0, 0.0)


def test_the_truth_lies_within_the_error_whatever_the_delays() -> None:
    rng = random.Random(1)
    for ahead_ns in (-3_000_000_000, -1, 0, 250_000, 86_400_000_000_000):
        clock = ClockOffset()
        for step in range(200):
            exchange(
                clock, START_NS + step * 1_000_000, ahead_ns, rng.randrange(50_000, 9_000_000), rng.randrange(70_000)
            )
            assert abs(clock.offset_s - ahead_ns / 1e9) <= clock.error_s + 1e-9
        assert clock.error_s < 0.001


def test_an_old_estimate_is_forgotten() -> None:
    clock = ClockOffset()
    exchange(clock, START_NS, 0, 1_000, 1_000)
    later = START_NS + 61_000_000_000
    exchange(clock, later, 5_000_000, 300_000, 300_000)
    assert abs(clock.offset_s) < 1e-6, "the better one counts for another window"
    exchange(clock, later + 61_000_000_000, 5_000_000, 300_000, 300_000)
    exchange(clock, later + 122_000_000_000, 5_000_000, 300_000, 300_000)
    assert abs(clock.offset_s - 0.005) < 1e-6


def test_a_worker_that_does_not_tell_when_it_answered_is_taken_to_have_done_so_at_once() -> None:
    clock = ClockOffset()
    clock.note(START_NS, StepTimings(START_NS + 10_000, 0, 0, 1_000_000, 0), START_NS + 1_020_000)
    assert (clock.is_known, clock.offset_s) == (True, 0.0)


def test_an_impossible_exchange_is_no_estimate() -> None:
    clock = ClockOffset()
    clock.note(START_NS, StepTimings(START_NS, 0, 0, 5_000_000, 0), START_NS + 1_000)
    assert not clock.is_known
