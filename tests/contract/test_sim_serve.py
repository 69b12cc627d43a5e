"""`stepwire serve --device sim`: the whole stack without a model, and a load on it."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepwire.cli.main import run
from stepwire.client import Client, FinishReason, Started
from stepwire.client.types import Output
from tests.support.processes import serving
from tests.support.tiny_checkpoint import make_tiny_llama


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("sim")
    model = make_tiny_llama(folder / "model")
    with serving(model, folder, "--device", "sim", "--sim-latency-s", "0.002") as stack:
        yield stack.target


def test_answers_have_text_and_repeat(target: str) -> None:
    with Client(target) as client:
        one = client.complete("Hello", max_tokens=30, seed=4)
        two = client.complete("Hello", max_tokens=30, seed=4)
        other = client.complete("Hello", max_tokens=30, seed=5)
    assert len(one.token_ids) == 30
    assert one.text
    assert one.token_ids == two.token_ids != other.token_ids


def test_answers_have_the_form_that_is_asked_for(target: str) -> None:
    schema = {"type": "object", "properties": {"size": {"type": "integer"}, "kind": {"enum": ["a", "b"]}}}
    text = json.dumps({**schema, "required": ["size", "kind"], "additionalProperties": False})
    with Client(target) as client:
        answers = [client.complete("Hello", max_tokens=100, seed=seed, json_schema=text) for seed in range(4)]
        again = client.complete("Hello", max_tokens=100, seed=3, json_schema=text)
    assert again.token_ids == answers[3].token_ids
    for answer in answers:
        assert answer.sequences[0].finish_reason is FinishReason.STOP
        value = json.loads(answer.text)
        assert value.keys() == {"size", "kind"} and isinstance(value["size"], int) and value["kind"] in "ab"


def test_a_dropped_stream_frees_its_blocks(target: str) -> None:
    with Client(target) as client:
        before = client.get_model().num_free_blocks
        with client.generate("Hello", max_tokens=400, ignore_eos=True) as stream:
            events = [next(stream), next(stream)]
        assert isinstance(events[0], Started)
        assert isinstance(events[1], Output)
        client.complete("again", max_tokens=1)
        model = client.get_model()
    assert (model.num_running, model.num_free_blocks) == (0, before)


@pytest.mark.parametrize("load", [("--rate", "100"), ("--concurrency", "4")])
def test_bench_measures_it(target: str, load: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--requests", "30", "--prompt-tokens", "20", "--output-tokens", "10", "--json", "--slo-ttft", "5")
    assert run(["bench", "--target", target, *load, *arguments]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["requests"], figures["finished"], figures["good"], figures["errors"]) == (30, 30, 30, {})
    assert (figures["output_tokens"], figures["prompt_tokens"]) == (300, 600)
    # Each step takes 2 ms on the device, so the door cannot hand tokens out faster than that.
    assert figures["tpot_s"]["p50"] > 0.0015


def test_bench_counts_deadlines_by_their_reason(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--requests", "5", "--output-tokens", "400", "--prompt-tokens", "20", "--deadline", "0.1", "--json")
    assert run(["bench", "--target", target, "--rate", "200", *arguments]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["errors"], figures["good"]) == ({"DEADLINE_EXCEEDED": 5}, 0)


def test_bench_draws_and_reports(target: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plot = tmp_path / "bench.svg"
    arguments = ("--requests", "10", "--output-tokens", "5", "--prompt-tokens", "20", "--plot", str(plot))
    assert run(["bench", "--target", target, "--concurrency", "2", *arguments]) == 0
    assert "closed loop of 2" in capsys.readouterr().out
    assert "Output tokens a second" in plot.read_text()


def test_bench_needs_one_kind_of_load_and_a_server(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "--target", target]) == 2
    assert run(["bench", "--target", target, "--rate", "1", "--concurrency", "1"]) == 2
    assert "open loop" in capsys.readouterr().err
    assert run(["bench", "--target", "127.0.0.1:1", "--rate", "1"]) == 1
    assert "stepwire serve" in capsys.readouterr().err
