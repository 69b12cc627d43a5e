"""How many tokens a second go through the door: 256 streams over gRPC, text on, against a device that takes no time.

`stepwire serve --device sim` with the demo model's tokenizer, and this file's own second process as the
client: the asyncio client of the package, one event for each message, with the environment that the
`stepwire` command sets. All of it on two cores.
A message that holds several tokens, because its client was behind, counts as one.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.report import Bar, report

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from fetch_demo_model import model_path  # noqa: E402

from stepwire.client import AsyncClient, Finished, Output  # noqa: E402
from stepwire.rpc.environment import prepare_grpc  # noqa: E402
from stepwire.rpc.run import run  # noqa: E402
from stepwire.supervisor.ports import free_port  # noqa: E402

NUM_STREAMS, MAX_TOKENS = 256, 600
NUM_WARM_UP_TOKENS = 20
MIN_TOKENS_PER_S = 20_000.0
NUM_CORES = 2
READY_TIMEOUT_S, END_TIMEOUT_S = 60.0, 30.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def main() -> int:
    """Serves, lets a client process load it, and prints the report."""
    if len(sys.argv) > 1 and sys.argv[1] == "client":
        return run(client(sys.argv[2]))
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:NUM_CORES])
    port = free_port()
    with tempfile.TemporaryDirectory() as log_dir, serving(port, log_dir) as server:
        run_client(port)  # connections, imports and tables are made once
        before = usage_of(server.pid)
        figures = run_client(port)
        after = usage_of(server.pid)
    num_tokens = int(figures["tokens"])
    used = {name: 1e6 * (after[name] - before[name]) / num_tokens for name in after}
    tokens_per_s = figures["messages"] / figures["seconds"]
    print(
        f"{NUM_STREAMS} streams, {num_tokens} tokens in {figures['seconds']:.2f} s: {tokens_per_s:,.0f} messages/s, "
        f"{figures['messages'] / num_tokens:.3f} messages a token"
    )
    for name, value in {**used, "client": figures["cpu_us_per_token"]}.items():
        print(f"  {name}: {value:.1f} us of CPU a token")
    return report(
        {"tokens_per_s": Bar(tokens_per_s, MIN_TOKENS_PER_S)},
        {
            "streams": NUM_STREAMS,
            "tokens": num_tokens,
            "messages_per_token": figures["messages"] / num_tokens,
            "ttft_p50_s": figures["ttft_p50_s"],
            "scheduler_cpu_us_per_token": used["scheduler"],
            "worker_cpu_us_per_token": used["worker"],
            "client_cpu_us_per_token": figures["cpu_us_per_token"],
            "cores": NUM_CORES,
        },
    )


@contextlib.contextmanager
def serving(port: int, log_dir: str) -> Iterator[subprocess.Popen[bytes]]:
    """`stepwire serve` with a simulated device, which ends here."""
    arguments = ["serve", "--model", str(model_path()), "--port", str(port), "--device", "sim"]
    options = [f"--max-num-seqs={NUM_STREAMS}", "--max-num-batched-tokens=2048", "--max-model-len=2048"]
    quiet = ["--log-dir", log_dir, "--log-level", "warning"]
    command = [sys.executable, "-m", "stepwire.cli.main", *arguments, *options, *quiet]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(END_TIMEOUT_S)


def run_client(port: int) -> dict[str, float]:
    """Runs the client process; answers its figures."""
    prepare_grpc()
    command = [sys.executable, "-m", "benchmarks.door_throughput", "client", f"127.0.0.1:{port}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=300, cwd=ROOT)
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


async def client(target: str) -> int:
    """The client process: all streams at once; prints its figures as JSON."""
    async with AsyncClient(target) as api:
        await api.wait_ready(timeout=READY_TIMEOUT_S)
        await asyncio.gather(*(stream(api, index, NUM_WARM_UP_TOKENS) for index in range(NUM_STREAMS)))
        cpu, begin = time.process_time(), time.perf_counter()
        done = await asyncio.gather(*(stream(api, index, MAX_TOKENS) for index in range(NUM_STREAMS)))
        seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    num_tokens = sum(tokens for tokens, _, _ in done)
    if num_tokens != NUM_STREAMS * MAX_TOKENS:
        raise SystemExit(f"{num_tokens} tokens came, not {NUM_STREAMS * MAX_TOKENS}")
    figures = {
        "tokens": num_tokens,
        "messages": sum(messages for _, messages, _ in done),
        "seconds": seconds,
        "ttft_p50_s": sorted(ttft for _, _, ttft in done)[NUM_STREAMS // 2],
        "cpu_us_per_token": 1e6 * cpu / num_tokens,
    }
    print(json.dumps(figures))
    return 0


async def stream(api: AsyncClient, index: int, max_tokens: int) -> tuple[int, int, float]:
    """One request; answers its tokens, messages and time to first token."""
    num_tokens = num_messages = 0
    begin, first = time.perf_counter(), 0.0
    prompt = f"Stream {index}: tell me a story about a small ship that crosses a wide sea, and about its crew."
    async for event in api.generate(prompt, max_tokens=max_tokens, ignore_eos=True, seed=index):
        if isinstance(event, Output):
            if not num_tokens:
                first = time.perf_counter() - begin
            num_tokens += len(event.token_ids)
            num_messages += 1
        elif isinstance(event, Finished) and event.usage.num_output_tokens != num_tokens:
            raise SystemExit(f"{num_tokens} tokens came of {event.usage.num_output_tokens} used")
    return num_tokens, num_messages, first


def usage_of(supervisor: int) -> dict[str, float]:
    """CPU seconds so far of the supervisor's children, by role."""
    usage = {}
    for role in ("scheduler", "worker"):
        for pid in children(supervisor):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if role.encode() in words:
                usage[role] = cpu_seconds(pid)
    return usage


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def cpu_seconds(pid: int) -> float:
    """User and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


if __name__ == "__main__":
    sys.exit(main())
