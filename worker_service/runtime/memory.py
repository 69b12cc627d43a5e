"""How much memory there is, how much this process takes, and how much of it the KV cache may have."""

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import structlog
import torch

from worker_service.runtime.errors import RuntimeFailure
from worker_service.runtime.holders import lines_of, number_fields, text_of_bytes, who_holds
from worker_service.runtime.report import MemoryReport
from worker_service.runtime.shortage import is_out_of_memory

# A CPU shares its memory with everything else on the machine, so without a setting the cache takes a
# modest part of it, and of what the control group allows: of all of it, whoever uses it at the moment.
CPU_CACHE_FRACTION = 0.25
CPU_CACHE_BYTES = 4 * 2**30
# What the control group "unlimited" reads as in version 1: the largest page-aligned number.
_NO_LIMIT = 2**62

_log = structlog.stdlib.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes that this process may use, and how many of them are free: the tightest of machine and control groups.

    `group` is the control group that has least free, "" for the machine.
    """

    total_bytes: int
    free_bytes: int
    group: str = field(default="", compare=False)


def host_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> HostMemory:
    """Reads machine and control groups, of version 1 or 2, up to the root of their tree."""
    info = number_fields(proc / "meminfo")
    total, free, tightest = info.get("MemTotal", 0) * 1024, info.get("MemAvailable", 0) * 1024, ""
    for group, limit, used in _group_limits(proc, cgroup):
        total, left = min(total, limit), max(0, limit - used)
        if left < free:
            free, tightest = left, group
    return HostMemory(total, free, tightest)


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
    return number_fields(Path("/proc/self/status")).get("VmRSS", 0) * 1024


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
        peak = number_fields(Path("/proc/self/status")).get("VmHWM", 0) * 1024
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return max(0, peak - before)


class MemorySettings(Protocol):
    """The settings that bound memory; see WorkerSettings."""

    @property
    def memory_fraction(self) -> float: ...
    @property
    def memory_limit_bytes(self) -> int | None: ...
    @property
    def kv_cache_bytes(self) -> int | None: ...
    @property
    def local_ranks(self) -> int: ...


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """What is asked for: the settings of the same names."""

    memory_fraction: float
    kv_cache_bytes: int | None
    memory_limit_bytes: int | None = None
    local_ranks: int = 1

    @classmethod
    def of(cls, settings: MemorySettings) -> "MemoryBudget":
        """The part of the settings that is about memory."""
        return cls(settings.memory_fraction, settings.kv_cache_bytes, settings.memory_limit_bytes, settings.local_ranks)

    def limit_bytes(self, device: torch.device) -> int:
        """Most bytes that this process may use of a device. It depends on the device and the settings alone."""
        limit = self._share_bytes(device)
        return limit if self.memory_limit_bytes is None else min(limit, self.memory_limit_bytes)

    def _share_bytes(self, device: torch.device) -> int:
        num_ranks = self.local_ranks if device.type == "cpu" else 1
        return int(device_memory(device).total_bytes * self.memory_fraction) // num_ranks

    def raise_limit(self, device: torch.device) -> str:
        """Which setting gives this process more."""
        is_hard = self.memory_limit_bytes is not None and self.memory_limit_bytes < self._share_bytes(device)
        return "raise memory_limit_bytes" if is_hard else "raise memory_fraction"

    def default_cache_bytes(self, device: torch.device) -> int | None:
        """Most bytes of a KV cache whose size is not set; None where only the limit counts."""
        if device.type != "cpu":
            return None
        return min(int(CPU_CACHE_FRACTION * device_memory(device).total_bytes), CPU_CACHE_BYTES) // self.local_ranks


def plan_cache(device: torch.device, budget: MemoryBudget, *, weight_bytes: int, activation_bytes: int) -> MemoryReport:
    """What the KV cache may use: the limit less what this process holds and what its largest step takes on top.

    Who else uses the device makes no difference here; whether there is room now is asked when the cache is made
    (`check_cache_fits`). Raises RuntimeFailure "out_of_memory" when nothing is left, or less than was set.
    """
    own, limit = own_bytes(device), budget.limit_bytes(device)
    room = limit - own - activation_bytes
    there = (
        f"this process may use {text_of_bytes(limit)} of {device}, holds {text_of_bytes(own)} and needs "
        f"{text_of_bytes(activation_bytes)} more for the largest step"
    )
    metadata = {
        "device": str(device),
        "limit_bytes": str(limit),
        "own_bytes": str(own),
        "weight_bytes": str(weight_bytes),
        "activation_bytes": str(activation_bytes),
    }
    wanted, more = budget.kv_cache_bytes, budget.raise_limit(device)
    if wanted is not None and wanted > room:
        raise RuntimeFailure(
            "out_of_memory",
            f"kv_cache_bytes asks for {text_of_bytes(wanted)}, but {there}, which leaves "
            f"{text_of_bytes(max(0, room))}; lower kv_cache_bytes, or {more}",
            {**metadata, "needed_bytes": str(wanted)},
        )
    if room <= 0:
        raise RuntimeFailure(
            "out_of_memory",
            f"nothing is left for the KV cache: {there}; {more}, lower max_num_batched_tokens, or use a smaller model",
            metadata,
        )
    default = budget.default_cache_bytes(device)
    available = wanted if wanted is not None else room if default is None else min(room, default)
    _log.info(
        "memory_measured",
        available_bytes=available,
        own_bytes=own,
        weight_bytes=weight_bytes,
        activation_bytes=activation_bytes,
        limit_bytes=limit,
    )
    return MemoryReport(available, weight_bytes, activation_bytes, limit)


def check_cache_fits(device: torch.device, needed_bytes: int) -> None:
    """Raises RuntimeFailure "out_of_memory" when a KV cache of this size does not fit beside what others hold now."""
    memory = device_memory(device)
    if needed_bytes <= memory.free_bytes:
        return
    own = own_bytes(device)
    raise RuntimeFailure(
        "out_of_memory",
        f"the KV cache needs {text_of_bytes(needed_bytes)}, but {_what_is_free(device, memory)}; this process holds "
        f"{text_of_bytes(own)}{_others(device)}; lower num_kv_blocks or kv_cache_bytes, or end what holds the rest",
        {
            "device": str(device),
            "needed_bytes": str(needed_bytes),
            "free_bytes": str(memory.free_bytes),
            "own_bytes": str(own),
        },
    )


@contextmanager
def explains_out_of_memory(device: torch.device, what: str, remedy: str) -> Iterator[None]:
    """Turns a failed allocation into RuntimeFailure "out_of_memory" that names what needed it and what to change."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        memory = device_memory(device)
        raise RuntimeFailure(
            "out_of_memory",
            f"{device} has not enough memory for {what}: {_what_is_free(device, memory)} ({error}){_others(device)}; "
            f"{remedy}",
            {"device": str(device), "free_bytes": str(memory.free_bytes)},
        ) from error


def _what_is_free(device: torch.device, memory: HostMemory) -> str:
    """How much is free, and of what."""
    where = f"control group {memory.group}" if memory.group else str(device)
    return f"{where} has {text_of_bytes(memory.free_bytes)} free"


def _others(device: torch.device) -> str:
    holders = who_holds(device)
    return f", others hold: {holders}" if holders else ""


def _group_limits(proc: Path, cgroup: Path) -> Iterator[tuple[str, int, int]]:
    """(name, limit, bytes in use that cannot be reclaimed) of every control group above this process."""
    for line in lines_of(proc / "self/cgroup"):
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
                given_back = number_fields(group / "memory.stat").get(reclaimable, 0)
                yield "/" + "/".join(parts[:depth]), limit, max(0, (_number(group / used_name) or 0) - given_back)


def _reset_host_peak() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def _number(path: Path) -> int | None:
    for line in lines_of(path):
        return int(line) if line.strip().isdigit() else None
    return None
