"""What the memory allocators of this process have taken from the system, and what of it is in use."""

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch

from worker_service.runtime.report import AllocatorReport


class _MallInfo(ctypes.Structure):
    """struct mallinfo2 of glibc 2.33 and later."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def allocator_report(device: torch.device | None) -> AllocatorReport:
    """Of torch's allocator on an accelerator, else of the C library's. May be called from any thread."""
    if device is not None and device.type == "cuda":
        return AllocatorReport(torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device))
    call = _mallinfo()
    if call is None:
        return AllocatorReport()
    info = call()
    return AllocatorReport(info.arena + info.hblkhd, info.uordblks + info.hblkhd)


@functools.cache
def _mallinfo() -> Callable[[], Any] | None:
    """The C library's own account; None where it gives none."""
    call = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if call is not None:
        call.restype = _MallInfo
    return call
