"""What comes out of a comparison: a bar for everything that was asked for, measured or not."""

import pytest

from benchmarks.peers.outcome import bars, figures, summary
from benchmarks.peers.rows import KEYS, OURS, ROWS, START_LIMITS, Measured, Options
from benchmarks.report import Bar

PEERS = ("vllm", "llamacpp", "hf")


def options(*keys: str, peers: tuple[str, ...] = PEERS, starts: bool = False) -> Options:
    return Options(tuple(row for row in ROWS if row.key in keys), peers, starts, quick=True, serve_flags=())


def test_a_full_run_has_every_bar_once() -> None:
    found = bars(options(*KEYS, starts=True), Measured())
    compared = [f"{row.key}_{peer}" for row in ROWS for peer in row.limits]
    assert sorted(found) == sorted([*compared, *(f"start_{peer}" for peer in START_LIMITS), "big_b1_bandwidth"])
    assert len(found) == 5 * 3 + 3 * 2 + 2 + 1
    assert not any(bar.ok for bar in found.values())
    assert {bar.value for bar in found.values()} == {None}


def test_floors_are_bars_and_goals_are_figures() -> None:
    measured = Measured(rates={"b8": {OURS: [50.0, 40.0, 60.0], "vllm": [40.0], "llamacpp": []}})
    run = options("b8", peers=("vllm", "llamacpp"))
    assert bars(run, measured) == {"b8_vllm": Bar(1.25, 1.25), "b8_llamacpp": Bar(None, 1.6)}
    assert figures(run, measured)["goals"] == {"b8_vllm": 1.5, "b8_llamacpp": 1.9}


def test_a_start_is_better_when_it_is_shorter() -> None:
    measured = Measured(starts={OURS: [5.0, 7.0, 6.0], "vllm": [72.0], "hf": [3.0]})
    assert bars(options(starts=True), measured) == {"start_vllm": Bar(12.0, 10.0), "start_hf": Bar(0.5, 0.5)}


@pytest.mark.parametrize("bandwidth", [None, 40e9])
def test_bandwidth_is_a_share_of_what_the_machine_has(bandwidth: float | None) -> None:
    measured = Measured(bandwidth=bandwidth, used_bandwidth=34e9)
    found = bars(options("big_b1", peers=()), measured)
    assert found == {"big_b1_bandwidth": Bar(None if bandwidth is None else 0.85, 0.8)}


def test_the_table_has_a_line_for_each_row() -> None:
    measured = Measured(rates={"b1": {OURS: [120.0], "hf": [40.0]}}, starts={OURS: [5.0], "hf": []})
    header, row, start, legend = summary(options("b1", peers=("hf",), starts=True), measured).splitlines()
    assert header.split() == ["row", OURS, "hf", "x", "hf", "floor/goal", "hf"]
    assert row.split() == ["b1", "120.0", "40.0", "3.00", "2.5/3"]
    assert start.split() == ["start", "5.0", "-", "-", "0.5/1"]
    assert "seconds" in legend
