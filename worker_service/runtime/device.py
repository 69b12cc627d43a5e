"""Choosing the device and the types it computes in."""

import os
import platform
from collections.abc import Mapping
from pathlib import Path

import torch

from loader.cpu import cpu_flags
from loader.quantised.settle import QUANTIZE, Quantize
from worker_service.kernels.kv_rounding import KV_DTYPES
from worker_service.runtime.errors import RuntimeFailure

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

# CPU features that multiply a type natively; without one, a 16-bit type is slower than float32.
_NATIVE_FEATURES: Mapping[str, frozenset[str]] = {
    "bfloat16": frozenset({"avx512_bf16", "amx_bf16", "bf16", "svebf16"}),
    "float16": frozenset({"avx512_fp16", "amx_fp16", "asimdhp"}),
}


def open_device(name: str) -> torch.device:
    """The device called "cpu", "cuda" (the current one) or "cuda:N". Raises RuntimeFailure "device_unavailable"."""
    if name == "cpu":
        return torch.device("cpu")
    kind, _, number = name.partition(":")
    if kind != "cuda" or not (number.isdigit() or number == ""):
        raise _unavailable(name, 'devices are called "cpu", "cuda" or "cuda:N"')
    if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        raise _unavailable(
            name, "this torch is built without CUDA; install a CUDA build of torch, or set device to cpu"
        )
    count = torch.cuda.device_count()
    if count == 0:
        raise _unavailable(name, "torch finds no CUDA device; check the driver and CUDA_VISIBLE_DEVICES")
    index = int(number) if number else 0
    if index >= count:
        raise _unavailable(name, f"there are {count} CUDA devices, numbered from 0; see CUDA_VISIBLE_DEVICES")
    device = torch.device("cuda", index)
    try:
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)
    except RuntimeError as error:
        raise _unavailable(name, f"it cannot be used: {error}") from error
    return device


def device_name(device: torch.device) -> str:
    """What a device is, as its driver or the kernel names it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    for line in _cpuinfo():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model"):
            return value.strip()
    return platform.processor() or platform.machine() or "cpu"


def device_id(device: torch.device) -> str:
    """Names a device among all of this host, whatever a process calls it: a GPU's own id, and "cpu" for the CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else device.type


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores this process may keep busy: its affinity, and below it what its control group's quota allows."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cpu_quota(cgroup)
    return cores if quota is None else max(1, min(cores, int(quota)))


def choose_quantize(requested: str) -> Quantize:
    """What becomes of weights, see `loader.quantised.settle`. Raises RuntimeFailure "invalid" for another name."""
    for known in QUANTIZE:
        if known == requested:
            return known
    message = f"quantize {requested!r} is not one of {', '.join(QUANTIZE)}"
    raise RuntimeFailure("invalid", message, {"quantize": requested})


def choose_kv_dtype(requested: str) -> torch.dtype | None:
    """What keys and values are rounded to in the cache; None for the model's own type.

    Raises RuntimeFailure "invalid" for a name that is not one of "auto", "int8", "fp8".
    """
    if requested == "auto":
        return None
    if requested in KV_DTYPES:
        return KV_DTYPES[requested]
    message = f"kv_cache_dtype {requested!r} is not one of auto, {', '.join(KV_DTYPES)}"
    raise RuntimeFailure("invalid", message, {"kv_cache_dtype": requested})


def choose_dtype(requested: str, stored: str, device: torch.device) -> torch.dtype:
    """The type of weights and cache. "auto" takes the checkpoint's own where the device does it well, else float32.

    Raises RuntimeFailure "invalid" for a name that is not one of "auto", "float32", "bfloat16", "float16".
    """
    if requested != "auto":
        if requested not in DTYPES:
            raise RuntimeFailure(
                "invalid", f"dtype {requested!r} is not one of auto, {', '.join(DTYPES)}", {"dtype": requested}
            )
        return DTYPES[requested]
    return DTYPES[stored] if stored in DTYPES and does_natively(stored, device) else torch.float32


def does_natively(dtype: str, device: torch.device) -> bool:
    """Whether the device multiplies a type at full speed."""
    if dtype == "float32":
        return True
    if device.type == "cuda":
        return dtype == "float16" or torch.cuda.is_bf16_supported(including_emulation=False)
    return bool(_NATIVE_FEATURES.get(dtype, frozenset()) & cpu_flags())


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _cpu_quota(cgroup: Path) -> float | None:
    try:
        quota, period = (cgroup / "cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        try:
            quota = (cgroup / "cpu/cpu.cfs_quota_us").read_text(encoding="ascii")
            period = (cgroup / "cpu/cpu.cfs_period_us").read_text(encoding="ascii")
        except OSError:
            return None
    return int(quota) / int(period) if quota.strip().isdigit() and int(period) > 0 else None


def _unavailable(name: str, why: str) -> RuntimeFailure:
    return RuntimeFailure("device_unavailable", f"device {name!r} is not available: {why}", {"device": name})
