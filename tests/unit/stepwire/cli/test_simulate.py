import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from stepwire.cli.main import run
from tests.support.tiny_checkpoint import make_tiny_llama

BASE = ("simulate", "--model", "llama-3.2-1b", "--hardware", "l4")


def figures(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert run([*BASE, "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_random_load_is_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    answer = figures(capsys, "--rate", "5", "--requests", "40", "--output-tokens", "20")
    assert (answer["requests"], answer["finished"], answer["output_tokens"]) == (40, 40, 800)
    assert 0 < answer["ttft_s"]["p50"] < answer["latency_s"]["p50"] < 5
    assert 0 < answer["simulation"]["blocks_peak"] < answer["simulation"]["blocks"]


def test_a_trace_is_played_at_the_speed_asked_for(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n0,100,5\n10,100,5\n20,100,5\n")
    slow = figures(capsys, "--trace", str(trace))
    fast = figures(capsys, "--trace", str(trace), "--speed", "10", "--requests", "2")
    assert slow["requests"] == 3
    assert slow["duration_s"] == pytest.approx(20.0, abs=0.5)
    assert (fast["requests"], fast["duration_s"]) == (2, pytest.approx(1.0, abs=0.5))


def test_hardware_can_be_changed(capsys: pytest.CaptureFixture[str]) -> None:
    few = ("--rate", "5", "--requests", "5")
    plain = figures(capsys, *few)
    slow = figures(capsys, *few, "--latency", "0.5", "--memory-bytes", "6000000000")
    assert slow["tpot_s"]["mean"] > plain["tpot_s"]["mean"] + 0.4
    assert slow["simulation"]["blocks"] < plain["simulation"]["blocks"]


def test_the_report_is_readable_and_the_plot_is_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plot = tmp_path / "plot.svg"
    model = make_tiny_llama(tmp_path / "tiny")
    arguments = ("--rate", "50", "--requests", "20", "--deadline", "9", "--plot", str(plot))
    assert run(["simulate", "--model", str(model), "--hardware", "cpu", *arguments]) == 0
    text = capsys.readouterr().out
    for words in ("tiny on cpu: 20 requests", "time to first token", "p99", "preemptions", "within the SLO"):
        assert words in text
    assert len(ElementTree.parse(plot).getroot().findall(".//{http://www.w3.org/2000/svg}polyline")) == 6


def test_goodput_is_shown_where_something_says_what_is_good(capsys: pytest.CaptureFixture[str]) -> None:
    few = ("--rate", "5", "--requests", "5")
    assert run([*BASE, *few]) == 0
    assert "SLO" not in capsys.readouterr().out
    assert run([*BASE, *few, "--slo-ttft", "1"]) == 0
    assert "within the SLO" in capsys.readouterr().out


def test_what_clients_ask_for_changes_nothing_but_what_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    answer = figures(capsys, "--rate", "20", "--requests", "20", "--output-tokens", "7", "--max-tokens", "500")
    assert answer["output_tokens"] == 140


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        ((), 2, "--rate or --trace"),
        (("--rate", "1", "--prompt-tokens", "many"), 2, "uniform:LOW:HIGH"),
        (("--rate", "0"), 2, "--rate"),
        (("--rate", "1", "--max-num-batched-tokens", "8"), 2, "max_step_tokens"),
        (("--rate", "1", "--memory-bytes", "1000"), 1, "--memory-bytes"),
        (("--rate", "1", "--hardware", "abacus"), 2, "h100"),
        (("--rate", "1", "--model", "llama-3.1"), 2, "llama-3.1-8b"),
    ],
)
def test_wrong_use_says_what_is_right(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], status: int, words: str
) -> None:
    assert run([*BASE, *arguments]) == status
    assert words in capsys.readouterr().err


def test_a_broken_trace_and_a_missing_model_are_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("a\n1\n")
    assert run([*BASE, "--trace", str(trace)]) == 2
    assert "TIMESTAMP" in capsys.readouterr().err
    assert run(["simulate", "--model", str(tmp_path / "none"), "--rate", "1"]) == 1
    assert "does not exist" in capsys.readouterr().err
