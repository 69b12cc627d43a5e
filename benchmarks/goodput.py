"""How much of an overload is served in time: our order in the queue against first come, first served.

Virtual time, the core itself. Arrivals are those of two production services, sped up to 1.2 times what the
device can serve. A request is good when its whole answer comes within five times the latency that it would
have alone. Both sides have the same admission, and end what has expired; neither knows how long an answer gets.

That nothing starves is measured apart: the same overload, but of clients with endless patience, so that all is
served in the end, and whoever waits longest under our order may wait only so much longer than under the other.
"""

import argparse
import hashlib
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields, replace
from pathlib import Path

from benchmarks.report import Bar, report
from scheduler_service.core.config import SchedulerConfig
from stepwire.simulation.arrivals import Arrival, read_trace, speed_up
from stepwire.simulation.cost import HARDWARE, CostModel
from stepwire.simulation.records import RequestRecord, summarise
from stepwire.simulation.shapes import SHAPES
from stepwire.simulation.simulator import Assumptions, Simulation, SimulationResult

DATA = Path(__file__).resolve().parents[2] / "shared/data/azure-llm-trace-2023"
TRACES = ("conv", "code")
MODEL, DEVICE = "llama-3.1-8b", "h100"
LOAD = 1.2
PATIENCE = 5.0
HIGH_SHARE = 0.2
BLOCK_SIZE, MAX_RUNNING, MAX_STEP_TOKENS = 16, 256, 512
# What clients ask for when they do not know how long the answer gets.
MAX_TOKENS = 2048
MIN_GOODPUT_RATIO, MAX_WAIT_RATIO = 1.3, 1.25


@dataclass(frozen=True, slots=True)
class Side:
    """What one order made of a trace."""

    num_good: int
    num_good_high: int
    num_finished: int
    num_expired: int
    num_unstarted: int
    longest_wait_s: float
    longest_wait_low_s: float
    num_preemptions: int
    ttft_p50_s: float
    duration_s: float


def main() -> int:
    """Runs all and prints the report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, help="only so many of each trace")
    options = parser.parse_args()
    if not DATA.is_dir():
        print(f"goodput: the traces are not at {DATA}", file=sys.stderr)
        return 2
    with ProcessPoolExecutor(2) as pool:
        rates = dict(zip(TRACES, pool.map(capacity, TRACES, [options.requests] * 2), strict=True))
        jobs = [
            (trace, rates[trace], options.requests, is_ours, has_deadlines)
            for trace in TRACES
            for is_ours in (True, False)
            for has_deadlines in (True, False)
        ]
        keys = [(trace, is_ours, has_deadlines) for trace, _, _, is_ours, has_deadlines in jobs]
        sides = dict(zip(keys, pool.map(serve, *zip(*jobs, strict=True)), strict=True))
    goodputs, waits = {}, {}
    for trace in TRACES:
        goodputs[trace] = sides[trace, True, True].num_good / max(1, sides[trace, False, True].num_good)
        waits[trace] = sides[trace, True, False].longest_wait_s / max(1e-9, sides[trace, False, False].longest_wait_s)
        print(
            f"{trace}: capacity {rates[trace]:.2f} requests/s, goodput x{goodputs[trace]:.3f}, "
            f"longest wait x{waits[trace]:.3f}"
        )
        for key, side in sides.items():
            if key[0] == trace:
                print(f"  {_name(key)}: {', '.join(f'{f.name} {getattr(side, f.name):.6g}' for f in fields(side))}")
    figures = {
        "goodput_ratio": goodputs,
        "max_wait_ratio": waits,
        "capacity_requests_per_s": rates,
        "sides": {_name(key): {f.name: getattr(side, f.name) for f in fields(side)} for key, side in sides.items()},
    }
    bars = {
        "goodput_ratio": Bar(min(goodputs.values()), MIN_GOODPUT_RATIO),
        "max_wait_ratio": Bar(max(waits.values()), MAX_WAIT_RATIO, "at most"),
    }
    return report(bars, figures)


def _name(key: tuple[str, bool, bool]) -> str:
    trace, is_ours, has_deadlines = key
    return f"{trace}, {'ours' if is_ours else 'first come'}{'' if has_deadlines else ', endless patience'}"


def capacity(trace: str, num: int | None) -> float:
    """Requests a second that the device serves when all of the trace is there from the start."""
    arrivals = [replace(arrival, time_s=0.0) for arrival in load_trace(trace, num)]
    result = simulate(arrivals, is_ours=False)
    return len(arrivals) / result.duration_s


def serve(trace: str, rate: float, num: int | None, is_ours: bool, has_deadlines: bool = True) -> Side:
    """One side's run of the overload."""
    arrivals = load_trace(trace, num)
    natural_rate = len(arrivals) / arrivals[-1].time_s
    cost = cost_model()
    wanted = [
        replace(
            arrival,
            priority=int(is_high(trace, index)),
            deadline_s=patience(cost, arrival) if has_deadlines else None,
        )
        for index, arrival in enumerate(speed_up(arrivals, LOAD * rate / natural_rate))
    ]
    return summary(simulate(wanted, is_ours=is_ours))


def patience(cost: CostModel, arrival: Arrival) -> float:
    """How long the client of a request waits for its whole answer, in seconds."""
    return PATIENCE * cost.unloaded_seconds(arrival.num_prompt_tokens, arrival.num_output_tokens, MAX_STEP_TOKENS)


def simulate(arrivals: list[Arrival], *, is_ours: bool) -> SimulationResult:
    """One run. The first come, first served side is the same core, which is told of no priority and no deadline."""
    cost = cost_model()
    config = SchedulerConfig(
        num_blocks=cost.num_blocks(BLOCK_SIZE),
        block_size=BLOCK_SIZE,
        max_running=MAX_RUNNING,
        max_step_tokens=MAX_STEP_TOKENS,
        max_queued_requests=100_000,
        max_queued_tokens=1_000_000_000,
    )
    return Simulation(config, cost, Assumptions(MAX_TOKENS, is_blind=not is_ours)).run(arrivals)


def summary(result: SimulationResult) -> Side:
    """The figures of a run. A request that was never started waited until it expired."""
    records = result.records
    good = [record for record in records if record.is_finished and summarise([record]).num_good]
    waits = {id(record): waited(record) for record in records}
    return Side(
        num_good=len(good),
        num_good_high=sum(record.priority > 0 for record in good),
        num_finished=sum(record.is_finished for record in records),
        num_expired=sum(record.error == "DEADLINE_EXCEEDED" for record in records),
        num_unstarted=sum(record.started_s is None for record in records),
        longest_wait_s=max(waits.values()),
        longest_wait_low_s=max(waits[id(record)] for record in records if record.priority == 0),
        num_preemptions=result.num_preemptions,
        ttft_p50_s=summarise(records).ttft_s.percentiles[50],
        duration_s=result.duration_s,
    )


def waited(record: RequestRecord) -> float:
    """Seconds until its first step, or until it was given up."""
    return (record.end_s or record.arrival_s) - record.arrival_s if record.wait_s is None else record.wait_s


def is_high(trace: str, index: int) -> bool:
    """Whether a row of a trace has high priority."""
    digest = hashlib.sha256(f"{trace} {index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < HIGH_SHARE * 2**64


def load_trace(trace: str, num: int | None) -> list[Arrival]:
    """The arrivals of a trace."""
    return read_trace(DATA / f"{trace}.csv", max_requests=num)


def cost_model() -> CostModel:
    """The model and the device of this benchmark."""
    return CostModel(SHAPES[MODEL], HARDWARE[DEVICE])


if __name__ == "__main__":
    sys.exit(main())
