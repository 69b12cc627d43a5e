"""How fast weights come from disk and from the page cache, against the disk itself and safetensors' load_file.

A checkpoint of at least 4 GB in bf16 is timed until every byte is in its final memory, which was allocated and touched
before: `load_weights` straight into it, and `safetensors.torch.load_file` followed by a copy. The disk's own pace is
that of sequential direct reads of the same files. All take turns, five rounds, medians. Cold is after
posix_fadvise(DONTNEED), checked by mincore. What `load_weights` found out about the disk is forgotten before each load.

Bytes read from disk are the kernel's count (/proc/self/io) over all ranks, which load at the same time in processes of
their own, held against what they need together. Memory is the high-water mark of a rank, beyond what it had before
and what it ends up with.
"""

import argparse
import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.loading.checkpoint import drop_cache, fill_cache, make_checkpoint, shards_of
from benchmarks.report import Bar, report
from loader.checkpoint import Checkpoint, open_checkpoint
from loader.layout import weight_slices
from loader.reading.tuning import storage_of
from loader.shares import RankPlace
from loader.weights import READ_BUFFER_BYTES, LoadReport, load_weights

# Threads and bytes of a read with which the disk is tried.
DISK_SETTINGS = ((1, 16 << 20), (4, 4 << 20))
RANKS = (1, 2, 4)


def main() -> int:
    """Measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gib", type=float, default=4.0, help="least size of the checkpoint; 4 by default")
    parser.add_argument("--rounds", type=int, default=5, help="how often each is timed; 5 by default")
    parser.add_argument("--prepare", action="store_true", help="write the checkpoint and leave it, measure nothing")
    parser.add_argument("--keep", action="store_true", help="leave the checkpoint for another run")
    options = parser.parse_args()
    folder = make_checkpoint(options.gib)
    if options.prepare:
        print(folder)
        return 0
    try:
        return measure(folder, options.rounds)
    finally:
        if not options.keep:
            shutil.rmtree(folder)


def measure(folder: Path, num_rounds: int) -> int:
    """All figures of the checkpoint in `folder`."""
    checkpoint = open_checkpoint(folder)
    speed, figures = speeds(checkpoint, num_rounds)
    ranks = {size: load_ranks(folder, size) for size in RANKS}
    amplification = {
        size: sum(rank["disk_bytes"] for rank in found) / checkpoint.total_bytes for size, found in ranks.items()
    }
    (delivered,) = load_ranks(folder, 1, how="delivered")
    extra = max(delivered["extra_bytes"], *(rank["extra_bytes"] for found in ranks.values() for rank in found))
    largest = max(info.num_bytes for info in checkpoint.tensors.values())
    bars = {
        **speed,
        "read_amplification": Bar(round(max(amplification.values()), 4), 1.05, "at most"),
        "extra_host_bytes": Bar(extra, 2 * READ_BUFFER_BYTES + largest, "at most"),
    }
    figures |= {
        "read_amplification_by_ranks": {str(size): round(value, 4) for size, value in amplification.items()},
        "ranks_wall_s": {str(size): round(max(rank["wall_s"] for rank in found), 3) for size, found in ranks.items()},
        "extra_host_bytes_kept": max(rank["extra_bytes"] for found in ranks.values() for rank in found),
        "extra_host_bytes_delivered": delivered["extra_bytes"],
        "read_buffer_bytes": READ_BUFFER_BYTES,
        "largest_tensor_bytes": largest,
    }
    restart, restart_figures = restart_bars(folder, figures["warm_s"])
    return report({**bars, **restart}, {**figures, **restart_figures})


def speeds(checkpoint: Checkpoint, num_rounds: int) -> tuple[dict[str, Bar], dict[str, Any]]:
    """The rates of all, taking turns."""
    folder = checkpoint.path
    final = {name: torch.zeros(info.shape, dtype=torch.bfloat16) for name, info in checkpoint.tensors.items()}
    found = LoadReport()
    cold: dict[str, Callable[[], None]] = {
        **{f"disk_{threads}x{size >> 20}": _disk_reader(folder, threads, size) for threads, size in DISK_SETTINGS},
        "cold": lambda: load_into(checkpoint, final, found),
        "load_file_cold": lambda: load_file_into(folder, final),  # last: it leaves the cache full
    }
    warm: dict[str, Callable[[], None]] = {
        "load_file_warm": lambda: load_file_into(folder, final),
        "warm": lambda: load_into(checkpoint, final, LoadReport()),
    }
    times: dict[str, list[float]] = {name: [] for name in (*cold, *warm)}
    for number in range(num_rounds):
        for name, run in cold.items():
            drop_cache(folder)
            times[name].append(_seconds(run))
        fill_cache(folder)
        for name, run in warm.items():
            times[name].append(_seconds(run))
        print(f"round {number + 1}:", {name: round(values[-1], 3) for name, values in times.items()}, file=sys.stderr)
    medians = {name: median(values) for name, values in times.items()}
    disk_s = min(value for name, value in medians.items() if name.startswith("disk_"))
    bars = {
        "cold_vs_disk": Bar(round(disk_s / medians["cold"], 3), 0.9),
        "cold_vs_load_file": Bar(round(medians["load_file_cold"] / medians["cold"], 3), 1.8),
        "warm_vs_load_file": Bar(round(medians["load_file_warm"] / medians["warm"], 3), 1.0),
    }
    figures: dict[str, Any] = {f"{name}_s": round(value, 3) for name, value in medians.items()}
    figures["checkpoint_bytes"] = checkpoint.total_bytes
    figures["disk_gb_s"] = round(checkpoint.total_bytes / disk_s / 1e9, 3)
    figures["cold_gb_s"] = round(checkpoint.total_bytes / medians["cold"] / 1e9, 3)
    figures["load_file_vs_disk"] = round(disk_s / medians["load_file_cold"], 3)
    figures["method"], figures["threads"] = found.method, found.threads
    figures["warm_fresh_memory_s"] = round(_seconds(lambda: load_into(checkpoint, None, LoadReport())), 3)
    figures["all_s"] = {name: [round(value, 3) for value in values] for name, values in times.items()}
    return bars, figures


def load_into(checkpoint: Checkpoint, final: Mapping[str, Tensor] | None, found: LoadReport) -> None:
    """All of the checkpoint, by `load_weights`; into memory of its own without `final`."""
    storage_of.cache_clear()
    load_weights(
        checkpoint,
        weight_slices(checkpoint.config, RankPlace()),
        dtype=torch.bfloat16,
        progress=lambda _: None,
        cancelled=lambda: False,
        allocate=None if final is None else lambda want, _: final[want.name],
        report=found,
    )


def load_file_into(folder: Path, final: Mapping[str, Tensor]) -> None:
    """All of the checkpoint, by the library's own function and a copy."""
    for path in shards_of(folder):
        for name, tensor in load_file(path).items():
            final[name].copy_(tensor)


