"""Whether every request has one whole trace, whatever happens to it.

500 mixed requests against a group of two simulated devices with few KV blocks and a short queue: plain ones, several
sequences, high priorities that preempt others, cancels, deadlines, refusals at the door and by the queue; meanwhile
one worker after the other is killed, and comes back. Services and client send their spans to the receiver of
`stepwire.traces`; afterwards each trace is held against what the client saw.

`complete`: share of requests with exactly one trace, one span of each side of the call and of the request, and the
right status on all three; of a call whose deadline passed before the service could begin with it those of the call
alone. `orphans`: spans whose parent nobody sent. `sum_error_ok`: share of traces whose parts add up
to the latency of the call as the scheduler's RPC span has it, within 2 % + 1 ms. `attempts`: share of those that ran
with exactly one attempt span for each rank in each epoch in which the client or a worker shows that they ran.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from benchmarks.report import Bar, report
from stepwire.rpc.environment import prepare_grpc

prepare_grpc()

from benchmarks.peers.event_loop import runner  # noqa: E402
from benchmarks.peers.processes import close_on_sigterm  # noqa: E402
from benchmarks.ready import demo_model_path  # noqa: E402
from benchmarks.tracing.check import Epochs, Verdict, check  # noqa: E402
from benchmarks.tracing.collector import receiving  # noqa: E402
from benchmarks.tracing.load import Ask, Outcome, make_asks, send  # noqa: E402
from benchmarks.tracing.services import Services, serving  # noqa: E402
from stepwire.client import AsyncClient  # noqa: E402
from stepwire.telemetry import names  # noqa: E402
from stepwire.telemetry.logs import configure_logging  # noqa: E402
from stepwire.telemetry.setup import Telemetry  # noqa: E402
from stepwire.traces import TraceStore  # noqa: E402

NUM_REQUESTS, QUICK_REQUESTS = 500, 150
NUM_RANKS = 2
SCHEDULER = (
    "--max-model-len=1024",
    "--max-num-seqs=32",
    "--max-num-batched-tokens=256",
    "--num-kv-blocks=128",
    "--max-queued-requests=100",
    "--trace-step-ratio=0.05",
)
# When workers are killed: after so many ends of requests, as a share of all.
KILL_AT = (0.25, 0.6)
_DOWN_S = 0.5
_GIVE_UP_S = 180.0
_MAX_FAULTS = 200


def main() -> int:
    """Measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_REQUESTS} requests and not {NUM_REQUESTS}")
    parser.add_argument("--seed", type=int, default=0, help="another mix")
    parser.add_argument("--no-kill", action="store_true", help="spare the worker")
    options = parser.parse_args()
    configure_logging(format="auto", level="warning", service="benchmark")
    close_on_sigterm()
    model = demo_model_path()
    if not model.exists():
        print(f"trace_complete: there is no model at {model}; run `make setup`", file=sys.stderr)
        return 2
    num_requests = QUICK_REQUESTS if options.quick else NUM_REQUESTS
    store = TraceStore(max_traces=20_000, max_spans=1_000_000)
    with receiving(store) as endpoint, tempfile.TemporaryDirectory(prefix="stepwire-traces-") as folder:
        traced = (f"--otlp-endpoint={endpoint}", "--trace-sample-ratio=1")
        with serving(model, Path(folder), NUM_RANKS, SCHEDULER, traced) as services, runner() as loop:
            load = run_load(services, endpoint, num_requests, options.seed, kills=not options.no_kill)
            outcomes, killed_at = loop.run(load)
        # The services have ended, and so sent all that they had.
        verdict = check(store, outcomes, Epochs(NUM_RANKS, killed_at))
    for fault in verdict.faults[:_MAX_FAULTS]:
        print(f"trace_complete: {fault}", file=sys.stderr)
    return report(bars(verdict), figures(verdict, outcomes, store))


async def run_load(
    services: Services, endpoint: str, num_requests: int, seed: int, *, kills: bool
) -> tuple[list[Outcome], list[float]]:
    """Sends the mix; answers what came of each request, and when a worker was killed, on the monotonic clock."""
    telemetry = Telemetry.start(names.SERVICE_CLIENT, otlp_endpoint=endpoint)
    killed_at: list[float] = []
    num_ended, ended = 0, asyncio.Condition()

    async def one(client: AsyncClient, ask: Ask) -> Outcome:
        nonlocal num_ended
        await asyncio.sleep(ask.delay_s)
        outcome = await send(client, telemetry.tracer_provider, ask)
        async with ended:
            num_ended += 1
            ended.notify_all()
        return outcome

    async def kill_and_restart() -> None:
        for number, share in enumerate(KILL_AT):
            async with ended:
                await ended.wait_for(lambda share=share: num_ended >= share * num_requests)
            killed_at.append(time.monotonic())
            services.kill_worker(number % NUM_RANKS)
            await asyncio.sleep(_DOWN_S)
            services.restart_worker(number % NUM_RANKS)

    asks = make_asks(num_requests, random.Random(seed))
    async with AsyncClient(services.target, tracer_provider=telemetry.tracer_provider) as client:
        # A deadline that passed while the connection was made would be no service's to tell of.
        await client.wait_ready()
        tasks = [asyncio.create_task(one(client, ask)) for ask in asks]
        killing = asyncio.create_task(kill_and_restart()) if kills else None
        outcomes = await asyncio.wait_for(asyncio.gather(*tasks), _GIVE_UP_S)
        if killing is not None:
            await killing
    await asyncio.to_thread(telemetry.shutdown)
    return list(outcomes), killed_at


def bars(verdict: Verdict) -> dict[str, Bar]:
    """What must hold."""
    return {
        "complete": Bar(round(verdict.complete, 4), 1.0),
        "orphans": Bar(verdict.num_orphans, 0, "at most"),
        "sum_error_ok": Bar(round(verdict.sum_error_ok, 4), 1.0),
        "attempts": Bar(round(verdict.attempts, 4), 1.0),
    }


def figures(verdict: Verdict, outcomes: list[Outcome], store: TraceStore) -> dict[str, object]:
    """What else is known of the run: a mix that had no preemption, say, shows nothing about one."""
    return {
        "asked": dict(Counter(outcome.ask.kind for outcome in outcomes)),
        "ended": dict(Counter(outcome.reason or "finished" for outcome in outcomes)),
        "traces": store.num_traces,
        "spans": store.num_spans,
        "preempted_requests": verdict.num_preempted,
        "recovered_requests": verdict.num_recovered,
        "step_traces": verdict.num_step_traces,
        "largest_sum_error_ms": round(verdict.largest_sum_error_s * 1e3, 3),
        "client_latency_within": round(verdict.client_latency_within, 4),
        "num_faults": len(verdict.faults),
    }


if __name__ == "__main__":
    sys.exit(main())
