"""The worker as a process: start, signals, exit codes."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from stepwire.rpc.channel import create_channel
from stepwire.rpc.errors import from_rpc_error
from stepwire.v1.worker_pb2_grpc import WorkerServiceStub
from tests.support.fake_runtime import FakeRuntime
from tests.support.worker_server import RunningWorker, first_step, new_sequence
from worker_service.main import ExitCode

ROOT = Path(__file__).resolve().parents[2]

# argv: port, and what step 1 does: nothing, "hang", "slow" or "break".
SCRIPT = """
import sys, threading, time
from stepwire.rpc.run import run
from tests.support.fake_runtime import FakeRuntime
from worker_service.main import serve
from worker_service.settings import WorkerSettings

class Runtime(FakeRuntime):
    def execute(self, step, on_launch):
        output = super().execute(step, on_launch)
        print("executing", flush=True)
        if sys.argv[2] == "hang":
            threading.Event().wait()
        if sys.argv[2] == "slow":
            time.sleep(1.5)
        if sys.argv[2] == "break":
            raise SystemExit("the device fell off the bus")
        return output

def make_runtime(settings):
    if sys.argv[2] == "unmakeable":
        raise OSError("libcuda.so is missing")
    return Runtime()

settings = WorkerSettings(port=int(sys.argv[1]), log_format="json")
sys.exit(run(serve(settings, make_runtime=make_runtime)))
"""


@contextmanager
def process(mode: str = "", port: int = 0) -> Iterator["subprocess.Popen[str]"]:
    """A worker process, killed at the end if it still runs."""
    worker = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(port), mode],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        yield worker
    finally:
        worker.kill()
        worker.communicate()


def port_of(worker: "subprocess.Popen[str]") -> int:
    """Waits until the worker listens."""
    assert worker.stderr is not None
    for line in worker.stderr:
        record = json.loads(line)
        if record["message"] == "listening":
            return int(record["address"].rsplit(":", 1)[1])
    raise AssertionError("the worker ended before it listened")


@contextmanager
def ready(worker: "subprocess.Popen[str]") -> Iterator[RunningWorker]:
    channel = create_channel(f"127.0.0.1:{port_of(worker)}", max_message_bytes=2**20)
    yield RunningWorker(None, FakeRuntime(), channel, WorkerServiceStub(channel), 0)  # type: ignore[arg-type]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_an_idle_worker_with_success(number: signal.Signals) -> None:
    with process() as worker:
        port_of(worker)
        worker.send_signal(number)
        assert worker.wait(20) == ExitCode.STOPPED


async def test_a_signal_lets_the_step_in_hand_be_answered() -> None:
    # The step takes longer than what answers in flight are given.
    with process("slow") as worker, ready(worker) as running:
        await running.walk_to_ready()
        stream = await running.open_stream()
        await stream.send(first_step(1, new_sequence(1, [5, 6])))
        assert worker.stdout is not None
        assert worker.stdout.readline() == "executing\n"
        worker.send_signal(signal.SIGTERM)
        assert (await stream.receive()).step_id == 1
        assert from_rpc_error(await stream.error()).reason == "DRAINING"
        assert worker.wait(20) == ExitCode.STOPPED
        await running.channel.close()


async def test_a_second_signal_ends_a_hung_worker_at_once() -> None:
    with process("hang") as worker, ready(worker) as running:
        await running.walk_to_ready()
        stream = await running.open_stream()
        await stream.send(first_step(1, new_sequence(1, [5, 6])))
        assert worker.stdout is not None and worker.stderr is not None
        assert worker.stdout.readline() == "executing\n"
        worker.send_signal(signal.SIGTERM)
        assert any(json.loads(line)["message"] == "stopping" for line in worker.stderr)
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(20) == 128 + signal.SIGTERM
        await running.channel.close()


async def test_a_broken_device_ends_the_process_after_its_cause_is_told() -> None:
    with process("break") as worker, ready(worker) as running:
        await running.walk_to_ready()
        stream = await running.open_stream()
        await stream.send(first_step(1, new_sequence(1, [5, 6])))
        failure = from_rpc_error(await stream.error())
        assert failure.code is grpc.StatusCode.UNAVAILABLE
        assert "the device fell off the bus" in failure.metadata["cause"]
        assert worker.wait(20) == ExitCode.DEVICE_FAILED
        await running.channel.close()


def test_a_runtime_that_cannot_be_made_ends_the_process() -> None:
    with process("unmakeable") as worker:
        assert worker.wait(20) == ExitCode.DEVICE_FAILED
        assert worker.stderr is not None
        assert "libcuda.so is missing" in worker.stderr.read()


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with process(port=port) as worker:
            assert worker.wait(20) == ExitCode.CANNOT_START
            assert worker.stderr is not None
            assert f"127.0.0.1:{port} is in use" in worker.stderr.read()
