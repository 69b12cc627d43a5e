"""How much memory there is, how much this process takes, and how much of it the KV cache may have."""

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from worker_service.runtime.errors import RuntimeFailure
from worker_service.runtime.report import MemoryReport

# A CPU shares its memory with everything else on the machine, so without a setting the cache takes a
# modest part of it.
CPU_CACHE_FRACTION = 0.25
CPU_CACHE_BYTES = 4 * 2**30
# What the control group "unlimited" reads as in version 1: the largest page-aligned number.
_NO_LIMIT = 2**62


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes that this process may use, and how many of them are free: the tightest of machine and control groups."""

    total_bytes: int
    free_bytes: int


def host_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> HostMemory:
    """Reads machine and control groups, of version 1 or 2, up to the root of their tree."""
    info = _fields(proc / "meminfo")
    total, free = info.get("MemTotal", 0) * 1024, info.get("MemAvailable", 0) * 1024
    for limit, used in _group_limits(proc, cgroup):
        total, free = min(total, limit), min(free, max(0, limit - used))
    return HostMemory(total, free)


def device_memory(device: torch.device) -> HostMemory:
    """The same for any device."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return HostMemory(total, free)
    return host_memory()


def own_bytes(device: torch.device) -> int:
    """What this process, and no other, occupies on the device."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device)
    return _fields(Path("/proc/self/status")).get("VmRSS", 0) * 1024


def peak_bytes(device: torch.device, call: Callable[[], object]) -> int:
    """Most bytes that `call` took on the device above what this process held before it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    was_reset = _reset_host_peak()
    before = own_bytes(device)
    call()
    if was_reset:
        peak = _fields(Path("/proc/self/status")).get("VmHWM", 0) * 1024
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return max(0, peak - before)


@dataclass(frozen=True, slots=True)
class CacheBudget:
    """What is asked for: the settings memory_fraction and kv_cache_bytes."""

    memory_fraction: float
    kv_cache_bytes: int | None


def plan_cache(device: torch.device, budget: CacheBudget, *, weight_bytes: int, activation_bytes: int) -> MemoryReport:
    """What the KV cache may use. Raises RuntimeFailure "out_of_memory" when that is nothing, or less than was set."""
    memory, own = device_memory(device), own_bytes(device)
    limit = int(memory.total_bytes * budget.memory_fraction)
    room = min(limit - own, memory.free_bytes) - activation_bytes
    metadata = {
        "device": str(device),
        "limit_bytes": str(limit),
        "free_bytes": str(memory.free_bytes),
        "weight_bytes": str(weight_bytes),
        "activation_bytes": str(activation_bytes),
    }
    there = (
        f"{device} has {_text(memory.free_bytes)} free and this process may use {_text(limit)}, "
        f"of which it holds {_text(own)} and needs {_text(activation_bytes)} more for the largest step"
    )
    wanted = budget.kv_cache_bytes
    if wanted is not None and wanted > room:
        raise RuntimeFailure(
            "out_of_memory",
            f"kv_cache_bytes asks for {_text(wanted)}, but {there}; lower kv_cache_bytes, or raise memory_fraction",
            {**metadata, "needed_bytes": str(wanted)},
        )
    if room <= 0:
        raise RuntimeFailure(
            "out_of_memory",
            f"nothing is left for the KV cache: {there}; raise memory_fraction, lower max_num_batched_tokens, or use "
            "a smaller model",
            metadata,
        )
    if wanted is None and device.type == "cpu":
        room = min(room, int(CPU_CACHE_FRACTION * memory.free_bytes), CPU_CACHE_BYTES)
    return MemoryReport(room if wanted is None else wanted, weight_bytes, activation_bytes, limit)


@contextmanager
def explains_out_of_memory(device: torch.device, what: str, remedy: str) -> Iterator[None]:
    """Turns a failed allocation into RuntimeFailure "out_of_memory" that names what needed it and what to change."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        free = device_memory(device).free_bytes
        raise RuntimeFailure(
            "out_of_memory",
            f"{device} has not enough memory for {what}: {_text(free)} free ({error}); {remedy}",
            {"device": str(device), "free_bytes": str(free)},
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is a failed allocation. torch's CPU allocator says so in words only."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _group_limits(proc: Path, cgroup: Path) -> Iterator[tuple[int, int]]:
    """(limit, bytes in use that cannot be reclaimed) of every control group above this process."""
    for line in _lines(proc / "self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            base, limit_name, used_name, reclaimable = cgroup, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            base, limit_name = cgroup / "memory", "memory.limit_in_bytes"
            used_name, reclaimable = "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        # A container sees its own group as the root of the tree, whatever its path says.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            group = base.joinpath(*parts[:depth])
            limit = _number(group / limit_name)
            if limit is not None and limit < _NO_LIMIT:
                used = _number(group / used_name) or 0
                yield limit, max(0, used - _fields(group / "memory.stat").get(reclaimable, 0))


def _reset_host_peak() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def _number(path: Path) -> int | None:
    for line in _lines(path):
        return int(line) if line.strip().isdigit() else None
    return None


def _fields(path: Path) -> dict[str, int]:
    """Lines of a name and a number, such as "MemTotal:  123 kB" or "inactive_file 123"."""
    fields = {}
    for line in _lines(path):
        words = line.replace(":", " ").split()
        if len(words) >= 2 and words[1].isdigit():
            fields[words[0]] = int(words[1])
    return fields


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _text(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**28 else f"{num_bytes / 2**20:.1f} MiB"
