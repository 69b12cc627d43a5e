"""Which pages of a file the page cache holds. Looks at no page, so that it can neither fault nor read."""

import ctypes
import mmap
import os
import sys
from functools import cache

import numpy as np

_CACHESTAT = 451  # the same number on every architecture since Linux 6.5
_PAGE_BYTES = mmap.PAGESIZE
# Counting every page would take a tenth of the time that reading them from the cache takes.
_SAMPLE_PAGES, _SAMPLES = 16, 3


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Stat(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("cache", "dirty", "writeback", "evicted", "recently_evicted"))


def is_resident(descriptor: int, start: int, stop: int) -> bool:
    """Whether the page cache holds the bytes `[start, stop)`, by a sample of their pages that has the first and the
    last. False where it cannot be known."""
    if sys.platform != "linux" or stop <= start:
        return False
    first, last = start // _PAGE_BYTES, -(-stop // _PAGE_BYTES)
    num_samples = min(_SAMPLES, -(-(last - first) // _SAMPLE_PAGES))
    room = max(0, last - first - _SAMPLE_PAGES)
    for number in range(num_samples):
        begin = first + room * number // max(1, num_samples - 1)
        if not _are_resident(descriptor, begin, min(begin + _SAMPLE_PAGES, last)):
            return False
    return True


def _are_resident(descriptor: int, first: int, last: int) -> bool:
    num_pages = _cached_pages(descriptor, first, last)
    if num_pages is None and _may_ask(descriptor):
        num_pages = _mapped_pages(descriptor, first, last)
    return num_pages is not None and num_pages >= last - first


def _cached_pages(descriptor: int, first: int, last: int) -> int | None:
    """Counts with cachestat; None where the kernel has none, or tells it not to us."""
    area = _Range(first * _PAGE_BYTES, (last - first) * _PAGE_BYTES)
    found = _Stat()
    arguments = (ctypes.c_long(_CACHESTAT), ctypes.c_long(descriptor), ctypes.byref(area), ctypes.byref(found))
    if _libc().syscall(*arguments, ctypes.c_long(0)) != 0:
        return None
    return int(found.cache)


def _may_ask(descriptor: int) -> bool:
    """mincore says of files that are neither ours nor writable for us that all of them is there."""
    status = os.fstat(descriptor)
    return status.st_uid == os.geteuid() or os.geteuid() == 0


def _mapped_pages(descriptor: int, first: int, last: int) -> int | None:
    """Counts with mincore, on a mapping that is never touched; None where the file cannot be mapped."""
    length = (last - first) * _PAGE_BYTES
    try:
        length = min(length, os.fstat(descriptor).st_size - first * _PAGE_BYTES)
        mapping = mmap.mmap(descriptor, length, prot=mmap.PROT_READ, offset=first * _PAGE_BYTES)
    except (OSError, ValueError, OverflowError):
        return None
    with mapping:
        view = np.frombuffer(mapping, np.uint8)
        pages = np.zeros(last - first, np.uint8)
        address, output = ctypes.c_void_p(view.ctypes.data), ctypes.c_void_p(pages.ctypes.data)
        failed = _libc().mincore(address, ctypes.c_size_t(length), output)
        del view
    return None if failed else int((pages & 1).sum())


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
