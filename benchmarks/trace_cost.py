"""What tracing costs: processor time a token of all services, and tokens a second.

Processor time is that of scheduler, worker and supervisor together, by the kernel's clocks of their processes, on a
simulated device, so that nothing but the services computes. Servers without tracing, with 1 % and with 100 % of the
requests sampled stand side by side and take turns, with the same load; `cpu_1pct` and `cpu_100pct` are the medians of
the rounds' own ratios to the one without. Half the servers are started anew several times, since a process's place
in memory alone makes a difference of a percent. What is sent after a round's last token is counted too.

Tokens a second are SmolLM2's at batch 16, by pairs: `throughput_100pct` and `throughput_dead`, whose collector does
not exist, are the lower 95 % bounds of the pairs' ratios to the server without tracing. The memory of a server whose
collector is dead is held against its queue: a rate that is paid with memory does not count.
"""

import argparse
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from statistics import mean, median, stdev

from benchmarks.report import Bar, report
from stepwire.rpc.environment import prepare_grpc

prepare_grpc()

from benchmarks.peers.models import demo_model  # noqa: E402
from benchmarks.peers.ours import StepwireServer  # noqa: E402
from benchmarks.peers.processes import close_on_sigterm  # noqa: E402
from benchmarks.peers.rates import make_prompts, output_rate  # noqa: E402
from benchmarks.ready import demo_model_path  # noqa: E402
from stepwire.supervisor.ports import free_port  # noqa: E402
from stepwire.telemetry.logs import configure_logging  # noqa: E402

MAX_CPU = {"1pct": 1.005, "100pct": 1.03}
MIN_THROUGHPUT = 0.97
OFF, ONE, ALL, DEAD = "off", "1pct", "100pct", "dead"
BATCH = 16
# Of a round on the simulated device; a request of a chat has about as many tokens.
SIM_PROMPT_LEN, SIM_TOKENS, SIM_REQUESTS = 32, 128, 64
MODEL_PROMPT_LEN, MODEL_TOKENS = 32, 48
GENERATIONS, ROUNDS, PAIRS = 4, 10, 24
QUICK = (1, 5, 6)
# Until the exporter has sent what a round left it.
_FLUSH_S = 1.2
# What a full queue of spans takes in a process is far less; what leaks, more.
MAX_DEAD_GROWTH_MIB = 64.0
_FLOOD_REQUESTS, _FLOOD_TOKENS = 3000, 2
VOCAB_SIZE = 49152
# One-sided 95 % quantiles of Student's t, by degrees of freedom.
_T95 = {1: 6.314, 2: 2.920, 3: 2.353, 4: 2.132, 5: 2.015, 7: 1.895, 9: 1.833, 14: 1.761, 19: 1.729, 23: 1.714}
Ratios = dict[str, list[float]]


