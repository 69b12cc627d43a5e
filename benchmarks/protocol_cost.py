"""What the seam between scheduler and worker costs, and what the door does, at batch 1, 8 and 32.

Three arrangements of the same parts on the same cores: the scheduler's core that calls the worker's runtime in one
process; the core that sends its steps over gRPC to a worker process; and `stepwire serve` that streams to a client.
Tokens/s of the second over the first are `boundary_b*`, of the third over the first `door_b*`: the medians of the
rounds' own ratios, since both of a round saw the same machine. Prompts of 128 random token ids, 64 tokens out.
"""

import argparse
import dataclasses
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median
from typing import Protocol

from benchmarks.report import Bar, report
from stepwire.rpc.environment import prepare_grpc

prepare_grpc()

from benchmarks.peers.boundary import Boundary  # noqa: E402
from benchmarks.peers.drain import Sizes  # noqa: E402
from benchmarks.peers.models import Model, demo_model  # noqa: E402
from benchmarks.peers.ours import StepwireServer  # noqa: E402
from benchmarks.peers.processes import PeerProcess, close_on_sigterm  # noqa: E402
from benchmarks.peers.rates import Answer, make_prompts, output_rate, table  # noqa: E402
from benchmarks.ready import demo_model_path  # noqa: E402
from stepwire.telemetry.logs import configure_logging  # noqa: E402

NUM_CORES = 2
PROMPT_LEN, NUM_OUT = 128, 64
BATCHES = (1, 8, 32)
MIN_BOUNDARY = {1: 0.95, 8: 0.97, 32: 0.97}
MIN_DOOR = 0.92
ROUNDS, QUICK_ROUNDS = 15, 5
RUNNER, BOUNDARY, DOOR = "in process", "boundary", "door"
Rates = dict[int, dict[str, list[float]]]


class Arrangement(Protocol):
    """Something that continues prompts."""

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> Answer:
        """Greedy continuations, and when each token was there."""


def main() -> int:
    """Measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds and not {ROUNDS}")
    parser.add_argument("--rounds", type=int, help="so many rounds")
    parser.add_argument(
        "--batches", default=",".join(map(str, BATCHES)), help="these batches only, with commas between"
    )
    options = parser.parse_args()
    batches = [int(word) for word in options.batches.split(",")]
    if unknown := sorted(set(batches) - set(BATCHES)):
        parser.error(f"there is no batch of {', '.join(map(str, unknown))}")
    configure_logging(format="auto", level="warning", service="benchmark")
    close_on_sigterm()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:NUM_CORES])
    source = demo_model_path()
    if not source.exists():
        print(f"protocol_cost: there is no model at {source}; run `make setup`", file=sys.stderr)
        return 2
    num_rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    rates = measure(demo_model(source), batches, num_rounds)
    print(summary(rates))
    rounded = {
        f"b{batch}": {name: [round(rate, 1) for rate in values] for name, values in found.items()}
        for batch, found in rates.items()
    }
    return report(bars(rates), {"tokens_per_s": rounded, "cores": NUM_CORES})


def measure(model: Model, batches: Sequence[int], num_rounds: int) -> Rates:
    """Output tokens/s by batch and arrangement, one for each round after one that warms up."""
    sizes = Sizes()
    rates: Rates = {batch: {name: [] for name in (RUNNER, BOUNDARY, DOOR)} for batch in batches}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stepwire-protocol-")))
        arrangements = start(stack, model, sizes, folder)
        for number in range(-1, num_rounds):
            for batch in batches:
                prompts = make_prompts(f"{batch} {number}", batch, PROMPT_LEN, model.config.vocab_size)
                # Every arrangement takes every place in a round.
                names = list(arrangements)[number % 3 :] + list(arrangements)[: number % 3]
                for name in names:
                    answer = arrangements[name].generate(prompts, NUM_OUT, stream=True)
                    if [len(tokens) for tokens in answer.tokens] != [NUM_OUT] * batch:
                        raise SystemExit(f"{name} did not make {NUM_OUT} tokens of every prompt")
                    if number >= 0:
                        rates[batch][name].append(output_rate(answer))
    return rates


def start(stack: ExitStack, model: Model, sizes: Sizes, folder: Path) -> Mapping[str, Arrangement]:
    """All three, ready; the stack closes them."""
    options = {"model": str(model.folder), "threads": NUM_CORES, "sizes": dataclasses.asdict(sizes)}
    command = [sys.executable, "-m", "benchmarks.peers.inprocess"]
    runner = PeerProcess(RUNNER, command, options, folder / "runner.log", dict(os.environ))
    stack.enter_context(closing(runner))
    runner.generate([[1]], 1)  # it is stopped from here on, unless it is asked
    boundary = Boundary(model.folder, sizes, NUM_CORES, folder / "worker.log")
    stack.enter_context(closing(boundary))
    server = StepwireServer(model.folder, folder, f"--threads={NUM_CORES}", *sizes.serve_flags)
    stack.enter_context(closing(server))
    server.wait_ready()
    return {RUNNER: runner, BOUNDARY: boundary, DOOR: server}


def share(rates: Rates, batch: int, name: str) -> float:
    """The median of the rounds' ratios of an arrangement to the one without a seam."""
    return median(one / base for one, base in zip(rates[batch][name], rates[batch][RUNNER], strict=True))


def bars(rates: Rates) -> dict[str, Bar]:
    """What must hold."""
    boundary = {f"boundary_b{b}": Bar(round(share(rates, b, BOUNDARY), 3), MIN_BOUNDARY[b]) for b in rates}
    door = {f"door_b{b}": Bar(round(share(rates, b, DOOR), 3), MIN_DOOR) for b in rates}
    return boundary | door


def summary(rates: Rates) -> str:
    """The table that people read."""
    lines = []
    for batch, found in rates.items():
        line: dict[str, object] = {"row": f"b{batch}"}
        line |= {name: f"{median(values):,.1f}" for name, values in found.items()}
        line |= {f"x {name}": f"{share(rates, batch, name):.3f}" for name in (BOUNDARY, DOOR)}
        lines.append(line)
    return table(["row", RUNNER, BOUNDARY, f"x {BOUNDARY}", DOOR, f"x {DOOR}"], lines) + "\nTokens/s."


if __name__ == "__main__":
    sys.exit(main())
