"""Devices, who occupies them, and whether the ranks fit."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from stepwire.cli.checks.finding import Finding, human_bytes
from stepwire.cli.checks.software import TorchReport

_NVIDIA_SMI_TIMEOUT_S = 20
_BUSY_FRACTION = 0.1


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> tuple[int, float | None]:
    """Cores this process may run on, and the quota of its control group in cores (None for no limit)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
        return cores, None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return cores, None


def check_devices(torch: TorchReport, device: str, threads: int | None) -> Iterator[Finding]:
    """The processor, and the CUDA devices with those who use them."""
    cores, quota = usable_cores()
    load = os.getloadavg()[0]
    limit = cores if quota is None else min(cores, quota)
    text = f"{cores} cores usable{'' if quota is None else f', limited to {quota:g} by the control group'}"
    if load > limit * 1.5:
        remedy = "others use this machine; measure on a quiet one, and give the worker fewer --threads"
        yield Finding("warn", "cpu", f"{text}; load {load:.1f}", remedy)
    else:
        yield Finding("ok", "cpu", f"{text}; load {load:.1f}")
    yield from _check_cuda(torch)
    yield _check_ranks(torch, device, threads, limit)


def _check_cuda(torch: TorchReport) -> Iterator[Finding]:
    if not torch.devices:
        if shutil.which("nvidia-smi") and not torch.error:
            why = "torch is built without CUDA" if torch.cuda_version is None else "torch finds no device"
            remedy = "install a CUDA build of torch that the driver supports, and check CUDA_VISIBLE_DEVICES"
            yield Finding("warn", "cuda", f"nvidia-smi is installed, but {why}", remedy)
        else:
            yield Finding("ok", "cuda", "no CUDA device")
        return
    occupants = _occupants()
    for index, device in enumerate(torch.devices):
        used = device.total_bytes - device.free_bytes
        text = f"{device.name}, {human_bytes(device.free_bytes)} of {human_bytes(device.total_bytes)} free"
        if used > device.total_bytes * _BUSY_FRACTION:
            who = f"; used by {', '.join(occupants)}" if occupants else ""
            remedy = "end those processes, choose another --device, or lower --memory-fraction"
            yield Finding("warn", f"cuda:{index}", text + who, remedy)
        else:
            yield Finding("ok", f"cuda:{index}", text)


def _occupants() -> list[str]:
    """Processes on CUDA devices, as "name (pid N, memory)"; empty when the driver does not say."""
    command = ["nvidia-smi", "--query-compute-apps=process_name,pid,used_memory", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_NVIDIA_SMI_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    return [f"{row[0]} (pid {row[1]}, {row[2]})" for row in rows if len(row) == 3]


def _check_ranks(torch: TorchReport, device: str, threads: int | None, cores: float) -> Finding:
    if device == "cpu":
        if threads is not None and threads > cores:
            text = f"1 rank on cpu with {threads} threads, {cores:g} cores"
            return Finding(
                "warn", "ranks", text, f"more threads than cores slow each other down: --threads {int(cores)}"
            )
        return Finding("ok", "ranks", f"1 rank on cpu, {threads or int(cores)} threads")
    if device == "sim":
        return Finding("ok", "ranks", "1 rank on a simulated device")
    wanted = int(device.partition(":")[2] or 0)
    if wanted >= len(torch.devices):
        there = f"cuda:0 to cuda:{len(torch.devices) - 1}" if torch.devices else "none"
        return Finding("fail", "ranks", f"1 rank on {device}, but CUDA devices are: {there}", "choose another --device")
    return Finding("ok", "ranks", f"1 rank on {device}")
