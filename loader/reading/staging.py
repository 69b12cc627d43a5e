"""The buffers that files are read into, and how what is in them gets to the memory of a device."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor

from loader.reading.extents import PAGE_BYTES


class Staging(Protocol):
    """One reading thread's way to a device."""

    def buffer(self, num_bytes: int) -> Tensor:
        """Memory to read into: uint8, on the CPU, beginning at a page."""

    def copies(self) -> AbstractContextManager[None]:
        """Within the block copies to the device may run on; after it the buffer may be read into again."""


class HostStaging:
    """For results in the CPU's memory."""

    def buffer(self, num_bytes: int) -> Tensor:
        return _at_page(torch.empty(num_bytes + PAGE_BYTES, dtype=torch.uint8), num_bytes)

    @contextmanager
    def copies(self) -> Iterator[None]:
        yield


class CudaStaging:
    """Copies from page-locked memory on a stream of the thread's own: while one thread waits for its copies, others
    read."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def buffer(self, num_bytes: int) -> Tensor:
        return _at_page(torch.empty(num_bytes + PAGE_BYTES, dtype=torch.uint8, pin_memory=True), num_bytes)

    @contextmanager
    def copies(self) -> Iterator[None]:
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()


def staging_for(device: torch.device) -> Staging:
    """The way to `device`."""
    return CudaStaging(device) if device.type == "cuda" else HostStaging()


def _at_page(memory: Tensor, num_bytes: int) -> Tensor:
    skip = -memory.data_ptr() % PAGE_BYTES
    return memory[skip : skip + num_bytes]