def _disk_reader(folder: Path, num_threads: int, block_bytes: int) -> Callable[[], None]:
    return lambda: read_directly(folder, num_threads, block_bytes)


def read_directly(folder: Path, num_threads: int, block_bytes: int) -> None:
    """The shards from front to back, past the page cache, into buffers that are used again and again."""
    blocks = iter([(path, start) for path in shards_of(folder) for start in range(0, path.stat().st_size, block_bytes)])
    descriptors = {path: os.open(path, os.O_RDONLY | os.O_DIRECT) for path in shards_of(folder)}
    lock = threading.Lock()

    def work() -> None:
        memory = torch.empty(block_bytes + 4096, dtype=torch.uint8)
        skip = -memory.data_ptr() % 4096
        view = memory[skip : skip + block_bytes].numpy().data
        while True:
            with lock:
                block = next(blocks, None)
            if block is None:
                return
            os.preadv(descriptors[block[0]], [view], block[1])

    threads = [threading.Thread(target=work) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for descriptor in descriptors.values():
        os.close(descriptor)


def load_ranks(folder: Path, size: int, how: str = "kept") -> list[dict[str, Any]]:
    """What each of `size` ranks tells that load from a cold cache at the same time."""
    command = [sys.executable, "-m", "benchmarks.loading.rank", str(folder)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(size), how], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for rank in range(size)
    ]
    found = []
    try:
        for rank in ranks:
            assert rank.stdin is not None and rank.stdout is not None
            if rank.stdout.readline() != "ready\n":
                raise RuntimeError(f"a rank ended with {rank.wait()} before it loaded")
        drop_cache(folder)
        for rank in ranks:
            assert rank.stdin is not None
            rank.stdin.write("begin\n")
            rank.stdin.flush()
        for rank in ranks:
            answer, _ = rank.communicate()
            if rank.returncode != 0:
                raise RuntimeError(f"a rank ended with {rank.returncode}")
            found.append(json.loads(answer))
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return found


def restart_bars(folder: Path, warm_s: float) -> tuple[Mapping[str, Bar], Mapping[str, object]]:
    """What benchmarks.load_speed_restart measures, where there is one, of a load from what an earlier one left."""
    name = "benchmarks.load_speed_restart"
    if importlib.util.find_spec(name) is None:
        return {}, {}
    bars, figures = importlib.import_module(name).measure(folder, warm_s)
    return bars, figures


def _seconds(run: Callable[[], None]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


if __name__ == "__main__":
    sys.exit(main())
