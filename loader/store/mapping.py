"""Entries in memory: mapped read-only and shared, verified against their hashes. Imports no torch."""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from loader.store.errors import EntryDamaged
from loader.store.folder import StoreFolder, read_header
from loader.store.format import Header, digest
from loader.store.huge import map_aligned
from loader.store.locks import try_lock


class MappedEntry:
    """An entry's bytes, to be read and never written: a write is a crash.

    It is locked against eviction until nothing refers to `data` [file_bytes] any more. Its file is as long as when it
    was checked: only this user could shorten it, and nothing of Stepwire does.
    """

    def __init__(self, header: Header, data: NDArray[np.uint8]) -> None:
        self.header = header
        self.data = data


def map_entry(
    folder: StoreFolder,
    name: str,
    *,
    num_threads: int,
    progress: Callable[[int], None] = lambda _: None,
    counts_as_use: bool = True,
) -> MappedEntry | None:
    """Maps an entry and verifies all of it; None when there is none. It is then the one used last, if that counts.

    `progress` is called on this thread with the bytes verified so far, and ends it by raising. Raises EntryDamaged for
    one that is not what was written, which is removed first; StoreBusy; OSError; what `progress` raises.
    """
    try:
        descriptor = folder.open_file(name)
    except FileNotFoundError:
        return None
    try:
        # Whoever has it exclusively is about to remove it.
        if not try_lock(descriptor, shared=True) or not os.fstat(descriptor).st_nlink:
            return None
        try:
            header = read_header(descriptor)
            if header.key.name != name:
                raise ValueError("it holds other weights than its name says")
            entry = MappedEntry(header, map_aligned(descriptor, header.file_bytes))
            _verify(entry, num_threads, progress)
        except ValueError as error:
            with suppress(OSError):
                folder.remove_damaged(name, descriptor)
            raise EntryDamaged(name, str(error)) from error
        if counts_as_use:
            # Nothing else changes this time of a file that is only read.
            os.utime(descriptor)
        return entry
    finally:
        os.close(descriptor)


def _verify(entry: MappedEntry, num_threads: int, progress: Callable[[int], None]) -> None:
    """Raises ValueError for the first piece whose hash is another. Reading them all also makes every page resident."""
    done = 0
    stop = threading.Event()

    def check(piece: tuple[str, int, int, str]) -> int:
        name, start, end, expected = piece
        if not stop.is_set() and digest(entry.data[start:end]) != expected:
            raise ValueError(f"tensor {name!r} is damaged: bytes {start} to {end} of the file were changed")
        return end - start

    with ThreadPoolExecutor(num_threads, thread_name_prefix="verify") as pool:
        try:
            for num_bytes in pool.map(check, _pieces(entry.header)):
                done += num_bytes
                progress(done)
        finally:
            stop.set()


def _pieces(header: Header) -> Iterator[tuple[str, int, int, str]]:
    for name, tensor in header.tensors.items():
        for (start, end), expected in zip(tensor.pieces(), tensor.hashes, strict=True):
            yield name, start, end, expected
