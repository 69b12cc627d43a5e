"""Who holds the memory of a device, for the text of a refusal."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

_NUM_NAMED = 3
# What is smaller explains no refusal.
_LEAST_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Holder:
    """Someone who holds memory; bytes."""

    name: str
    num_bytes: int

    def __str__(self) -> str:
        return f"{self.name} {text_of_bytes(self.num_bytes)}"


def who_holds(device: torch.device) -> str:
    """What others than this process hold of a device, in words; "" when nobody holds much.

    Of a CPU those are the largest processes that can be seen from here, and files in memory. CUDA tells only how much
    all others hold together, this process's own context included.
    """
    holders = _cuda_holders(device) if device.type == "cuda" else host_holders()
    return ", ".join(map(str, holders))


def host_holders(proc: Path = Path("/proc"), own_id: int | None = None) -> list[Holder]:
    """The largest other processes by resident memory, largest first, then files in memory, such as a restart store."""
    own = str(os.getpid() if own_id is None else own_id)
    others = sorted(_processes(proc, own), key=lambda holder: -holder.num_bytes)[:_NUM_NAMED]
    shared = number_fields(proc / "meminfo").get("Shmem", 0) * 1024
    return [holder for holder in (*others, Holder("files in memory", shared)) if holder.num_bytes >= _LEAST_BYTES]


def number_fields(path: Path) -> dict[str, int]:
    """Lines of a name and a number, such as "MemTotal:  123 kB" or "inactive_file 123"; none when it is unreadable."""
    fields = {}
    for line in lines_of(path):
        words = line.replace(":", " ").split()
        if len(words) >= 2 and words[1].isdigit():
            fields[words[0]] = int(words[1])
    return fields


def lines_of(path: Path) -> list[str]:
    """A text file's lines; none when it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def text_of_bytes(num_bytes: int) -> str:
    """A size as people read it."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**28 else f"{num_bytes / 2**20:.1f} MiB"


def _processes(proc: Path, own: str) -> Iterator[Holder]:
    try:
        names = [entry.name for entry in proc.iterdir() if entry.name.isdigit() and entry.name != own]
    except OSError:
        return
    for name in names:
        status = proc / name / "status"
        resident = number_fields(status).get("VmRSS", 0) * 1024
        command = next((line[5:].strip() for line in lines_of(status) if line.startswith("Name:")), "?")
        yield Holder(f"{command} (process {name})", resident)


def _cuda_holders(device: torch.device) -> list[Holder]:
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    return [Holder("other processes and CUDA itself", others)] if others >= _LEAST_BYTES else []
