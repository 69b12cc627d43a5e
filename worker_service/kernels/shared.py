"""Collectives of processes on one machine over memory that they share, by the compiled kernels.

See cpu/shared.h. Sums are made in the order of ranks, in float32, so all ranks have the same bits and results do not
depend on who came first. Whatever is wrong with another rank is a RuntimeError, as it is from torch's own groups.
"""

import ctypes
import os
from collections.abc import Sequence
from contextlib import suppress

import torch

from worker_service.kernels.layout import DTYPES
from worker_service.kernels.structures import address

SUMMED = frozenset(DTYPES)
"""The types that can be summed."""

# Large messages go in parts of this size, of which each rank has two.
PART_BYTES = 256 * 1024
_NONCE_BYTES = 16
# As long as a rank spins; longer than ranks of one step are usually apart, and short beside a step.
_SPIN_US = 100
_LOST = {1: "it has left the group", 2: "its process has ended", 3: "it did not come in time"}


class SharedFile:
    """Memory without a name, gone with the last process that has it, and the word by which others find it."""

    def __init__(self, library: ctypes.CDLL, size: int) -> None:
        """For `size` ranks. Raises OSError."""
        self._file = os.memfd_create("stepwire-collectives", os.MFD_CLOEXEC)
        nonce = os.urandom(_NONCE_BYTES)
        try:
            os.ftruncate(self._file, library.sw_shared_bytes(size, PART_BYTES))
            os.pwrite(self._file, nonce, 0)
        except OSError:
            self.close()
            raise
        self.word = f"{os.getpid()} {self._file} {nonce.hex()}"

    def close(self) -> None:
        """To be called when all have opened it."""
        os.close(self._file)


class SharedCollectives:
    """One rank's end of the memory. All ranks make the same calls in the same order; a call blocks until all have."""

    def __init__(self, library: ctypes.CDLL, word: str, rank: int, pids: Sequence[int], timeout_s: float) -> None:
        """`word` is that of rank 0's SharedFile, `pids` are the processes of all ranks, by rank.

        Raises OSError, or ValueError, where this process cannot share memory with that of rank 0.
        """
        self._library = library
        self._handle: int | None = None
        self._processes = [-1] * len(pids)
        file = _open(word)
        try:
            for place, pid in enumerate(pids):
                if pid != os.getpid():
                    self._processes[place] = os.pidfd_open(pid)
            processes = (ctypes.c_int32 * len(pids))(*self._processes)
            self._handle = library.sw_shared_open(
                file, rank, len(pids), PART_BYTES, processes, _SPIN_US, int(timeout_s * 1000)
            )
            if self._handle is None:
                raise OSError("the memory cannot be mapped")
        except OSError:
            self.close()
            raise
        finally:
            os.close(file)

    def close(self) -> None:
        """Leaves: ranks that wait for this one fail at once. Harmless when done before."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self._library.sw_shared_close(handle)
        for file in self._processes:
            if file >= 0:
                os.close(file)
        self._processes = []

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """The sum over the ranks, in place; of a type in SUMMED, contiguous."""
        dtype = DTYPES.index(tensor.dtype)
        self._check(self._library.sw_shared_sum(self._handle, dtype, address(tensor), tensor.numel()))

    def all_gather(self, tensor: torch.Tensor, gathered: torch.Tensor) -> None:
        """The tensors of all ranks into `gathered`, [ranks, ...], in their order; both contiguous."""
        self._check(self._library.sw_shared_gather(self._handle, address(tensor), tensor.nbytes, address(gathered)))

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Rank 0's tensor, in place; contiguous."""
        self._check(self._library.sw_shared_broadcast(self._handle, address(tensor), tensor.nbytes))

    @staticmethod
    def _check(outcome: int) -> None:
        if outcome:
            raise RuntimeError(_LOST[outcome])


def _open(word: str) -> int:
    """The file of a word, if it is the one that was meant: elsewhere another process may have that id."""
    pid, number, nonce = word.split()
    file = os.open(f"/proc/{int(pid)}/fd/{int(number)}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    found = b""
    with suppress(OSError):
        found = os.pread(file, _NONCE_BYTES, 0)
    if found.hex() != nonce:
        os.close(file)
        raise ValueError("another file is there")
    return file
