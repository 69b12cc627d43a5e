"""How quickly a worker that was killed has its weights again: mapped from the restart store, against a warm load.

Every load is that of a worker process of its own, from LoadModel's begin to its end: headers, hashes and packing
included. "Warm" has the checkpoint in the page cache and no store. A first worker fills the store and is killed with
SIGKILL; those that restart find the page cache without the checkpoint's tensors, of which the kernel's count
(/proc/self/io) shows that they read none; pages of libraries that a full machine dropped are in that count too. Warm
loads and restarts take turns, medians of three.

Run by benchmarks.load_speed, or by itself.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.loading.checkpoint import drop_cache, fill_cache, make_checkpoint
from benchmarks.report import Bar, report
from loader.checkpoint import open_checkpoint

ROUNDS = 3


def main() -> int:
    """Measures and reports; with a second argument it is the worker."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gib", type=float, default=4.0, help="least size of the checkpoint; 4 by default")
    parser.add_argument("--keep", action="store_true", help="leave the checkpoint for another run")
    parser.add_argument("--load", nargs=2, metavar=("FOLDER", "STORE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load is not None:
        load(*options.load)
        return 0
    folder = make_checkpoint(options.gib)
    try:
        return report(*measure(folder, None))
    finally:
        if not options.keep:
            shutil.rmtree(folder)


def measure(folder: Path, warm_s: float | None) -> tuple[Mapping[str, Bar], dict[str, Any]]:
    """Bars and figures of the checkpoint in `folder`. `warm_s` is how long it takes to read it alone, unpacked."""
    store = Path(f"/dev/shm/stepwire-bench-{os.getpid()}")
    # A store that is left behind is memory that is left behind: an end by SIGTERM, as of `timeout`, removes it too.
    handler = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        fill_cache(folder)
        first = worker_load(folder, str(store))
        warm, restarts = [], []
        for _ in range(ROUNDS):
            fill_cache(folder)
            warm.append(worker_load(folder, "off"))
            drop_cache(folder)
            open_checkpoint(folder)  # the headers alone, which the scheduler of a restarted worker has read too
            restarts.append(worker_load(folder, str(store)))
    finally:
        shutil.rmtree(store, ignore_errors=True)
        signal.signal(signal.SIGTERM, handler)
    if any("read" in dict(found["phases"]) for found in restarts):
        raise RuntimeError("a restarted worker did not find its weights: was the code changed meanwhile?")
    seconds = {name: median(found["seconds"] for found in loads) for name, loads in (("w", warm), ("r", restarts))}
    bars = {
        "restart_disk_bytes": Bar(median(found["disk_bytes"] for found in restarts), 0, "at most"),
        "restart_vs_warm": Bar(round(seconds["r"] / seconds["w"], 3), 0.3, "at most"),
        "load_phases_share": Bar(min(found["phases_share"] for found in (first, *warm, *restarts)), 0.99),
    }
    figures: dict[str, Any] = {
        "restart_disk_bytes_all": [found["disk_bytes"] for found in restarts],
        "restart_s": round(seconds["r"], 3),
        "restart_warm_worker_s": round(seconds["w"], 3),
        "restart_weight_bytes": first["weight_bytes"],
        "restart_mapped_gb_s": round(first["weight_bytes"] / seconds["r"] / 1e9, 2),
        "restart_phases_s": restarts[-1]["phases"],
        "restart_first_phases_s": first["phases"],
        "restart_warm_phases_s": warm[-1]["phases"],
        "restart_first_peak_over_weights": round(first["peak_bytes"] / first["weight_bytes"], 3),
    }
    if warm_s is not None:
        figures["restart_vs_warm_read"] = round(seconds["r"] / warm_s, 3)
    return bars, figures


def worker_load(folder: Path, store: str) -> dict[str, Any]:
    """What a worker process tells of its load; it is then killed."""
    command = [sys.executable, "-m", "benchmarks.load_speed_restart", "--load", str(folder), store]
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert worker.stdout is not None
        answer = worker.stdout.readline()
        if not answer:
            raise RuntimeError(f"a worker ended with {worker.wait()}")
        found: dict[str, Any] = json.loads(answer)
        return found
    finally:
        worker.kill()
        worker.communicate()


def load(folder: str, store: str) -> None:
    """Is a worker that loads, and waits to be killed."""
    import time

    from loader.shares import RankPlace
    from stepwire.telemetry.logs import configure_logging
    from stepwire.telemetry.names import SERVICE_WORKER
    from worker_service.runtime.restart_store import RestartStore
    from worker_service.runtime.worker import WorkerRuntime
    from worker_service.settings import WorkerSettings

    configure_logging(level="warning", service=SERVICE_WORKER)  # to standard error
    settings = WorkerSettings(restart_store=store)
    runtime = WorkerRuntime(settings, RestartStore.of_settings(settings.restart_store, settings.restart_store_bytes))
    runtime.init_device(RankPlace())
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins here
    resident, read_before = _number("status", "VmRSS") * 1024, _number("io", "read_bytes")
    begin = time.perf_counter()
    summary = runtime.load_model(Path(folder), "bfloat16", lambda *_: None, lambda: False)
    seconds = time.perf_counter() - begin
    answer = {
        "seconds": seconds,
        "weight_bytes": summary.weight_bytes,
        "mapped_bytes": summary.mapped_bytes,
        "disk_bytes": _number("io", "read_bytes") - read_before,
        "peak_bytes": _number("status", "VmHWM") * 1024 - resident,
        "phases": [[phase.name, round(phase.duration_ns / 1e9, 3)] for phase in summary.phases],
        "phases_share": round(sum(phase.duration_ns for phase in summary.phases) / 1e9 / seconds, 4),
    }
    print(json.dumps(answer), flush=True)
    sys.stdin.readline()


def _number(file: str, key: str) -> int:
    for line in Path("/proc/self", file).read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == key:
            return int(rest.split()[0])
    raise KeyError(key)


if __name__ == "__main__":
    sys.exit(main())
