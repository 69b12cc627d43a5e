"""What a scheduler that is killed costs: SIGKILL while 16 streams run; its supervisor starts another one.

Ready is the time from the kill to health SERVING: the new scheduler takes over the worker, whose weights stay loaded;
what its log says of loads, and the worker's process id, show that none was read. The clients go on by themselves with
what they hold; every stream is compared, token by token and position by position, with an undisturbed run.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.ready import demo_model_path
from benchmarks.recovery import LIMITS, NUM_STREAMS, Job, Outcome, follow, make_jobs
from benchmarks.report import Bar, report
from benchmarks.serving import ServedProcess, child_pids, served, worker_pids
from stepwire.client import AsyncClient

NUM_KILLS, NUM_QUICK_KILLS = 10, 3
MAX_READY_S = 2.0
LEAST_GAP_S, MOST_GAP_S = 6.0, 9.0
_POLL_S = 0.01


@dataclass(slots=True)
class Restarts:
    """What was seen."""

    outcome: Outcome = field(default_factory=Outcome)
    ready_s: list[float] = field(default_factory=list)
    pids: list[list[int]] = field(default_factory=list)
    loads: list[dict[str, object]] = field(default_factory=list)

    @property
    def weight_bytes_read(self) -> int:
        """Bytes that schedulers after the first had workers load."""
        return sum(int(str(load["weight_bytes"])) for load in self.loads[1:] if not load["already_loaded"])


def main() -> int:
    """Runs all and prints the report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help=f"{NUM_QUICK_KILLS} kills, not {NUM_KILLS}")
    parser.add_argument("--seed", type=int, default=1, help="of the moments; 1 by default")
    options = parser.parse_args()
    model = demo_model_path()
    if not model.exists():
        print(f"scheduler_restart: there is no model at {model}; run `make setup`", file=sys.stderr)
        return 2
    seen = measure(model, NUM_QUICK_KILLS if options.quick else NUM_KILLS, random.Random(options.seed))
    problems, streams = seen.outcome.problems(), seen.outcome.streams
    bars = {
        "ready_s": Bar(max(seen.ready_s), MAX_READY_S, "at most"),
        "weight_bytes_read": Bar(float(seen.weight_bytes_read), 0.0, "at most"),
        "complete": Bar((len(streams) - len(problems)) / len(streams) if streams else None, 1.0),
    }
    figures = {
        "ready_s": [round(seconds, 3) for seconds in seen.ready_s],
        "streams": len(streams),
        "loads": len(seen.loads),
        "worker_kept": all(pids == seen.pids[0] for pids in seen.pids),
        "problems": problems[:5],
    }
    return report(bars, figures)


def measure(model: Path, num_kills: int, r: random.Random) -> Restarts:
    """Serves the model, and kills its scheduler."""
    with (
        tempfile.TemporaryDirectory(prefix="stepwire-restart-") as folder,
        served(model, Path(folder), *LIMITS) as server,
    ):
        seen = asyncio.run(disturb(server, num_kills, r))
        lines = server.log_path.read_text(errors="replace").splitlines()
    records = [json.loads(line) for line in lines if line.startswith("{")]
    seen.loads = [record for record in records if record.get("message") == "model_loaded"]
    return seen


async def disturb(server: ServedProcess, num_kills: int, r: random.Random) -> Restarts:
    """An undisturbed run, then the same requests while schedulers are killed."""
    seen = Restarts()
    jobs = make_jobs(r)
    async with AsyncClient(server.target) as client:
        undisturbed = await asyncio.gather(*(follow(client, job) for job in jobs))
        seen.outcome.expected = {stream.job: stream.token_ids for stream in undisturbed}
        is_over = asyncio.Event()
        loads = [
            asyncio.create_task(keep_streaming(client, jobs, i, seen.outcome, is_over)) for i in range(NUM_STREAMS)
        ]
        for _ in range(num_kills):
            await asyncio.sleep(r.uniform(LEAST_GAP_S, MOST_GAP_S))
            seen.pids.append(worker_pids(server.pid))
            (scheduler,) = child_pids(server.pid, "scheduler")
            os.kill(scheduler, signal.SIGKILL)
            seen.ready_s.append(await ready_after(server, time.monotonic()))
        await asyncio.sleep(1.0)
        seen.pids.append(worker_pids(server.pid))
        is_over.set()
        await asyncio.gather(*loads)
    return seen


async def keep_streaming(
    client: AsyncClient, jobs: Sequence[Job], first: int, outcome: Outcome, is_over: asyncio.Event
) -> None:
    """One stream after another; one that had not begun when the service was lost is begun again."""
    number = first
    while not is_over.is_set():
        stream = await follow(client, jobs[number % len(jobs)])
        if stream.error and not stream.token_ids:
            await asyncio.sleep(0.1)
            continue
        outcome.streams.append(stream)
        number += NUM_STREAMS + 1


async def ready_after(server: ServedProcess, killed_at: float) -> float:
    """Seconds from a kill until another scheduler says SERVING."""
    async with grpc.aio.insecure_channel(server.target, options=[("grpc.max_reconnect_backoff_ms", 50)]) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while True:
            server.check_runs()
            try:
                answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=2, wait_for_ready=True)
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return time.monotonic() - killed_at
            except grpc.RpcError:
                pass
            await asyncio.sleep(_POLL_S)


if __name__ == "__main__":
    sys.exit(main())
