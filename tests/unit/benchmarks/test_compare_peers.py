"""Which part of the comparison the command line asks for, what it refuses, and how long a quick run takes."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.compare_peers import NUM_STARTS, check_counts, measure_row, open_together, parse
from benchmarks.peers import rows
from benchmarks.peers.models import BIG, Model
from benchmarks.peers.processes import PeerFailed
from benchmarks.peers.rates import Answer
from benchmarks.peers.rows import OURS, ROWS, STREAMED, Measured, Row


def test_all_of_it_by_default() -> None:
    found = parse([])
    assert (found.rows, found.peers, found.starts, found.quick) == (ROWS, ("vllm", "llamacpp", "hf"), True, False)


def test_a_part_of_it() -> None:
    found = parse(["--rows", "b8,start", "--peers=hf,vllm", "--quick", "--serve-flag=--threads=1"])
    assert [row.key for row in found.rows] == ["b8"]
    assert (found.peers, found.starts, found.quick) == (("vllm", "hf"), True, True)
    assert found.serve_flags == ("--threads=1",)


@pytest.mark.parametrize("arguments", [["--rows=b9"], ["--peers=sglang"]])
def test_what_there_is_not_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(arguments)
    assert "there is no" in capsys.readouterr().err


def test_a_system_that_ends_early_does_not_count_as_fast() -> None:
    check_counts("hf", Answer([[1, 2]], [[0.1, 0.2]]), 1, 2)
    for answer in (Answer([[1]], [[0.1]]), Answer([[1, 2]], [[0.1]]), Answer([], [])):
        with pytest.raises(SystemExit, match="hf made"):
            check_counts("hf", answer, 1, 2)


class System:
    """Answers at once, and notes the shape of what it was asked: prompts, their length, tokens."""

    def __init__(self, fails: bool = False) -> None:
        self.asked: list[tuple[int, int, int]] = []
        self.num_streamed = 0
        self.fails = fails
        self.is_closed = False

    def generate(self, prompts: list[list[int]], max_tokens: int, *, stream: bool = False) -> Answer:
        if self.fails:
            raise PeerFailed("no")
        self.asked.append((len(prompts), len(prompts[0]), max_tokens))
        self.num_streamed += stream
        times = [0.1 + 0.1 * token for token in range(max_tokens)]
        return Answer([[1] * max_tokens] * len(prompts), [times] * len(prompts))

    def close(self) -> None:
        self.is_closed = True


def asked(row: Row, *flags: str) -> list[tuple[int, int, int]]:
    system = System()
    measure_row(row, MODEL, {OURS: system}, parse(list(flags)), Measured())  # type: ignore[dict-item]
    return system.asked


def test_whole_answers_are_compared_and_a_full_run_tells_of_streams_too() -> None:
    measured, ours, theirs = Measured(), System(), System()
    systems: dict[str, Any] = {OURS: ours, "hf": theirs}
    rates = measure_row(ROW["b8"], MODEL, systems, parse([]), measured)
    num_rounds = ROW["b8"].rounds[0]
    assert {name: len(values) for name, values in rates.items()} == dict.fromkeys((OURS, "hf", STREAMED), num_rounds)
    assert (ours.num_streamed, theirs.num_streamed) == (num_rounds + 1, 0)
    ours.num_streamed = 0
    measure_row(ROW["b8"], MODEL, systems, parse(["--quick"]), measured)
    assert (ours.num_streamed, theirs.num_streamed) == (0, 0)
    measure_row(ROW["ctx2k"], MODEL, systems, parse(["--quick"]), measured)
    assert ours.num_streamed == theirs.num_streamed > 0


MODEL = Model(BIG, Path("folder"), Path("gguf"))
ROW = {row.key: row for row in ROWS}


def test_a_full_run_warms_up_with_long_prompts_and_a_quick_one_with_as_many_short_ones() -> None:
    assert asked(ROW["ctx2k"]) == [(8, 512, 4), *[(8, 2048, 64)] * 3]
    assert asked(ROW["ctx2k"], "--quick") == [(8, 32, 4), (8, 2048, 64)]
    assert asked(ROW["b32"], "--quick") == [(32, 8, 4), (32, 128, 64)]
    assert asked(ROW["big_prefill"], "--quick") == [(1, 256, 1), (1, 1024, 1)]


def test_systems_whose_starts_do_not_count_start_side_by_side_and_one_that_fails_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = {"vllm": System(), "llamacpp": System(fails=True), OURS: System()}
    began: list[str] = []

    def start(name: str, *_: Any) -> System:
        assert not any(system.asked for system in made.values()), "one was waited for before another had begun"
        began.append(name)
        return made[name]

    monkeypatch.setattr("benchmarks.compare_peers.start", start)
    systems: dict[str, Any] = {}
    measured = Measured()
    open_together(systems, list(made), MODEL, Path("folder"), parse([]), measured)
    assert (began, list(systems), list(measured.failed)) == (list(made), ["vllm", OURS], ["llamacpp"])
    assert made["llamacpp"].is_closed
    assert [made[name].asked for name in systems] == [[(1, 128, 1)]] * 2


# What was measured on the 2-core machine of docs/performance.md, tokens/s by system: of prompts, and of each row's own
# rate. vLLM's starts took 115 s at worst.
PROMPT_RATES = {
    "demo": {OURS: 1572, "vllm": 1264, "llamacpp": 769, "hf": 932},
    "big": {OURS: 207, "vllm": 188, "llamacpp": 131},
}
RATES = {
    "b1": (99, 43, 76, 22),
    "b8": (373, 228, 183, 89),
    "b32": (462, 353, 250, 147),
    "ctx2k": (269, 135, 101, 21),
    "big_b1": (13.5, 9.7, 12.5),
    "big_b8": (62, 43, 37),
}
VLLM_START_S, OTHER_STARTS_S = 115.0, {OURS: 6.0, "hf": 7.0, "llamacpp": 1.0}
# Ends of processes, agreement, bandwidth, and writing the big model where `make peers` has not.
REST_S = 55.0


def seconds(row: Row, num: int, length: int, num_out: int) -> float:
    """Of one round with all systems."""
    total = 0.0
    for number, prompt_rate in enumerate(PROMPT_RATES[row.model].values()):
        in_prompts = num * length / prompt_rate
        if num_out == 1:
            total += in_prompts
        elif num_out < rows.NUM_OUT:  # A warm-up: a tenth of a second a step is much.
            total += in_prompts + num_out * 0.1
        else:
            total += num * num_out / RATES[row.key][number] + (in_prompts if row.measure == "decode" else 0.0)
    return total


def test_a_quick_run_takes_less_than_ten_minutes_where_vllm_takes_two_to_start() -> None:
    total = 2 * VLLM_START_S + REST_S
    total += sum(NUM_STARTS[name][1] * start_s for name, start_s in OTHER_STARTS_S.items())
    for row in ROWS:
        for shape in asked(row, "--quick"):
            total += seconds(row, *shape)
    assert total < 580
