"""The arrangements do the same work, and the bars are ratios of one round each."""

from pathlib import Path

from benchmarks.peers.boundary import Boundary
from benchmarks.peers.drain import Sizes
from benchmarks.peers.inprocess import make
from benchmarks.peers.rates import make_prompts
from benchmarks.protocol_cost import BOUNDARY, DOOR, RUNNER, bars, summary
from benchmarks.report import Bar
from tests.support.tiny_checkpoint import make_tiny_llama

RATES = {
    1: {RUNNER: [100.0, 50.0, 80.0], BOUNDARY: [96.0, 45.0, 78.4], DOOR: [90.0, 46.5, 74.4]},
    32: {RUNNER: [400.0], BOUNDARY: [390.0], DOOR: [360.0]},
}


def test_bars_are_the_medians_of_ratios_within_a_round() -> None:
    assert bars(RATES) == {
        "boundary_b1": Bar(0.96, 0.95),
        "boundary_b32": Bar(0.975, 0.97),
        "door_b1": Bar(0.93, 0.92),
        "door_b32": Bar(0.9, 0.92),
    }


def test_the_table_has_a_line_for_each_batch() -> None:
    _, one, many, _ = summary(RATES).splitlines()
    assert one.split() == ["b1", "80.0", "78.4", "0.960", "74.4", "0.930"]
    assert many.split() == ["b32", "400.0", "390.0", "0.975", "360.0", "0.900"]


def test_serve_gets_the_same_limits() -> None:
    flags = Sizes(max_sequences=3, num_blocks=7).serve_flags
    assert {"--max-num-seqs=3", "--num-kv-blocks=7", "--no-prefix-caching", "--dtype=bfloat16"} < set(flags)


def test_in_one_process_and_over_the_boundary_the_same_tokens_come(tmp_path: Path) -> None:
    model = make_tiny_llama(tmp_path / "model")
    sizes = Sizes(max_sequences=4, max_step_tokens=32, num_blocks=32, max_model_len=64, dtype="float32")
    prompts = make_prompts("same", 3, 20, 320)
    options = {"model": str(model), "threads": 1, "sizes": {name: getattr(sizes, name) for name in sizes.__slots__}}
    expected, times = make(options)(prompts, 8, False)
    boundary = Boundary(model, sizes, 1, tmp_path / "worker.log")
    try:
        answers = [boundary.generate(prompts, 8) for _ in range(2)]
    finally:
        boundary.close()
    for answer in answers:
        assert answer.tokens == expected
        assert [len(found) for found in answer.times] == [len(found) for found in times] == [8] * 3
        assert all(found == sorted(found) for found in answer.times)