def main() -> int:
    """Measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a few rounds: to see that it runs")
    parser.add_argument("--part", choices=("cpu", "throughput"), help="only this part")
    parser.add_argument("--generations", type=int, help="how often the servers of the first part are started")
    parser.add_argument("--rounds", type=int, help="rounds of each start")
    parser.add_argument("--pairs", type=int, help="pairs of the second part")
    options = parser.parse_args()
    configure_logging(format="auto", level="warning", service="benchmark")
    close_on_sigterm()
    source = demo_model_path()
    if not source.exists():
        print(f"trace_cost: there is no model at {source}; run `make setup`", file=sys.stderr)
        return 2
    generations, rounds, pairs = QUICK if options.quick else (GENERATIONS, ROUNDS, PAIRS)
    bars: dict[str, Bar] = {}
    figures: dict[str, object] = {}
    model = demo_model(source).folder
    if options.part != "throughput":
        bars |= cpu_part(model, options.generations or generations, options.rounds or rounds, figures)
    if options.part != "cpu":
        bars |= throughput_part(model, options.pairs or pairs, figures)
    return report(bars, figures)


# Processor time.


def cpu_part(model: Path, num_generations: int, num_rounds: int, figures: dict[str, object]) -> dict[str, Bar]:
    """The bars of processor time. A second server without tracing shows how far equal ones differ."""
    ratios: Ratios = {ONE: [], ALL: [], "off again": []}
    per_token: list[float] = []
    with collector() as endpoint:
        for generation in range(num_generations):
            modes = {OFF: [], ONE: tracing(endpoint, 0.01), ALL: tracing(endpoint, 1.0), "off again": []}
            with servers(model, modes, "--device=sim", "--sim-latency-s=0.005") as running:
                for number in range(-1, num_rounds):
                    costs = cpu_round(running, f"{generation} {number}")
                    if number < 0:
                        continue
                    per_token.append(costs[OFF])
                    for mode, found in ratios.items():
                        found.append(costs[mode] / costs[OFF])
    figures["cpu_us_per_token_off"] = round(median(per_token) * 1e6, 2)
    figures["cpu_ratio_off_again"] = round(median(ratios["off again"]), 4)
    figures["cpu_ratio_quartiles"] = {mode: _quartiles(found) for mode, found in ratios.items()}
    return {f"cpu_{mode}": Bar(round(median(ratios[mode]), 4), MAX_CPU[mode], "at most") for mode in (ONE, ALL)}


def cpu_round(running: Mapping[str, StepwireServer], name: str) -> dict[str, float]:
    """Seconds of processor time a token, by mode; they take turns in an order of the round's own.

    A server is read again after the turn of the next one: until then it has sent its spans.
    """
    modes = list(running)
    random.Random(name).shuffle(modes)
    prompts = make_prompts(name, BATCH, SIM_PROMPT_LEN, VOCAB_SIZE)
    costs: dict[str, float] = {}
    before: dict[str, float] = {}
    for mode, waiting in zip([*modes, None], [None, *modes], strict=True):
        if mode is None:
            time.sleep(_FLUSH_S)
        else:
            before[mode], num_tokens = cpu_seconds(running[mode]), 0
            for _ in range(SIM_REQUESTS // BATCH):
                num_tokens += sum(map(len, running[mode].generate(prompts, SIM_TOKENS).tokens))
        if waiting is not None:
            costs[waiting] = (cpu_seconds(running[waiting]) - before[waiting]) / (SIM_REQUESTS * SIM_TOKENS)
        assert mode is None or num_tokens == SIM_REQUESTS * SIM_TOKENS
    return costs


def cpu_seconds(server: StepwireServer) -> float:
    """Processor time of a server's processes so far, to the nanosecond: see CPUCLOCK_SCHED in Linux's posix-timers."""
    return sum(time.clock_gettime((~pid << 3) | 2) for pid in server.pids)


# Tokens a second.


def throughput_part(model: Path, num_pairs: int, figures: dict[str, object]) -> dict[str, Bar]:
    """The bars of throughput, and what a dead collector costs in memory."""
    dead = tracing(f"127.0.0.1:{free_port()}", 1.0)
    with collector() as endpoint:
        modes = {OFF: [], ALL: tracing(endpoint, 1.0), DEAD: dead}
        with servers(model, modes, f"--threads={len(os.sched_getaffinity(0))}") as running:
            ratios = throughput_ratios(running, num_pairs)
    growth_mib = dead_growth_mib(model, dead)
    figures["throughput_ratio_mean"] = {mode: round(mean(found), 4) for mode, found in ratios.items()}
    figures["throughput_pairs"] = num_pairs
    figures["dead_growth_mib"] = round(growth_mib, 1)
    bounds: dict[str, float | None] = {mode: round(lower_bound(found), 4) for mode, found in ratios.items()}
    if growth_mib > MAX_DEAD_GROWTH_MIB:
        bounds[DEAD] = None
    return {f"throughput_{mode}": Bar(bounds[mode], MIN_THROUGHPUT) for mode in (ALL, DEAD)}


def throughput_ratios(running: Mapping[str, StepwireServer], num_pairs: int) -> Ratios:
    """Rates with tracing over the rate without, pair by pair, after one that warms up."""
    ratios: Ratios = {ALL: [], DEAD: []}
    for number in range(-1, num_pairs):
        prompts = make_prompts(f"pair {number}", BATCH, MODEL_PROMPT_LEN, VOCAB_SIZE)
        modes = list(running)[number % 3 :] + list(running)[: number % 3]
        rates = {mode: output_rate(running[mode].generate(prompts, MODEL_TOKENS)) for mode in modes}
        for mode, found in ratios.items():
            if number >= 0:
                found.append(rates[mode] / rates[OFF])
    return ratios


def dead_growth_mib(model: Path, dead: Sequence[str]) -> float:
    """How much more memory the services take for a flood of requests when their collector is dead than without one."""
    modes = {OFF: [], DEAD: list(dead)}
    grown = {}
    with servers(model, modes, "--device=sim") as running:
        for mode, server in running.items():
            server.generate(make_prompts("warm", BATCH, 8, VOCAB_SIZE), _FLOOD_TOKENS)
            before = resident_mib(server)
            for number in range(_FLOOD_REQUESTS // 100):
                server.generate(make_prompts(f"flood {number}", 100, 8, VOCAB_SIZE), _FLOOD_TOKENS)
            grown[mode] = resident_mib(server) - before
    return grown[DEAD] - grown[OFF]


def resident_mib(server: StepwireServer) -> float:
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


def tracing(endpoint: str, ratio: float) -> list[str]:
    """The flags of a server that traces this share of its requests."""
    return [f"--otlp-endpoint={endpoint}", f"--trace-sample-ratio={ratio}"]


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


@contextmanager
def servers(model: Path, modes: Mapping[str, Sequence[str]], *flags: str) -> Iterator[dict[str, StepwireServer]]:
    """One ready server for each mode."""
    with ExitStack() as stack:
        running = {}
        for mode, more in modes.items():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stepwire-trace-cost-")))
            server = StepwireServer(model, folder, "--max-num-seqs=128", "--max-model-len=512", *flags, *more)
            running[mode] = stack.enter_context(closing(server))
            server.wait_ready()
        yield running


def _quartiles(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [round(ordered[round(share * (len(ordered) - 1))], 4) for share in (0.25, 0.5, 0.75)]


if __name__ == "__main__":
    sys.exit(main())
