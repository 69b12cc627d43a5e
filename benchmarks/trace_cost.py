"""What tracing costs: processor time a token of all services, and tokens a second.

Processor time is that of scheduler and worker, on a simulated device, so that nothing but the services computes. The
same live processes run blocks of requests with tracing off, with each hundredth request sampled, and with all, in an
order of each round's own; what is sent after a block's last token is counted too. `cpu_1pct` and `cpu_100pct` are 1
and the share that tracing takes: what makes and sends spans, by the clocks of its threads, and for each export what
gRPC's own threads take, which is measured apart. By the kernel's clocks of the whole processes (rusage) blocks of the
same kind differ by more than the bars allow, where others use the machine too; the ratios by these, and the bounds
between which their median lies, are figures, and a bar does not hold where its whole interval lies above it.

Tokens a second are SmolLM2's at batch 16, by pairs of such blocks: `throughput_100pct`, and with a collector that does
not exist `throughput_dead`, are the lower 95 % bounds of the pairs' ratios to the block without tracing. What a dead
collector costs in memory is measured too: a rate that is paid with memory does not count.
"""

import argparse
import math
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import mean, median, stdev

from benchmarks.report import Bar, report
from stepwire.rpc.environment import prepare_grpc

prepare_grpc()

from benchmarks.peers.models import demo_model  # noqa: E402
from benchmarks.peers.processes import close_on_sigterm  # noqa: E402
from benchmarks.peers.rates import make_prompts  # noqa: E402
from benchmarks.ready import demo_model_path  # noqa: E402
from benchmarks.tracing.switching import Block, Mode, Switching, switching  # noqa: E402
from stepwire.supervisor.ports import free_port  # noqa: E402
from stepwire.telemetry.logs import configure_logging  # noqa: E402

MAX_CPU = {"1pct": 1.005, "100pct": 1.03}
MIN_THROUGHPUT = 0.97
OFF, DEAD = "off", "dead"
BATCH = 16
# Of a block; a request of a chat has about as many tokens.
SIM_PROMPT_LEN, SIM_TOKENS, SIM_REQUESTS = 32, 128, 480
MODEL_PROMPT_LEN, MODEL_TOKENS = 32, 96
ROUNDS, PAIRS = 10, 30
QUICK = (2, 4)
# What a full queue of spans takes in a process is far less; what leaks, more.
MAX_DEAD_GROWTH_MIB = 64.0
_FLOOD_REQUESTS, _FLOOD_TOKENS = 3000, 2
VOCAB_SIZE = 49152
# One-sided 95 % quantiles of Student's t, by degrees of freedom.
_T95 = {
    1: 6.314,
    2: 2.920,
    3: 2.353,
    4: 2.132,
    5: 2.015,
    7: 1.895,
    9: 1.833,
    14: 1.761,
    19: 1.729,
    23: 1.714,
    29: 1.699,
    39: 1.685,
}


def main() -> int:
    """Measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a few rounds: to see that it runs")
    parser.add_argument("--part", choices=("cpu", "throughput"), help="only this part")
    parser.add_argument("--rounds", type=int, help="rounds of the first part")
    parser.add_argument("--pairs", type=int, help="pairs of the second part")
    options = parser.parse_args()
    configure_logging(format="auto", level="warning", service="benchmark")
    close_on_sigterm()
    source = demo_model_path()
    if not source.exists():
        print(f"trace_cost: there is no model at {source}; run `make setup`", file=sys.stderr)
        return 2
    rounds, pairs = QUICK if options.quick else (ROUNDS, PAIRS)
    bars: dict[str, Bar] = {}
    figures: dict[str, object] = {}
    model = demo_model(source).folder
    if options.part != "throughput":
        bars |= cpu_part(model, options.rounds or rounds, figures)
    if options.part != "cpu":
        bars |= throughput_part(model, options.pairs or pairs, figures)
    return report(bars, figures)


# Processor time.


def cpu_part(model: Path, num_rounds: int, figures: dict[str, object]) -> dict[str, Bar]:
    """The bars of processor time."""
    ratios: dict[str, list[float]] = {"1pct": [], "100pct": []}
    blocks: dict[Mode, list[Block]] = {mode: [] for mode in Mode}
    with (
        collector() as endpoint,
        switching(model, BATCH, endpoint, ("--device=sim", "--sim-latency-s=0.002")) as server,
    ):
        for number in range(-2, num_rounds):
            found = cpu_round(server, number)
            if number < 0:
                continue
            for mode, block in found.items():
                blocks[mode].append(block)
            for mode in (Mode.ONE, Mode.ALL):
                ratios[mode.value].append(found[mode].cpu_per_token_s / found[Mode.OFF].cpu_per_token_s)
        export_s = export_cost_s(endpoint)
    cpu_us = {mode.value: mean(block.cpu_per_token_s for block in blocks[mode]) * 1e6 for mode in Mode}
    tracing_us = {
        mode.value: mean(block.tracing_per_token_s + block.exports_per_token * export_s for block in blocks[mode]) * 1e6
        for mode in Mode
    }
    figures["cpu_us_per_token"] = {mode: round(found, 2) for mode, found in cpu_us.items()}
    figures["tracing_us_per_token"] = {mode: round(found, 2) for mode, found in tracing_us.items()}
    figures["grpc_us_per_export"] = round(export_s * 1e6)
    figures["cpu_rusage_median"] = {name: round(median(found), 4) for name, found in ratios.items()}
    bounds = {name: median_bounds(found) for name, found in ratios.items()}
    figures["cpu_rusage_bounds"] = {name: [round(bound, 4) for bound in found] for name, found in bounds.items()}
    figures["cpu_rounds"] = num_rounds
    found_bars = {}
    for name, (least, _) in bounds.items():
        known = 1 + (tracing_us[name] - tracing_us[OFF]) / cpu_us[OFF]
        found_bars[f"cpu_{name}"] = Bar(
            round(max(known, least if least > MAX_CPU[name] else 0.0), 4), MAX_CPU[name], "at most"
        )
    return found_bars


def export_cost_s(endpoint: str) -> float:
    """What gRPC's own threads take for an export, in seconds of processor time."""
    command = [sys.executable, "-m", "benchmarks.tracing.export_cost", endpoint]
    return int(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout) / 1e9


