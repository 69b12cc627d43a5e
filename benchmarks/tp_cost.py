"""What a group of ranks costs: bytes and time in collectives, and the scheduler's work for each rank of a step.

    python -m benchmarks.tp_cost [--quick]

Two ranks of a random Llama decode; what they put into collectives is held against what the shapes say, and the time
in them against bare collectives of the same sizes in the same order or, where these take less, a twentieth of the step:
below that it is the other rank's work that is waited for. Then a scheduler's group sends steps to 2, 8 and 64 ranks
that only answer.
"""

import argparse
import asyncio
import tempfile
from pathlib import Path

from stepwire.rpc.environment import prepare_grpc

prepare_grpc()  # as the programs do

from benchmarks.groups.collectives import CollectiveResult, measure_collectives  # noqa: E402
from benchmarks.groups.fanout import FanoutResult, measure_fanout  # noqa: E402
from benchmarks.report import Bar, report  # noqa: E402
from tests.support.tiny_checkpoint import make_tiny_llama  # noqa: E402

NUM_RANKS = (2, 8, 64)


def main() -> int:
    """Prints figures, then the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer steps, and a model of fewer layers")
    quick = parser.parse_args().quick
    with tempfile.TemporaryDirectory() as folder:
        path = make_tiny_llama(
            Path(folder) / "model",
            num_layers=6 if quick else 30,
            hidden_size=512,
            heads=8,
            kv_heads=4,
            intermediate_size=1536,
            vocab_size=49_152,
        )
        collectives = measure_collectives(path, num_steps=20 if quick else 60)
    fanouts = [asyncio.run(measure_fanout(num, num_steps=100 if quick else 400)) for num in NUM_RANKS]
    return _report(collectives, fanouts)


def _report(collectives: CollectiveResult, fanouts: list[FanoutResult]) -> int:
    by_num = {each.num_ranks: each.cpu_us for each in fanouts}
    few, some, many = NUM_RANKS
    # What one more rank costs, and how the whole grows against the number of ranks.
    early = (by_num[some] - by_num[few]) / (some - few)
    late = (by_num[many] - by_num[some]) / (many - some)
    growth = max(by_num[some] / by_num[few] * few / some, by_num[many] / by_num[some] * some / many)
    bars = {
        "bytes": Bar(collectives.num_bytes / collectives.expected_bytes, 1.0, "at most"),
        "time": Bar(collectives.time_ratio, 1.5, "at most"),
        "us_per_rank": Bar(max(early, late), 60.0, "at most"),
        "linear": Bar(growth, 1.0, "at most"),
    }
    figures = {
        "collective_calls_per_step": collectives.num_calls,
        "collective_bytes_per_step": collectives.num_bytes,
        "expected_bytes_per_step": collectives.expected_bytes,
        "collective_us_per_step": collectives.us_per_step,
        "bare_us_per_step": collectives.bare_us_per_step,
        "step_us": collectives.step_us,
        "fanout_cpu_us_per_step": by_num,
        "fanout_wall_us_per_step": {each.num_ranks: each.wall_us for each in fanouts},
        "step_bytes": fanouts[0].step_bytes,
    }
    return report(bars, figures)


if __name__ == "__main__":
    raise SystemExit(main())
