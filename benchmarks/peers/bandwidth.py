"""How fast this machine reads memory: the best of a few plain kernels over more than its caches hold, on all cores.

A program of its own, so that its threads are gone when others are measured. Prints bytes/s.
"""

import os
import time
from collections.abc import Callable
from statistics import median

import torch

_NUM_BYTES, _REPEATS = 1 << 30, 7


def measure() -> float:
    """Bytes/s, the median of each kernel's repeats and the best kernel."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    values = torch.ones(_NUM_BYTES // 4)
    first, second = values.split(len(values) // 2)
    words = values.view(torch.int64)
    kernels: list[Callable[[], object]] = [values.sum, lambda: torch.dot(first, second), values.max, words.sum]
    return max(_NUM_BYTES / median(_seconds(kernel) for _ in range(_REPEATS)) for kernel in kernels)


def _seconds(kernel: Callable[[], object]) -> float:
    begin = time.perf_counter()
    kernel()
    return time.perf_counter() - begin


if __name__ == "__main__":
    print(measure())
