"""Filling memory from a file: directly, through the page cache, or from what the page cache holds already."""

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock

import torch
from torch import Tensor

from loader.errors import CheckpointError, unreadable
from loader.reading.extents import PAGE_BYTES, Extent, Fragment
from loader.reading.residency import is_resident
from loader.reading.tuning import Method, Storage, storage_of

_MEMORY_ALIGNMENTS = (4, 512, PAGE_BYTES)


class Memory:
    """The bytes of a contiguous CPU tensor, for the kernel to write to and for torch to copy."""

    def __init__(self, tensor: Tensor) -> None:
        self.bytes = tensor.view(-1).view(torch.uint8)
        self.view: memoryview = self.bytes.numpy().data
        self.address = self.bytes.data_ptr()


@dataclass(frozen=True, slots=True)
class Straight:
    """Bytes of the file from `start` on that are to be in `memory[low:high]` as they are."""

    fragment: Fragment
    memory: Memory
    low: int
    high: int


class DataFile:
    """One file of at least `size` bytes, of which `num_bytes` are wanted; open from its first extent to its last."""

    def __init__(self, path: Path, size: int, num_bytes: int) -> None:
        self.path = path
        self._unread_bytes = num_bytes
        try:
            status = os.stat(path)
        except OSError as error:
            raise unreadable(path, error) from error
        if status.st_size < size:
            raise too_short(path, size - status.st_size)
        self.storage: Storage = storage_of(status.st_dev)
        self._lock = Lock()
        self._buffered: int | None = None
        self._direct: int | None = None

    def choose(self, extent: Extent) -> Method:
        """How to read an extent: what the page cache has is taken from there, and from the disk what it has not.

        What is shared among ranks goes through the page cache whatever the tuning says.
        """
        if is_resident(self._descriptor(), extent.start, extent.stop):
            return "cached"
        return "buffered" if extent.is_shared else self.storage.disk.setting.method

    def read(self, extent: Extent, straight: Sequence[Straight], slot: Memory, method: Method) -> Method:
        """Reads an extent: what is `straight` to where it belongs, the rest into the slot, each at its distance from
        the page that the extent begins in. Answers by which method, which differs where the storage refused it.

        Raises CheckpointError, with file and tensor, for what the system refuses and for a file that ends too soon.
        """
        while method == "direct":
            descriptor = self._direct_descriptor()
            if descriptor is None:
                self.storage.disk.exclude("direct")
                break
            alignment = self.storage.memory_alignment
            try:
                self._fill(descriptor, extent, _Vectors(extent, straight, slot, PAGE_BYTES, alignment))
                return method
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise _named(self.path, extent, error) from error
                self._refused(alignment)
                method = self.storage.disk.setting.method
        try:
            self._fill(self._descriptor(), extent, _Vectors(extent, straight, slot, 1, 1))
        except OSError as error:
            raise _named(self.path, extent, error) from error
        return "cached" if method == "cached" else "buffered"

    def done(self, num_bytes: int) -> None:
        """Takes note of wanted bytes that were read; closes the file after the last."""
        with self._lock:
            self._unread_bytes -= num_bytes
            if self._unread_bytes == 0:
                self._close()

    def close(self) -> None:
        """Closes what is open."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        for descriptor in (self._buffered, self._direct):
            if descriptor is not None:
                os.close(descriptor)
        self._buffered = self._direct = None

    def _descriptor(self) -> int:
        with self._lock:
            if self._buffered is None:
                try:
                    self._buffered = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
                except OSError as error:
                    raise unreadable(self.path, error) from error
                # Read what is asked for and no more: what follows may be another rank's, or be read directly.
                os.posix_fadvise(self._buffered, 0, 0, os.POSIX_FADV_RANDOM)
            return self._buffered

    def _direct_descriptor(self) -> int | None:
        with self._lock:
            if self._direct is None:
                try:
                    self._direct = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
                except OSError as error:
                    if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                        return None
                    raise unreadable(self.path, error) from error
            return self._direct

    def _refused(self, alignment: int) -> None:
        """Demands more of the memory or, when there is no more to demand, gives direct reads up."""
        wider = next((known for known in _MEMORY_ALIGNMENTS if known > alignment), None)
        if wider is None:
            self.storage.disk.exclude("direct")
        else:
            self.storage.memory_alignment = max(self.storage.memory_alignment, wider)

    def _fill(self, descriptor: int, extent: Extent, vectors: "_Vectors") -> None:
        """Reads until the vectors hold all of the extent."""
        views, position = vectors.views, vectors.start
        while True:
            count = os.preadv(descriptor, views, position)
            position += count
            if position >= extent.stop:
                break
            if count == 0:
                raise too_short(self.path, extent.stop - position, _tensor_at(extent, position))
            views = _after(views, count)
            if position % PAGE_BYTES:  # a direct read must not go on from here
                descriptor = self._descriptor()
        vectors.settle()


class _Vectors:
    """The memory that one read fills: from the file's byte `start` on, one view after the other.

    For a direct read each begins and ends at a multiple of `alignment` in the file, and in memory at one of
    `memory_alignment`; what of the straight bytes cannot be read so goes through the slot.
    """

    def __init__(
        self, extent: Extent, straight: Sequence[Straight], slot: Memory, alignment: int, memory_alignment: int
    ) -> None:
        self._base = extent.start - extent.start % PAGE_BYTES
        self._slot = slot
        self._copies: list[tuple[Tensor, int]] = []
        self.start = extent.start - extent.start % alignment
        self.views: list[memoryview] = []
        position = self.start
        for item in straight:
            start, stop = item.fragment.start, item.fragment.stop
            low, high = start + -start % alignment, stop - stop % alignment
            if low < high and (item.memory.address + item.low + low - start) % memory_alignment == 0:
                self._through_slot(position, low)
                self.views.append(item.memory.view[item.low + low - start : item.low + high - start])
                position = high
                self._copy(item, start, low)
                self._copy(item, high, stop)
            else:
                self._copy(item, start, stop)
        self._through_slot(position, extent.stop + -extent.stop % alignment)

    def settle(self) -> None:
        """Copies what had to go through the slot to where it belongs."""
        for target, start in self._copies:
            target.copy_(self._slot.bytes[start - self._base : start - self._base + target.numel()])

    def _through_slot(self, start: int, stop: int) -> None:
        if start < stop:
            self.views.append(self._slot.view[start - self._base : stop - self._base])

    def _copy(self, item: Straight, start: int, stop: int) -> None:
        if start < stop:
            low = item.low + start - item.fragment.start
            self._copies.append((item.memory.bytes[low : low + stop - start], start))


def too_short(path: Path, num_missing: int, tensor: str | None = None) -> CheckpointError:
    """The error for a file that ends before what its header tells of."""
    what = "" if tensor is None else f" of tensor {tensor!r}"
    return CheckpointError(
        "invalid",
        f"{path} became shorter while it was read: {num_missing} bytes{what} are gone",
        "wait until the download has ended, then load again",
        file=path,
        tensor=tensor,
    )


def _tensor_at(extent: Extent, position: int) -> str:
    later = (fragment for fragment in extent.fragments if fragment.stop > position)
    return next(later, extent.fragments[-1]).source.info.name


def _named(path: Path, extent: Extent, error: OSError) -> CheckpointError:
    tensor = extent.fragments[0].source.info.name
    plain = unreadable(path, error)
    return replace(
        plain,
        message=f"{plain.message}, in bytes {extent.start} to {extent.stop} with tensor {tensor!r}",
        tensor=tensor,
    )


def _after(views: Sequence[memoryview], count: int) -> list[memoryview]:
    """What of the views is left when the first `count` bytes are filled."""
    rest = []
    for view in views:
        if count < len(view):
            rest.append(view[count:])
        count = max(0, count - len(view))
    return rest
