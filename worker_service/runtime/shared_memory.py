"""How the ranks of a stage come to share memory, where all of them are processes of one machine."""

import ctypes
import os
from contextlib import suppress

from torch.distributed import Store  # type: ignore[attr-defined]  # documented, and not in __all__

from worker_service.kernels.shared import SharedCollectives, SharedFile


def share_memory(
    library: ctypes.CDLL, store: Store, rank: int, size: int, timeout_s: float
) -> SharedCollectives | None:
    """This rank's end of memory that all ranks share; None on all of them where one of them cannot.

    Raises RuntimeError where the store, or another rank, is not there.
    """
    file, mine, is_shared = None, None, False
    if rank == 0:
        with suppress(OSError):
            file = SharedFile(library, size)
        store.set("word", "" if file is None else file.word)
    try:
        store.set(f"pid{rank}", str(os.getpid()))
        pids = [int(store.get(f"pid{each}")) for each in range(size)]
        mine = _open(library, store.get("word").decode(), rank, pids, timeout_s)
        store.set(f"opened{rank}", str(mine is not None))
        is_shared = all([store.get(f"opened{each}") == b"True" for each in range(size)])
    finally:
        if file is not None:
            file.close()
        if mine is not None and not is_shared:
            mine.close()
    return mine if is_shared else None


def _open(library: ctypes.CDLL, word: str, rank: int, pids: list[int], timeout_s: float) -> SharedCollectives | None:
    with suppress(OSError, ValueError):
        return SharedCollectives(library, word, rank, pids, timeout_s)
    return None
