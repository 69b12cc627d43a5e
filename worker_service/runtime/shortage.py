"""Whether an error says that memory could not be had: each library says so in words of its own, most in words alone.

Needs no torch, whose classes are known by their names.
"""

import errno
import mmap
import re

# torch's allocators and its mmap of files, NNPACK and XNNPACK, CUDA and NCCL, cuBLAS and cuDNN, and C++ itself.
_SAYS_SO = re.compile(
    r"can't allocate memory|cannot allocate memory|not enough memory|out of memory|bad_alloc|failed to allocate"
    r"|alloc(ation)?_failed",
    re.IGNORECASE,
)
# oneDNN has one sentence for every reason, and a thread may be wanting for a limit on threads.
_MAY_SAY_SO = re.compile(
    r"could not (create|execute|initialize) |can't start new thread|resource temporarily unavailable", re.IGNORECASE
)
# oneDNN compiles a product for its shapes when it first meets them. When that has failed, whatever the reason, the
# thread that asked never succeeds again: Xbyak keeps its error for the thread, and oneDNN does not clear it.
_BREAKS_THREAD = re.compile(r"could not create a primitive(?! (descriptor|attribute))")
# More than oneDNN asks for at once to compile or to compute in. None of it is touched.
_PROBE_BYTES = 64 * 2**20


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is a failed allocation.

    What may mean something else too counts as one only while the system refuses memory: were it taken for one at
    other times, a defect would be reported as want of memory, with advice that does not help.
    """
    if isinstance(error, MemoryError) or any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if not isinstance(error, RuntimeError):
        return False
    return bool(_SAYS_SO.search(str(error))) or (bool(_MAY_SAY_SO.search(str(error))) and refuses_memory())


def breaks_thread(error: BaseException) -> bool:
    """Whether the thread that met this error fails at all that is new to it from now on, also when memory is back."""
    return isinstance(error, RuntimeError) and bool(_BREAKS_THREAD.search(str(error)))


def refuses_memory() -> bool:
    """Whether the system does not give this process memory now: by a limit on it, or as all of it is promised."""
    try:
        mmap.mmap(-1, _PROBE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except OSError:
        return True
    return False
