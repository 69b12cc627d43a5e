"""The search for the best setting, against storages made up for it."""

from collections.abc import Callable

import pytest

from loader.reading.tuning import MAX_THREADS, Setting, Storage, Tuner, most_buffer_bytes, storage_of

GB = 1e9
Rate = Callable[[Setting], float]


def settle(tuner: Tuner, rate: Rate, now: float = 0.0) -> list[Setting]:
    """Reads by whatever setting the tuner has, each read as long as the storage takes; the settings it tried."""
    tried = [tuner.setting]
    for _ in range(10_000):
        if tuner.is_settled:
            break
        setting = tuner.setting
        num_bytes = setting.read_bytes
        starts = [now] * setting.threads
        for start in starts:
            tuner.begin(start)
        now += num_bytes * setting.threads / rate(setting)
        for _ in starts:
            tuner.end(num_bytes, now)
        if tuner.setting != tried[-1]:
            tried.append(tuner.setting)
    return tried


@pytest.mark.parametrize(
    ("rate", "best"),
    [
        (lambda setting: 2 * GB, Setting("direct", 2)),
        (lambda setting: GB * min(setting.threads, 8), Setting("direct", 8)),
        (lambda setting: GB * setting.threads, Setting("direct", MAX_THREADS)),
        (lambda setting: GB * (4 if setting.method == "buffered" else 2), Setting("buffered", 2)),
        (lambda setting: GB * (2.1 if setting.method == "buffered" else 2), Setting("direct", 2)),
        (lambda setting: GB / setting.threads, Setting("direct", 2)),
    ],
)
def test_the_fastest_setting_is_found_and_ties_go_to_the_cheaper(rate: Rate, best: Setting) -> None:
    tuner = Tuner(("direct", "buffered"), 2)
    settle(tuner, rate)
    assert tuner.is_settled
    assert tuner.setting == best


def test_what_was_a_mood_of_the_storage_is_not_taken_for_a_gain() -> None:
    """It becomes faster while four threads are tried, and stays so."""
    seen: list[Setting] = []

    def rate(setting: Setting) -> float:
        seen.append(setting)
        return 3 * GB if Setting("direct", 4) in seen else 2 * GB

    tuner = Tuner(("direct",), 2)
    assert settle(tuner, rate) == [Setting("direct", number) for number in (2, 4, 2)]
    assert tuner.setting == Setting("direct", 2)


def test_time_in_which_nothing_is_read_does_not_count() -> None:
    """With pauses as long as the reads, but for those on two threads, four would look no better."""
    tuner = Tuner(("direct",), 2)
    now = 0.0
    for _ in range(10_000):
        setting = tuner.setting
        for _ in range(setting.threads):
            tuner.begin(now)
        now += setting.read_bytes / GB
        for _ in range(setting.threads):
            tuner.end(setting.read_bytes, now)
        now += 0.0 if setting.threads == 2 else 10.0
    assert tuner.setting == Setting("direct", MAX_THREADS)


def test_reads_that_began_under_another_setting_do_not_count() -> None:
    """One that hung while two threads were tried does not make four look slow."""
    tuner = Tuner(("direct",), 2)
    now = 0.0
    tuner.begin(now)
    while tuner.setting.threads == 2:
        tuner.begin(now)
        now += 0.01
        tuner.end(16 << 20, now)
    now += 100.0
    tuner.end(16 << 20, now)
    settle(tuner, lambda setting: GB * setting.threads, now)
    assert tuner.setting == Setting("direct", MAX_THREADS)


def test_a_method_that_the_storage_refuses_is_not_tried_again() -> None:
    tuner = Tuner(("direct", "buffered"), 2)
    tuner.exclude("direct")
    assert {setting.method for setting in settle(tuner, lambda setting: GB * setting.threads)} == {"buffered"}
    assert tuner.setting == Setting("buffered", MAX_THREADS)


def test_what_is_in_flight_at_once_stays_bounded() -> None:
    for number in range(1, MAX_THREADS + 1):
        setting = Setting("direct", number)
        assert setting.threads * setting.read_bytes <= 32 << 20
        assert setting.read_bytes % 4096 == 0
    assert most_buffer_bytes() <= 96 << 20


def test_a_device_is_remembered() -> None:
    assert storage_of(-7) is storage_of(-7)
    assert storage_of(-7) is not storage_of(-8)
    assert Storage().disk.setting.method == "direct"
