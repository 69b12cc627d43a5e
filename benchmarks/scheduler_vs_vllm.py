"""The scheduler's cost of a step against vLLM's own V1 scheduler: the same trace, the model stubbed.

Both hash blocks, check for stops, apply outputs and keep two steps in flight; ours also builds and
serialises the step's message and parses the answer's, which is what crosses to the workers. vLLM
runs in the peer's own environment (`make peers`).
"""

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

from benchmarks.report import Bar, report
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.plan import StepPlan
from scheduler_service.core.request import Request
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.engine.values import Sampling
from scheduler_service.rpc.worker_messages import step_message, step_result
from stepwire.v1 import worker_pb2 as pb

NUM_REQUESTS = 1500
MAX_RUNNING = 256
STOP_TOKEN_ID = 2
SAMPLING = Sampling(0.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0, (STOP_TOKEN_ID,), 0, 0, None)
ROUNDS = 3
PEERS = Path(os.environ.get("STEPWIRE_PEERS", Path.home() / ".cache/stepwire/peers"))


def make_trace() -> dict[str, Any]:
    """Requests that arrive at once: prompts of 128 tokens on average, half with one of eight long shared prefixes."""
    random.seed(0)
    prefixes = [[random.randrange(3, 1000) for _ in range(96)] for _ in range(8)]
    requests = []
    for _ in range(NUM_REQUESTS):
        own = [random.randrange(3, 1000) for _ in range(random.randrange(16, 176))]
        prompt = random.choice(prefixes) + own[: len(own) // 2] if random.random() < 0.5 else own
        max_tokens = random.randrange(64, 257)
        stop_at = random.randrange(32, max_tokens) if random.random() < 0.5 else max_tokens + 1
        requests.append({"prompt": prompt, "max_tokens": max_tokens, "stop_at": stop_at})
    return {
        "requests": requests,
        "max_running": MAX_RUNNING,
        "max_step_tokens": 2048,
        "block_size": 16,
        "num_blocks": 8192,
        "vocab_size": 2000,
        "stop_token_id": STOP_TOKEN_ID,
    }


class StubWorker:
    """Answers a step's message as a worker would, with tokens that follow from the trace."""

    def __init__(self, trace: dict[str, Any]) -> None:
        self._rows = trace["requests"]
        self._row_of: dict[int, int] = {}
        self._known: dict[int, int] = {}
        self._stopped: set[int] = set()

    def answer(self, step: pb.Step) -> pb.StepResult:
        """The result of a step."""
        for new in step.new_sequences:
            self._row_of[new.sequence_id] = int(new.request_id)
            self._known[new.sequence_id] = len(new.token_ids)
        result = pb.StepResult(epoch=step.epoch, step_id=step.step_id)
        columns = zip(step.sequence_ids, step.scheduled_token_counts, step.computed_token_counts, strict=True)
        for sequence_id, num, computed in columns:
            if computed + num != self._known[sequence_id] or sequence_id in self._stopped:
                continue
            index = self._row_of[sequence_id]
            row = self._rows[index]
            done = self._known[sequence_id] - len(row["prompt"])
            self._known[sequence_id] += 1
            result.sequence_ids.append(sequence_id)
            if done + 1 == row["stop_at"]:
                self._stopped.add(sequence_id)
                result.token_ids.append(STOP_TOKEN_ID)
                result.stopped_sequence_ids.append(sequence_id)
            else:
                result.token_ids.append(3 + (index * 31 + done) % 1000)
        return result


def run_ours(trace: dict[str, Any]) -> dict[str, float]:
    """Drives the core and the conversions around it until every request has ended."""
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=trace["num_blocks"],
            block_size=trace["block_size"],
            max_running=trace["max_running"],
            max_step_tokens=trace["max_step_tokens"],
            max_queued_requests=1_000_000,
            max_queued_tokens=1_000_000_000,
        ),
        time.monotonic,
    )
    worker = StubWorker(trace)
    add_us = []
    for index, row in enumerate(trace["requests"]):
        request = Request(str(index), row["prompt"], row["max_tokens"], sampling=SAMPLING)
        began = time.perf_counter_ns()
        scheduler.add_request(request)
        add_us.append((time.perf_counter_ns() - began) / 1e3)
    samples: list[list[float]] = []
    blocks: list[int] = []
    in_flight: deque[tuple[StepPlan, bytes, list[float]]] = deque()
    num_steps = 0
    while True:
        began = time.perf_counter_ns()
        plan = scheduler.schedule()
        planned = time.perf_counter_ns()
        if plan is not None:
            message = step_message(plan, 1).SerializeToString()
            sent = time.perf_counter_ns()
            num_steps += 1
            blocks.append(trace["num_blocks"] - scheduler.num_free_blocks)
            answer = worker.answer(pb.Step.FromString(message)).SerializeToString()
            in_flight.append((plan, answer, [(planned - began) / 1e3, (sent - planned) / 1e3]))
        if len(in_flight) == 2 or plan is None:
            if not in_flight:
                break
            plan, answer, times = in_flight.popleft()
            began = time.perf_counter_ns()
            result = step_result(pb.StepResult.FromString(answer))
            parsed = time.perf_counter_ns()
            scheduler.apply(result)
            times += [(parsed - began) / 1e3, (time.perf_counter_ns() - parsed) / 1e3]
            if len(plan.sequence_ids) == trace["max_running"]:
                samples.append(times)
    scheduler.check_integrity()
    names = ("schedule_us", "serialise_us", "parse_us", "apply_us")
    return {
        **{name: statistics.median(s[i] for s in samples) for i, name in enumerate(names)},
        "step_us": statistics.median(map(sum, samples)),
        "add_us": statistics.median(add_us),
        "full_steps": len(samples),
        "steps": num_steps,
        "hit_rate": scheduler.stats.prefix_hit_tokens / scheduler.stats.prefix_query_tokens,
        "peak_blocks": max(blocks),
        "mean_blocks": statistics.mean(blocks),
    }


