"""What a read does when the system gives less than was asked for, or nothing."""

import errno
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from loader.errors import CheckpointError
from loader.reading.tuning import Storage, Tuner
from loader.tensors import TensorInfo, WeightSlice
from loader.weights import LoadReport, load_weights
from tests.support.fake_checkpoint import fake_checkpoint

Read = Callable[[int, Sequence[memoryview], int], int]
REAL: Read = os.preadv
SIZE = 20000


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Storage:
    """Unknown, and read in pieces of two pages; the page cache is said to hold nothing."""
    unknown = Storage()
    monkeypatch.setattr("loader.reading.files.storage_of", lambda _: unknown)
    monkeypatch.setattr("loader.reading.files.is_resident", lambda *_: False)
    monkeypatch.setattr("loader.reading.tuning.Setting.read_bytes", 8192)
    return unknown


@pytest.fixture
def infos(tmp_path: Path) -> list[TensorInfo]:
    """Two tensors of 20,000 values each, one after the other: 0, 1, 2, …"""
    path = tmp_path / "f"
    path.write_bytes(b"12345678" + torch.arange(2 * SIZE, dtype=torch.float32).numpy().tobytes())
    return [TensorInfo(f"t{i}", "F32", (SIZE,), path, 8 + 4 * SIZE * i, 4 * SIZE, f"t{i}") for i in range(2)]


def load(infos: Sequence[TensorInfo]) -> LoadReport:
    """Loads all, and looks whether it is right."""
    report = LoadReport()
    loaded = load_weights(
        fake_checkpoint(infos),
        [WeightSlice(info.name, info.shape) for info in infos],
        dtype=torch.float32,
        progress=lambda _: None,
        cancelled=lambda: False,
        report=report,
    )
    assert torch.equal(torch.cat(list(loaded.values())), torch.arange(2 * SIZE, dtype=torch.float32))
    return report


def is_direct(descriptor: int) -> bool:
    flags = Path(f"/proc/self/fdinfo/{descriptor}").read_text().split("flags:")[1].split()[0]
    return bool(int(flags, 8) & os.O_DIRECT)


def needs_direct_reads(folder: Path) -> None:
    try:
        os.close(os.open(folder / "f", os.O_RDONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("this file system knows no direct reads")


def test_memory_that_a_device_cannot_fill_goes_through_a_buffer(
    storage: Storage, infos: list[TensorInfo], monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_direct_reads(infos[0].file.parent)

    def read(descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        addresses = [torch.frombuffer(view, dtype=torch.uint8).data_ptr() for view in views]
        if is_direct(descriptor) and any(address % 512 for address in addresses):
            raise OSError(errno.EINVAL, "Invalid argument")
        return REAL(descriptor, views, offset)

    monkeypatch.setattr("os.preadv", read)
    report = load(infos)
    assert report.method == "direct"
    assert storage.memory_alignment in (4, 512)


def test_a_file_system_without_direct_reads_is_read_through_the_page_cache(
    storage: Storage, infos: list[TensorInfo], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def opened(path: Path, flags: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags)

    monkeypatch.setattr("os.open", opened)
    assert load(infos).method == "buffered"
    assert storage.disk.setting.method == "buffered"


def test_a_device_that_refuses_every_direct_read_is_read_through_the_page_cache(
    storage: Storage, infos: list[TensorInfo], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        if is_direct(descriptor):
            raise OSError(errno.EINVAL, "Invalid argument")
        return REAL(descriptor, views, offset)

    monkeypatch.setattr("os.preadv", read)
    assert load(infos).method == "buffered"


@pytest.mark.parametrize("length", [4096, 4097, 100])
def test_short_reads_are_continued(
    storage: Storage, infos: list[TensorInfo], monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    """Also after a direct read that ends within a page, where none may begin."""

    def read(descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        if is_direct(descriptor) and length % 512:
            count = REAL(descriptor, [views[0][:4096]], offset)
            return min(count, length)
        return REAL(descriptor, [views[0][:length]], offset)

    monkeypatch.setattr("os.preadv", read)
    load(infos)
    assert storage.disk.setting.method == "direct"


@pytest.mark.parametrize("method", ["direct", "buffered"])
def test_a_broken_disk_is_named_with_file_and_tensor(
    storage: Storage, infos: list[TensorInfo], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    if method == "buffered":
        storage.disk.exclude("direct")

    def read(descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        if offset + sum(map(len, views)) > infos[1].offset + 10000:
            raise OSError(errno.EIO, "Input/output error")
        return REAL(descriptor, views, offset)

    monkeypatch.setattr("os.preadv", read)
    with pytest.raises(CheckpointError, match="Input/output error") as caught:
        load(infos)
    assert (caught.value.code, caught.value.file, caught.value.tensor) == ("invalid", infos[1].file, "t1")


def test_of_several_failures_the_first_in_the_file_is_told_of(
    storage: Storage, infos: list[TensorInfo], monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.disk.exclude("direct")
    later_failed = threading.Event()

    def read(descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        if offset < 8192:
            assert later_failed.wait(60)
        else:
            later_failed.set()
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("os.preadv", read)
    with pytest.raises(CheckpointError, match="in bytes 8 to 8192 with tensor 't0'"):
        load(infos)


def test_a_file_that_is_too_short_is_refused_before_anything_is_read(
    storage: Storage, infos: list[TensorInfo], monkeypatch: pytest.MonkeyPatch
) -> None:
    os.truncate(infos[0].file, infos[1].offset + 4 * SIZE - 3)
    monkeypatch.setattr("os.preadv", None)
    with pytest.raises(CheckpointError, match="3 bytes are gone") as caught:
        load(infos)
    assert caught.value.file == infos[0].file


def test_files_are_closed_whatever_happens(
    storage: Storage, infos: list[TensorInfo], monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_files() -> int:
        names = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
        return sum(os.path.realpath(name) == str(infos[0].file) for name in names)

    load(infos)
    assert open_files() == 0
    monkeypatch.setattr("os.preadv", lambda *_: 0)
    with pytest.raises(CheckpointError, match="tensor 't0' are gone"):
        load(infos)
    assert open_files() == 0


def test_threads_are_as_many_as_the_tuning_says(
    storage: Storage, infos: list[TensorInfo], monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.disk = Tuner(("direct", "buffered"), 3)
    assert load(infos).threads == 3
