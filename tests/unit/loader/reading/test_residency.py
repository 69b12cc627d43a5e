import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from loader.reading import residency
from loader.reading.residency import is_resident

PAGES = 64


@pytest.fixture
def descriptor(tmp_path: Path) -> Iterator[int]:
    """A file on disk of which the page cache holds nothing; its last page is not full."""
    path = tmp_path / "f"
    path.write_bytes(os.urandom(PAGES * 4096 - 100))
    opened = os.open(path, os.O_RDONLY)
    os.fsync(opened)
    os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_DONTNEED)
    os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_RANDOM)
    yield opened
    os.close(opened)


@pytest.fixture(params=["cachestat", "mincore"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "mincore":
        monkeypatch.setattr(residency, "_cached_pages", lambda *_: None)
    return str(request.param)


def test_only_what_was_read_is_there(descriptor: int, way: str) -> None:
    size = PAGES * 4096 - 100
    if is_resident(descriptor, 0, size):
        pytest.skip("this file system keeps files in memory")
    os.pread(descriptor, 8 * 4096, 16 * 4096)
    assert is_resident(descriptor, 16 * 4096, 24 * 4096)
    assert is_resident(descriptor, 17 * 4096 + 5, 17 * 4096 + 6)
    assert not is_resident(descriptor, 0, size)
    assert not is_resident(descriptor, 23 * 4096, 25 * 4096 + 1)
    os.pread(descriptor, size, 0)
    assert is_resident(descriptor, 0, size)
    assert not is_resident(descriptor, 5, 5)


def test_unknown_where_the_kernel_tells_not_to_us(descriptor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    os.pread(descriptor, PAGES * 4096, 0)
    monkeypatch.setattr(residency, "_cached_pages", lambda *_: None)
    monkeypatch.setattr("loader.reading.residency.os.geteuid", lambda: os.fstat(descriptor).st_uid + 1)
    assert not is_resident(descriptor, 0, 4096)


def test_a_file_that_shrank_is_not_there(descriptor: int, way: str) -> None:
    os.truncate(f"/proc/self/fd/{descriptor}", 4096)
    assert not is_resident(descriptor, 8 * 4096, 16 * 4096)
