"""What the libraries say when memory runs out, and what only sounds like it."""

import errno
import mmap
import subprocess
import sys

import numpy as np
import pytest
import torch

from worker_service.runtime import shortage
from worker_service.runtime.shortage import breaks_thread, is_out_of_memory


def caught(call: object) -> BaseException:
    with pytest.raises(Exception) as failed:
        call()  # type: ignore[operator]
    return failed.value


@pytest.fixture
def memory_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shortage, "refuses_memory", lambda: False)


@pytest.fixture
def no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shortage, "refuses_memory", lambda: True)


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.empty(2**55, dtype=torch.uint8),
        lambda: np.ones(2**55, np.uint8),
        lambda: bytearray(2**55),
        lambda: mmap.mmap(-1, 2**55),
    ],
    ids=["torch", "numpy", "python", "mmap"],
)
@pytest.mark.usefixtures("memory_is_there")
def test_what_is_refused_here_is_known(call: object) -> None:
    assert is_out_of_memory(caught(call))


@pytest.mark.parametrize(
    "text",
    [
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 1099511627776 bytes. Error code 12 (Cannot allocate memory)",
        "unable to mmap 460032 bytes from file </m/model.safetensors>: Cannot allocate memory (12)",
        "std::bad_alloc",
        "CUDA out of memory. Tried to allocate 20.00 GiB.",
        "CUDA error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "NCCL error: unhandled cuda error: Cuda failure 2 'out of memory'",
        "failed to allocate 1024 bytes for packed weights",
        "DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes.",
    ],
)
@pytest.mark.usefixtures("memory_is_there")
def test_what_cannot_be_provoked_here_is_known_by_its_words(text: str) -> None:
    assert is_out_of_memory(RuntimeError(text))


@pytest.mark.usefixtures("memory_is_there")
def test_classes_and_numbers_speak_for_themselves() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("full"))
    assert is_out_of_memory(OSError(errno.ENOMEM, "x"))
    assert not is_out_of_memory(OSError(errno.ENOSPC, "out of memory"))
    assert not is_out_of_memory(ValueError("out of memory"))
    assert not is_out_of_memory(RuntimeError("The size of tensor a (2) must match"))


AMBIGUOUS = [
    "could not create a primitive",
    "could not create a memory object",
    "could not create a primitive descriptor for the matmul primitive. Run workload with environment variable "
    "ONEDNN_VERBOSE=all to get additional diagnostic information.",
    "could not execute a primitive",
    "can't start new thread",
    "Resource temporarily unavailable",
]


@pytest.mark.parametrize("text", AMBIGUOUS)
@pytest.mark.usefixtures("no_memory")
def test_what_may_mean_something_else_counts_while_memory_is_refused(text: str) -> None:
    assert is_out_of_memory(RuntimeError(text))


@pytest.mark.parametrize("text", AMBIGUOUS)
@pytest.mark.usefixtures("memory_is_there")
def test_and_else_it_does_not(text: str) -> None:
    assert not is_out_of_memory(RuntimeError(text))


# In a process of its own: other threads of this one would want memory, too.
_REFUSED = """
import resource
from worker_service.runtime.shortage import refuses_memory

answers = [refuses_memory()]
resource.setrlimit(resource.RLIMIT_AS, (1 << 20, resource.RLIM_INFINITY))
answers.append(refuses_memory())
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(*answers, refuses_memory())
"""


def test_whether_memory_is_refused_is_asked_of_the_system() -> None:
    done = subprocess.run([sys.executable, "-c", _REFUSED], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "False True False\n", done.stderr


def test_which_errors_leave_a_thread_broken() -> None:
    assert breaks_thread(RuntimeError("could not create a primitive"))
    assert not breaks_thread(RuntimeError("could not create a primitive descriptor for the matmul primitive"))
    assert not breaks_thread(RuntimeError("could not execute a primitive"))
    assert not breaks_thread(ValueError("could not create a primitive"))


_ONEDNN = """
import resource, sys, threading
import torch
from worker_service.kernels.linear import make_linear
from worker_service.runtime.shortage import breaks_thread, is_out_of_memory

def failures(shapes):
    count = 0
    for rows in shapes:
        try:
            product(torch.ones(rows, 64))
        except RuntimeError as error:
            count += breaks_thread(error)
    return count

def run():
    product(torch.ones(1, 64))
    x = torch.ones(2, 64)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 20, resource.RLIM_INFINITY))
    try:
        product(x)
    except RuntimeError as error:
        found.append((is_out_of_memory(error), breaks_thread(error)))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    found.append(failures(range(3, 8)))

torch.set_num_threads(1)
product, found = make_linear(torch.ones(32, 64)), []
for work in (run, lambda: found.append(failures(range(3, 8)))):
    # A thread of its own: its memory is reserved, so that only what oneDNN compiles into is refused.
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
print(found)
"""


@pytest.mark.full
@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
def test_onednn_breaks_the_thread_for_which_it_could_not_compile() -> None:
    """What `breaks_thread` is for. Were this to fail, a newer oneDNN needs it no more."""
    done = subprocess.run([sys.executable, "-c", _ONEDNN], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "[(True, True), 5, 0]\n", done.stderr
