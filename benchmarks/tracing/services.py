"""A scheduler and its workers as processes, on a simulated device: workers can be killed, and come back."""

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from stepwire.supervisor.ports import free_port

_READY_TIMEOUT_S, _END_TIMEOUT_S = 180.0, 20.0
_POLL_S = 0.02
SIMULATED = ("--device=sim", "--sim-latency-s=0.004")


class Services:
    """Started by `serving`. `target` is where clients find the scheduler."""

    def __init__(
        self,
        model: Path,
        folder: Path,
        num_ranks: int,
        flags: Sequence[str],
        more: Sequence[str],
        *,
        device: Sequence[str] = SIMULATED,
        program: str = "stepwire.cli.main",
    ) -> None:
        """`flags` are the scheduler's alone, `device` the workers', `more` those of all; `program` is what is run."""
        port, ports = free_port(), [free_port() for _ in range(num_ranks)]
        self.target = f"127.0.0.1:{port}"
        self._folder, self._program = folder, program
        self._workers = [["worker", f"--port={number}", *device, *more] for number in ports]
        addresses = [f"--workers=127.0.0.1:{number}" for number in ports]
        scheduler = ["scheduler", f"--model={model}", f"--port={port}", f"--pp={num_ranks}", *addresses, *flags, *more]
        self._processes = [self._start(arguments) for arguments in (*self._workers, scheduler)]

    @property
    def pids(self) -> list[int]:
        """Its processes."""
        return [process.pid for process in self._processes]

    def kill_worker(self, rank: int) -> None:
        """SIGKILL for one worker."""
        self._processes[rank].kill()
        self._processes[rank].wait()

    def restart_worker(self, rank: int) -> None:
        """Starts a worker anew in a killed one's place."""
        self._processes[rank] = self._start(self._workers[rank])

    def wait_ready(self) -> None:
        """Returns when the scheduler serves. Raises SystemExit when it does not."""
        deadline = time.monotonic() + _READY_TIMEOUT_S
        with grpc.insecure_channel(self.target, options=[("grpc.max_reconnect_backoff_ms", 50)]) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while True:
                with contextlib.suppress(grpc.RpcError):
                    if stub.Check(health_pb2.HealthCheckRequest(), timeout=1).status == 1:
                        return
                if self._processes[-1].poll() is not None or time.monotonic() > deadline:
                    said = (self._folder / "scheduler.log").read_text(errors="replace")
                    raise SystemExit(f"the scheduler does not serve: {said.strip()[-2000:]}")
                time.sleep(_POLL_S)

    def close(self) -> None:
        """Ends the scheduler, which sends its last spans, and then the workers."""
        for process in reversed(self._processes):
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_TIMEOUT_S)
            process.kill()
            process.wait()

    def _start(self, arguments: Sequence[str]) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", self._program, *arguments, "--log-level=warning"]
        with (self._folder / f"{arguments[0]}.log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)


@contextmanager
def serving(
    model: Path, folder: Path, num_ranks: int, flags: Sequence[str], more: Sequence[str], **how: Any
) -> Iterator[Services]:
    """Services that are ready, ended with the block. See `Services`."""
    services = Services(model, folder, num_ranks, flags, more, **how)
    try:
        services.wait_ready()
        yield services
    finally:
        services.close()
