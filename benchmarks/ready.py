"""How long `stepwire serve` takes on the demo model, from the start of its process to health SERVING.

The median of a few starts, each of a process of its own; then one token, so that what a start leaves undone
would show. Nothing is built or downloaded.
"""

import argparse
import contextlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.report import Bar, report
from stepwire.client import Client
from stepwire.supervisor.ports import free_port

ROOT = Path(__file__).resolve().parents[1]
MAX_READY_S = 6.0
_GIVE_UP_S = 120.0
_POLL_S = 0.01


def main() -> int:
    """Runs all and prints the report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=3, help="how many starts; 3 by default")
    parser.add_argument("--model", type=Path, default=demo_model_path(), help="another model than the demo's")
    options = parser.parse_args()
    if not options.model.exists():
        print(f"ready: there is no model at {options.model}; run `make setup`", file=sys.stderr)
        return 2
    runs = [start_once(options.model) for _ in range(options.runs)]
    ready_s, first_token_s = ([round(value, 3) for value in column] for column in zip(*runs, strict=True))
    return report(
        {"ready_s": Bar(median(ready_s), MAX_READY_S, "at most")},
        {"ready_s": ready_s, "first_token_after_ready_s": first_token_s, "model": options.model.name},
    )


def demo_model_path() -> Path:
    """Where the demo model lies, fetched or not."""
    sys.path.insert(0, str(ROOT / "scripts"))
    from fetch_demo_model import model_path

    return model_path()


def start_once(model: Path) -> tuple[float, float]:
    """Seconds until it serves, and from then to the first token of a first request."""
    with tempfile.TemporaryDirectory(prefix="stepwire-ready-") as folder:
        began = time.monotonic()
        with serving(model, Path(folder)) as (process, target):
            wait_serving(target, process, began + _GIVE_UP_S)
            ready_s = time.monotonic() - began
            with Client(target) as client:
                asked = time.monotonic()
                client.complete("The capital of France is", max_tokens=1, temperature=0.0, timeout=60)
                return ready_s, time.monotonic() - asked


@contextlib.contextmanager
def serving(model: Path, folder: Path, *flags: str) -> Iterator[tuple["subprocess.Popen[bytes]", str]]:
    """`stepwire serve` with its own defaults but for `flags`, ended with the block; with its address."""
    port = free_port()
    arguments = ["serve", "--model", str(model), "--port", str(port), "--log-dir", str(folder), "--log-level=warning"]
    process = subprocess.Popen([sys.executable, "-m", "stepwire.cli.main", *arguments, *flags], start_new_session=True)
    try:
        yield process, f"127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def wait_serving(target: str, process: "subprocess.Popen[bytes]", deadline: float) -> None:
    """Returns when its health says SERVING."""
    with grpc.insecure_channel(target, options=[("grpc.max_reconnect_backoff_ms", 50)]) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while True:
            with contextlib.suppress(grpc.RpcError):
                answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=1, wait_for_ready=True)
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            if process.poll() is not None:
                raise SystemExit(f"ready: stepwire serve ended with status {process.returncode}")
            if time.monotonic() > deadline:
                raise SystemExit(f"ready: stepwire serve did not serve within {_GIVE_UP_S:g} s")
            time.sleep(_POLL_S)


if __name__ == "__main__":
    sys.exit(main())
