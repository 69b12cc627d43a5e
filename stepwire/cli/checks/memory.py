"""Memory, its limit, and shared memory."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from scheduler_service.engine.shares import Share, check_shares
from stepwire.cli.checks.finding import Finding, human_bytes
from stepwire.rpc.errors import StepwireError

_LOW_BYTES = 2 * 1024**3
# What Docker gives a container unless told otherwise; collectives between ranks need more.
_SMALL_SHM_BYTES = 64 * 1024**2
# Version 1 writes "no limit" as a number near 2**63.
_NO_LIMIT_BYTES = 2**60


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of memory on this machine, and what the control group allows and uses (None for no limit)."""

    total: int
    available: int
    limit: int | None
    used_of_limit: int

    @property
    def usable(self) -> int:
        """Bytes that a new process could take."""
        return self.available if self.limit is None else min(self.available, self.limit - self.used_of_limit)


def read_memory(root: Path = Path("/")) -> Memory | None:
    """What Linux says; None elsewhere. `root` is for tests."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    sizes = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
    limit = _number(root / "sys/fs/cgroup/memory.max", root / "sys/fs/cgroup/memory/memory.limit_in_bytes")
    used = _number(root / "sys/fs/cgroup/memory.current", root / "sys/fs/cgroup/memory/memory.usage_in_bytes")
    if limit is not None and limit >= _NO_LIMIT_BYTES:
        limit = None
    return Memory(sizes["MemTotal"], sizes["MemAvailable"], limit, used or 0)


def check_memory(memory: Memory | None, shm: Path = Path("/dev/shm")) -> Iterator[Finding]:
    """Memory that is left, and room for shared memory."""
    if memory is None:
        yield Finding("warn", "memory", "this system does not say", "watch it by the system's own tools")
    else:
        limit = "no control group limit" if memory.limit is None else f"control group limit {human_bytes(memory.limit)}"
        text = f"{human_bytes(memory.usable)} usable of {human_bytes(memory.total)}, {limit}"
        if memory.usable < _LOW_BYTES:
            yield Finding("warn", "memory", text, "end other processes, or raise the limit of this container")
        else:
            yield Finding("ok", "memory", text)
    yield _check_shm(shm)


def check_several(shares: Sequence[Share]) -> Finding:
    """Whether several models together claim no more than their devices have."""
    try:
        check_shares(shares)
    except StepwireError as error:
        text, _, remedy = error.message.rpartition("; ")
        return Finding("fail", "models", text, remedy)
    held = ", ".join(f"{share.model} {share.part:.2f} of {share.device}" for share in shares)
    return Finding("ok", "models", held)


def _check_shm(path: Path) -> Finding:
    try:
        found = os.statvfs(path)
    except OSError:
        return Finding(
            "warn", "shared memory", f"{path} is missing", "mount a tmpfs there, for groups of several ranks"
        )
    size, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    text = f"{human_bytes(free)} free of {human_bytes(size)} in {path}"
    if free < _SMALL_SHM_BYTES * 2:
        return Finding("warn", "shared memory", text, "in a container set shm_size (docker run --shm-size 1g)")
    return Finding("ok", "shared memory", text)


def _number(*paths: Path) -> int | None:
    for path in paths:
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        return int(text) if text.isdigit() else None
    return None
