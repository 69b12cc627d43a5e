"""Mapping files of a tmpfs so that they can lie in huge pages, and bringing them there.

Decoding streams through all weights; in pages of 4 KiB it walks the page table for each of them, which costs a tenth of
its time (docs/experiments.md). A tmpfs gives huge pages only where its mount or the system says so, but the kernel
(Linux 6.1) also brings a range there on request, if addresses and offsets are aligned alike. Imports no torch.
"""

import contextlib
import ctypes
import mmap
import os
import sys
import threading
import weakref

import numpy as np
from numpy.typing import NDArray

HUGE_PAGE_BYTES = 2 << 20
_MAP_FIXED, _MADV_COLLAPSE = 0x10, 25
# So much at a time, so that it can be stopped, and an error loses little.
_STEP_BYTES = 32 << 20


def map_aligned(descriptor: int, num_bytes: int) -> NDArray[np.uint8]:
    """A file's first bytes, shared and read-only, where huge pages can hold them. Raises OSError.

    The array keeps a duplicate of the descriptor, and with it a lock, for as long as it lives.
    """
    if sys.platform != "linux":
        return np.frombuffer(mmap.mmap(descriptor, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ), np.uint8)
    # Address space for the mapping to lie in, at an address of our choice; it goes with this object.
    reserve = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = np.frombuffer(reserve, np.uint8)
    skip = -whole.ctypes.data % HUGE_PAGE_BYTES
    data = whole[skip : skip + num_bytes]
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
    flags = mmap.MAP_SHARED | _MAP_FIXED
    if libc.mmap(data.ctypes.data, num_bytes, mmap.PROT_READ, flags, descriptor, 0) != data.ctypes.data:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    weakref.finalize(reserve, os.close, os.dup(descriptor))
    data.flags.writeable = False
    return data


def collapse_later(data: NDArray[np.uint8]) -> threading.Thread:
    """Brings what `map_aligned` gave into huge pages, on a thread of its own that ends when nobody else holds it.

    Takes some seconds a GiB, and does nothing where the system cannot.
    """
    thread = threading.Thread(target=_collapse, args=(weakref.ref(data),), name="huge pages", daemon=True)
    thread.start()
    return thread


def _collapse(held: "weakref.ref[NDArray[np.uint8]]") -> None:
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    with contextlib.suppress(OSError):  # no nice for threads
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
    start = 0
    while (data := held()) is not None and start < data.nbytes:
        num_bytes = min(_STEP_BYTES, data.nbytes - start)
        if madvise(data.ctypes.data + start, num_bytes, _MADV_COLLAPSE) and start == 0:
            return
        start += num_bytes
        del data
