"""Files mapped so that huge pages can hold them."""

import fcntl
import gc
import mmap
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from loader.store.huge import HUGE_PAGE_BYTES, collapse_later, map_aligned


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(np.arange(3 * HUGE_PAGE_BYTES // 4 + 100, dtype=np.int32).tobytes())
    return path


def mapped(path: Path) -> np.ndarray:
    with path.open("rb") as opened:
        fcntl.flock(opened, fcntl.LOCK_SH)
        return map_aligned(opened.fileno(), path.stat().st_size)


def test_a_mapping_is_aligned_whole_and_read_only(file: Path) -> None:
    data = mapped(file)
    assert data.tobytes() == file.read_bytes()
    assert sys.platform != "linux" or data.ctypes.data % HUGE_PAGE_BYTES == 0
    with pytest.raises(ValueError, match="read-only"):
        data[0] = 1


def test_what_is_written_later_is_seen(file: Path) -> None:
    data = mapped(file)
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 0) as writer:
        writer[5] = 77
    assert data[5] == 77


def test_the_lock_lives_as_long_as_the_mapping(file: Path) -> None:
    data = mapped(file)
    part = data[10:20]
    del data
    with file.open("rb") as other:
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        del part
        gc.collect()
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_bringing_pages_together_changes_nothing_and_ends(file: Path) -> None:
    data = mapped(file)
    thread = collapse_later(data)
    thread.join(30)
    assert not thread.is_alive()
    assert data.tobytes() == file.read_bytes()
    del data
    gc.collect()
    with file.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_file_that_cannot_be_mapped_is_an_error(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(OSError, match="No such device"):
        map_aligned(descriptor, 4096)
    os.close(descriptor)
