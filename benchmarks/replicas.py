"""What a second replica is worth: a kill of one that nobody notices, and prompts that find their prefix again.

Requests arrive at a fixed rate at `stepwire serve --replicas 2` on simulated devices, first undisturbed, then with a
SIGKILL to one replica's worker in the middle: no request may fail, and `p99_ratio` is the 99th percentile of their
times over that of the undisturbed run. `affinity_hits` compares the prompt tokens found in prefix caches with those
of two single servers that take the same requests, which share prefixes, in turns.
"""

import argparse
import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.ready import demo_model_path
from benchmarks.report import Bar, report
from benchmarks.serving import percentile, served, worker_pids
from stepwire.client import AsyncClient, StepwireError

RATE, SECONDS, QUICK_SECONDS = 12.0, 60.0, 20.0
NUM_OUT = 48
NUM_PREFIXES, PREFIX_LEN, NUM_SHARED = 16, 512, 360
MAX_P99_RATIO, MIN_AFFINITY = 2.0, 1.5
# A step takes 4 ms; the KV cache of one holds about half of the prefixes beside what runs.
_DEVICE = ("--device=sim", "--sim-latency-s=0.004")
_SIZES = ("--max-model-len=1024", "--num-kv-blocks=320", "--max-num-seqs=16", "--max-num-batched-tokens=512")


@dataclass(slots=True)
class Seen:
    """The times of requests in seconds, the errors of those that failed, and the prompt tokens found and not."""

    seconds: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    num_prompt: int = 0
    num_cached: int = 0


def main() -> int:
    """Measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_SECONDS:g} s of load, not {SECONDS:g}")
    options = parser.parse_args()
    model = demo_model_path()
    if not model.exists():
        print(f"replicas: no model at {model}; run `make setup`", file=sys.stderr)
        return 2
    seconds = QUICK_SECONDS if options.quick else SECONDS
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        undisturbed, killed = measure_kill(model, folder, seconds)
        together, in_turns = measure_affinity(model, folder)
    before, after = percentile(undisturbed.seconds, 99), percentile(killed.seconds, 99)
    hits, turn_hits = together.num_cached / together.num_prompt, in_turns.num_cached / in_turns.num_prompt
    bars = {
        "failed": Bar(len(killed.errors) + len(undisturbed.errors), 0, "at most"),
        "p99_ratio": Bar(after / before if before and after else None, MAX_P99_RATIO, "at most"),
        "affinity_hits": Bar(hits / turn_hits if turn_hits else None, MIN_AFFINITY),
    }
    figures = {
        "requests": len(killed.seconds),
        "p50_s": [percentile(undisturbed.seconds, 50), percentile(killed.seconds, 50)],
        "p99_s": [before, after],
        "hit_share": {"affinity": round(hits, 3), "in_turns": round(turn_hits, 3)},
        "errors": (killed.errors + undisturbed.errors)[:3],
    }
    return report(bars, figures)


def measure_kill(model: Path, folder: Path, seconds: float) -> tuple[Seen, Seen]:
    """The same load without a kill and with one, on one server."""
    with served(model, folder, "--replicas=2", *_DEVICE, *_SIZES) as server:
        undisturbed = asyncio.run(load(server.target, seconds))
        killed = asyncio.run(load(server.target, seconds, kill=worker_pids(server.pid)[0]))
        server.check_runs()
    return undisturbed, killed


def measure_affinity(model: Path, folder: Path) -> tuple[Seen, Seen]:
    """Requests with shared prefixes, on two replicas of one server, and on two servers in turns."""
    prompts = shared_prefixes(random.Random(1))
    with served(model, folder, "--replicas=2", *_DEVICE, *_SIZES) as server:
        together = asyncio.run(ask_all([server.target], prompts))
    with served(model, folder, *_DEVICE, *_SIZES) as one, served(model, folder, *_DEVICE, *_SIZES) as other:
        in_turns = asyncio.run(ask_all([one.target, other.target], prompts))
    return together, in_turns


def shared_prefixes(rng: random.Random) -> list[list[int]]:
    """Prompts of token ids, each of which begins with one of some prefixes."""
    prefixes = [[rng.randrange(100, 40_000) for _ in range(PREFIX_LEN)] for _ in range(NUM_PREFIXES)]
    return [
        rng.choice(prefixes) + [rng.randrange(100, 40_000) for _ in range(rng.randrange(16, 64))]
        for _ in range(NUM_SHARED)
    ]


async def load(target: str, seconds: float, kill: int | None = None) -> Seen:
    """Requests at random times, `RATE` a second; the process `kill` is killed half-way."""
    rng, seen = random.Random(2), Seen()
    async with AsyncClient(target) as client, asyncio.TaskGroup() as tasks:
        began = time.monotonic()
        while (passed := time.monotonic() - began) < seconds:
            if kill is not None and passed > seconds / 2:
                os.kill(kill, signal.SIGKILL)
                kill = None
            prompt = [rng.randrange(100, 40_000) for _ in range(rng.randrange(20, 200))]
            tasks.create_task(ask(client, prompt, seen, NUM_OUT))
            await asyncio.sleep(rng.expovariate(RATE))
    return seen


async def ask_all(targets: Sequence[str], prompts: Sequence[Sequence[int]]) -> Seen:
    """All prompts, four at a time, each to the next target."""
    seen, free = Seen(), asyncio.Semaphore(4)
    clients = [AsyncClient(target) for target in targets]

    async def one(number: int, prompt: Sequence[int]) -> None:
        try:
            await ask(clients[number % len(clients)], prompt, seen, 4)
        finally:
            free.release()

    async with asyncio.TaskGroup() as tasks:
        for number, prompt in enumerate(prompts):
            await free.acquire()
            tasks.create_task(one(number, prompt))
    for client in clients:
        await client.close()
    return seen


async def ask(client: AsyncClient, prompt: Sequence[int], seen: Seen, num_out: int) -> None:
    """One request, to its end."""
    began = time.monotonic()
    try:
        done = await client.complete(list(prompt), max_tokens=num_out, ignore_eos=True, timeout=60.0)
    except StepwireError as error:
        seen.errors.append(f"{error.reason}: {error.message}")
        return
    if done.usage.num_output_tokens != num_out:
        seen.errors.append(f"{done.usage.num_output_tokens} tokens of {num_out}")
    seen.seconds.append(time.monotonic() - began)
    seen.num_prompt += done.usage.num_prompt_tokens
    seen.num_cached += done.usage.num_cached_tokens


if __name__ == "__main__":
    sys.exit(main())
