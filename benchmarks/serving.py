"""`stepwire serve` as a process that a benchmark disturbs."""

import math
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.ready import wait_serving
from stepwire.supervisor.ports import free_port

_START_S, _END_S = 120.0, 60.0
# Until a process stands by, on a machine that does nothing else.
_SETTLE_S = 8.0


@dataclass(frozen=True)
class ServedProcess:
    """A supervisor that serves; `log_path` holds what it and its scheduler say."""

    process: "subprocess.Popen[bytes]"
    target: str
    log_path: Path

    @property
    def pid(self) -> int:
        """Of the supervisor."""
        return self.process.pid

    def check_runs(self) -> None:
        """Raises SystemExit with the end of its log when it has ended."""
        if self.process.poll() is not None:
            tail = self.log_path.read_text(errors="replace")[-2000:]
            raise SystemExit(f"stepwire serve ended with status {self.process.returncode}:\n{tail}")


@contextmanager
def served(model: Path, folder: Path, *flags: str) -> Iterator[ServedProcess]:
    """`stepwire serve`, ready and with processes that stand by; ended with the block."""
    port, log_path = free_port(), folder / "serve.log"
    arguments = ["serve", "--model", str(model), "--port", str(port), "--log-dir", str(folder), *flags]
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "stepwire.cli.main", *arguments], stdout=log, stderr=log, start_new_session=True
        )
    server = ServedProcess(process, f"127.0.0.1:{port}", log_path)
    try:
        wait_serving(server.target, process, time.monotonic() + _START_S)
        time.sleep(_SETTLE_S)
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(_END_S)


def child_pids(supervisor_pid: int, command: str) -> list[int]:
    """Process ids of the children that do the work of a command, one a place: of two, the younger stands by."""
    oldest: dict[str, int] = {}
    for child in Path(f"/proc/{supervisor_pid}/task/{supervisor_pid}/children").read_text().split():
        words = Path(f"/proc/{child}/cmdline").read_bytes().decode().split("\0")
        if "stepwire.cli.main" in words and words[words.index("stepwire.cli.main") + 1] == command:
            place = next((word for word in words if word.startswith("--port=")), "")
            oldest[place] = min(int(child), oldest.get(place, int(child)))
    return sorted(oldest.values())


def worker_pids(supervisor_pid: int) -> list[int]:
    """Process ids of the workers, one a rank."""
    return child_pids(supervisor_pid, "worker")


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The value that so many percent of all do not exceed; None of no values."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]