def cpu_round(server: Switching, number: int) -> dict[Mode, Block]:
    """A block of each mode; they take turns in an order of the round's own."""
    modes = list(Mode)
    random.Random(number).shuffle(modes)
    prompts = make_prompts(f"round {number}", SIM_REQUESTS, SIM_PROMPT_LEN, VOCAB_SIZE)
    return {mode: server.block(prompts, SIM_TOKENS, mode) for mode in modes}


def median_bounds(values: Sequence[float]) -> tuple[float, float]:
    """The lower and the upper 95 % bound of the median, whatever the distribution: with each value as likely above it
    as below, the number of those below is binomial. The extremes when there are too few for a bound."""
    ordered, num = sorted(values), len(values)
    below = 0
    for place in range(num):
        below += math.comb(num, place)
        if below / 2**num >= 0.95:
            upper = min(place + 1, num - 1)
            return ordered[num - 1 - upper], ordered[upper]
    return ordered[0], ordered[-1]


# Tokens a second.


def throughput_part(model: Path, num_pairs: int, figures: dict[str, object]) -> dict[str, Bar]:
    """The bars of throughput, and what a dead collector costs in memory."""
    dead = f"127.0.0.1:{free_port()}"
    with collector() as endpoint:
        ratios = {"100pct": throughput_ratios(model, endpoint, num_pairs)}
    ratios[DEAD] = throughput_ratios(model, dead, num_pairs)
    growth_mib = dead_growth_mib(model, dead)
    figures["throughput_ratio_mean"] = {name: round(mean(found), 4) for name, found in ratios.items()}
    figures["throughput_pairs"] = num_pairs
    figures["dead_growth_mib"] = round(growth_mib, 1)
    bounds: dict[str, float | None] = {name: round(lower_bound(found), 4) for name, found in ratios.items()}
    if growth_mib > MAX_DEAD_GROWTH_MIB:
        bounds[DEAD] = None
    return {f"throughput_{name}": Bar(bound, MIN_THROUGHPUT) for name, bound in bounds.items()}


def throughput_ratios(model: Path, endpoint: str, num_pairs: int) -> list[float]:
    """Rates with all requests sampled over the rate without tracing, pair by pair, after one that warms up."""
    ratios: list[float] = []
    threads = f"--threads={len(os.sched_getaffinity(0))}"
    with switching(model, BATCH, endpoint, (threads,)) as server:
        for number in range(-1, num_pairs):
            prompts = make_prompts(f"pair {number}", BATCH, MODEL_PROMPT_LEN, VOCAB_SIZE)
            modes = (Mode.OFF, Mode.ALL) if number % 2 else (Mode.ALL, Mode.OFF)
            # Not the same prompts twice: the second block would find the first one's in the prefix cache.
            rates = {
                mode: server.block([[place + 1, *prompt] for prompt in prompts], MODEL_TOKENS, mode).tokens_per_s
                for place, mode in enumerate(modes)
            }
            if number >= 0:
                ratios.append(rates[Mode.ALL] / rates[Mode.OFF])
    return ratios


def dead_growth_mib(model: Path, dead: str) -> float:
    """How much more memory the services take for a flood of requests with all sampled and a collector that is dead than
    for one without tracing, each on services of its own."""
    grown = {}
    for mode in (Mode.OFF, Mode.ALL):
        with switching(model, 100, dead, ("--device=sim",)) as server:
            server.block(make_prompts("warm", BATCH, 8, VOCAB_SIZE), _FLOOD_TOKENS, mode)
            before = resident_mib(server)
            server.block(make_prompts("flood", _FLOOD_REQUESTS, 8, VOCAB_SIZE), _FLOOD_TOKENS, mode)
            grown[mode] = resident_mib(server) - before
    return grown[Mode.ALL] - grown[Mode.OFF]


def resident_mib(server: Switching) -> float:
    """Resident memory of a server's processes."""
    pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in server.pids)
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def lower_bound(ratios: Sequence[float]) -> float:
    """The one-sided lower 95 % bound of the ratios' geometric mean, by Student's t."""
    logs = [math.log(ratio) for ratio in ratios]
    if len(logs) < 2:
        return 0.0
    freedom = max(known for known in _T95 if known <= len(logs) - 1)
    return math.exp(mean(logs) - _T95[freedom] * stdev(logs) / math.sqrt(len(logs)))


# What both need.


@contextmanager
def collector() -> Iterator[str]:
    """The address of a collector that takes all."""
    command = [sys.executable, "-m", "benchmarks.peers.span_sink"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.stdin.close()


if __name__ == "__main__":
    sys.exit(main())
