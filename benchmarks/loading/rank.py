"""One rank that loads, in a process of its own: python -m benchmarks.loading.rank FOLDER RANK SIZE HOW.

It says so when it is ready, begins when a line comes, and answers with one line of JSON. HOW is "kept" for results
that the load itself makes, or "delivered" for results that are copied as they come, as packing does.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from loader.checkpoint import open_checkpoint
from loader.layout import weight_slices
from loader.shares import RankPlace
from loader.weights import LoadReport, bytes_to_read, load_weights


def main(folder: Path, rank: int, size: int, how: str) -> None:
    """Loads, and tells what it took."""
    checkpoint = open_checkpoint(folder)
    wanted = weight_slices(checkpoint.config, RankPlace(rank, size))
    packed: dict[str, Tensor] = {}
    deliver: Callable[[str, Tensor], None] | None = None
    if how == "delivered":
        packed = {want.name: torch.zeros(want.part_shape, dtype=torch.bfloat16) for want in wanted}

        def deliver(name: str, tensor: Tensor) -> None:
            packed[name].copy_(tensor)

    results_bytes = 0 if packed else sum(2 * torch.Size(want.part_shape).numel() for want in wanted)
    report = LoadReport()
    print("ready", flush=True)
    sys.stdin.readline()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins here
    resident, read = _status("VmRSS"), _disk_bytes()
    tensors = load_weights(
        checkpoint,
        wanted,
        dtype=torch.bfloat16,
        progress=lambda _: None,
        cancelled=lambda: False,
        deliver=deliver,
        report=report,
    )
    answer = {
        "wanted_bytes": bytes_to_read(checkpoint, wanted),
        "disk_bytes": _disk_bytes() - read,
        "extra_bytes": _status("VmHWM") - resident - results_bytes,
        "wall_s": report.wall_s,
        "method": report.method,
        "threads": report.threads,
        "num_tensors": len(tensors) or len(packed),
    }
    print(json.dumps(answer), flush=True)


def _status(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) << 10


def _disk_bytes() -> int:
    """Bytes that the storage was asked for by this process, whatever the page cache gave."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