def run_vllm(trace: dict[str, Any]) -> dict[str, float] | None:
    """The peer's figures; None when it is not built."""
    python = PEERS / "vllm/bin/python"
    if not python.exists():
        print("the vLLM peer is not built: run `make peers`", file=sys.stderr)
        return None
    script = Path(__file__).parent / "peers/vllm_scheduler.py"
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(trace, file)
        file.flush()
        run = subprocess.run([python, script, file.name], stdout=subprocess.PIPE, text=True, check=True)
    figures: dict[str, float] = json.loads(run.stdout.splitlines()[-1])
    return figures


def main() -> int:
    """Measures in interleaved rounds and compares the medians."""
    trace = make_trace()
    ours, theirs = [], []
    for _ in range(ROUNDS):
        ours.append(run_ours(trace))
        peer = run_vllm(trace)
        if peer is None:
            break
        theirs.append(peer)

    def median(runs: list[dict[str, float]], key: str) -> float:
        return statistics.median(run[key] for run in runs)

    def ratio(key: str) -> float | None:
        return median(ours, key) / median(theirs, key) if theirs else None

    bars = {
        "time_ratio": Bar(ratio("step_us"), 0.3, "at most"),
        "hit_rate_ratio": Bar(ratio("hit_rate"), 1.0),
        "blocks_ratio": Bar(ratio("mean_blocks"), 1.0, "at most"),
    }
    figures = {
        "ours": {key: round(median(ours, key), 3) for key in ours[0]},
        "vllm": {key: round(median(theirs, key), 3) for key in theirs[0]} if theirs else None,
        "peak_blocks_ratio": ratio("peak_blocks"),
    }
    return report(bars, figures)


if __name__ == "__main__":
    sys.exit(main())
