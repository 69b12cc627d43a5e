"""`stepwire` commands as processes of their own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from stepwire.cli.errors import CommandError
from stepwire.cli.trace_page import fetch_trace
from stepwire.rpc.channel import channel_options
from stepwire.supervisor.ports import free_port
from stepwire.telemetry.names import SPAN_DECODE, SPAN_WORKER_DECODE
from stepwire.traces import Trace

# Whose spans the trace of a request holds.
SERVICES = {"stepwire-client", "stepwire-scheduler", "stepwire-worker"}

_POLL_S = 0.02
_TIMEOUT_S = 150.0
_MAX_MESSAGE_BYTES = 65_536
# gRPC's own pauses between attempts would be most of what a test waits for a server.
_MAX_BACKOFF_MS = 100
_SERVING = "SERVING"


def command(*arguments: str) -> list[str]:
    """The command line of a `stepwire` command."""
    return [sys.executable, "-m", "stepwire.cli.main", *arguments]


def environment(**settings: str) -> dict[str, str]:
    """This process's environment with just these settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("STEPWIRE_")}
    return {**kept, **settings}


def run(*arguments: str, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end."""
    return subprocess.run(
        command(*arguments), env=environment(), capture_output=True, text=True, timeout=timeout, check=False
    )


@contextmanager
def running(
    arguments: Sequence[str],
    log_path: Path,
    settings: Mapping[str, str] | None = None,
    *,
    prefix: Sequence[str] = (),
) -> Iterator[subprocess.Popen[bytes]]:
    """A command that runs until it is left; its output goes to a file. `prefix` is a command that becomes it."""
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [*prefix, *command(*arguments)],
            env=environment(**(settings or {})),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_serving(target: str, process: subprocess.Popen[bytes], log_path: Path) -> None:
    """Waits until a server says that it serves. Raises AssertionError with its output when it ends instead."""
    deadline = time.monotonic() + _TIMEOUT_S
    while (state := _state(target)) != _SERVING:
        if process.poll() is not None or time.monotonic() > deadline:
            text = f"{target} does not serve, but is {state} (status {process.poll()})"
            raise AssertionError(f"{text}:\n{log_path.read_text()}")
        time.sleep(_POLL_S)


def _state(target: str) -> str:
    """What health says, or why nothing is heard of it; by a connection of its own, which no earlier one holds up."""
    options = [*channel_options(_MAX_MESSAGE_BYTES, _MAX_BACKOFF_MS), ("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(target, options=options) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
        except grpc.RpcError as error:
            return str(error)
        return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


def children(pid: int) -> dict[str, int]:
    """Process ids of a supervisor's children by their command: "scheduler", "worker".

    Of two with one command the younger stands by.
    """
    found: dict[str, int] = {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        words = Path(f"/proc/{child}/cmdline").read_bytes().decode().split("\0")
        if "stepwire.cli.main" in words:  # not before it executes
            command = words[words.index("stepwire.cli.main") + 1]
            found[command] = min(int(child), found.get(command, int(child)))
    return found


def wait_gone(pids: Sequence[int], within_s: float = 30.0) -> None:
    """Waits until processes have ended. Raises AssertionError naming those that have not."""
    deadline = time.monotonic() + within_s
    while left := [pid for pid in pids if _is_running(pid)]:
        assert time.monotonic() < deadline, f"still running: {left}"
        time.sleep(_POLL_S)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@dataclass(frozen=True)
class ServeStack:
    """`stepwire serve` that serves."""

    process: subprocess.Popen[bytes]
    target: str
    log_path: Path

    @property
    def pids(self) -> dict[str, int]:
        """Of its scheduler and its worker."""
        return children(self.process.pid)

    @property
    def output(self) -> str:
        """What it has said so far."""
        return self.log_path.read_text()

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to the supervisor."""
        self.process.send_signal(number)


@contextmanager
def serving(model: Path, folder: Path, *flags: str) -> Iterator[ServeStack]:
    """`stepwire serve` on a free port, ready."""
    port, log_path = free_port(), folder / "serve.log"
    arguments = ["serve", "--model", str(model), "--port", str(port), "--log-dir", str(folder / "logs"), "--no-standby"]
    limits = ["--max-num-batched-tokens", "64", "--max-num-seqs", "8", "--kv-cache-bytes", "32MiB", "--threads", "1"]
    with running([*arguments, *limits, *flags], log_path) as process:
        stack = ServeStack(process, f"127.0.0.1:{port}", log_path)
        wait_serving(stack.target, process, log_path)
        yield stack


def wait_for_trace(page: int, request_id: str) -> Trace:
    """The trace of a request of two tokens or more, once all services have sent all spans of it."""
    deadline = time.monotonic() + 20
    while True:
        try:
            trace = fetch_trace(("127.0.0.1", page), request_id)
        except CommandError:
            trace = None
        if trace is not None and _is_whole(trace):
            return trace
        assert time.monotonic() < deadline, f"no whole trace: {trace and trace.tree}"
        time.sleep(_POLL_S)


def _is_whole(trace: Trace) -> bool:
    known = {span.span_id for span in trace.spans}
    has_parents = all(span.parent_id in known for span in trace.spans if span.parent_id)
    has_ends = {SPAN_DECODE, SPAN_WORKER_DECODE} <= {span.name for span in trace.spans}
    return set(trace.services) >= SERVICES and has_parents and has_ends
