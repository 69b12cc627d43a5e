"""The way to a device, with one made up: that a CUDA device does as the fake does is for machines that have one."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from loader.reading.files import DataFile
from loader.reading.staging import HostStaging
from loader.reading.tuning import Storage, Tuner
from loader.tensors import TensorInfo, WeightSlice
from loader.weights import load_weights
from tests.support.fake_checkpoint import fake_checkpoint

PIECE = 8192


class FakeDevice(HostStaging):
    """Does copies when they are waited for, as a device may, and notes the order of everything."""

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def buffer(self, num_bytes: int) -> Tensor:
        self.events.append("buffer")
        return super().buffer(num_bytes)

    @contextmanager
    def copies(self) -> Iterator[None]:
        self.events.append("begin")
        yield
        self.events.append("end")


def test_each_buffer_is_copied_from_before_it_is_read_into_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = torch.arange(10000, dtype=torch.float32)
    path = tmp_path / "f"
    path.write_bytes(b"12345678" + values.numpy().tobytes())
    events: list[str] = []
    storage = Storage(disk=Tuner(("buffered",), 1), cache=Tuner(("cached",), 1))
    monkeypatch.setattr("loader.reading.files.storage_of", lambda _: storage)
    monkeypatch.setattr("loader.reading.tuning.Setting.read_bytes", PIECE)
    monkeypatch.setattr("loader.reading.reader.staging_for", lambda _: FakeDevice(events))
    monkeypatch.setattr("loader.reading.reader._is_straight", lambda _: False)  # as for memory that is not the CPU's
    real_read, real_copy = DataFile.read, Tensor.copy_

    def read(self: DataFile, *arguments: object) -> object:
        events.append("read")
        return real_read(self, *arguments)  # type: ignore[arg-type]

    def copy(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        events.append("copy" if non_blocking else "copy and wait")
        return real_copy(self, source, non_blocking)

    monkeypatch.setattr("loader.reading.files.DataFile.read", read)
    monkeypatch.setattr("torch.Tensor.copy_", copy)
    info = TensorInfo("t", "F32", (10000,), path, 8, 40000, "t")
    loaded = load_weights(
        fake_checkpoint([info]),
        [WeightSlice("t", (10000,))],
        dtype=torch.float32,
        progress=lambda _: events.append("progress"),
        cancelled=lambda: False,
    )
    assert torch.equal(loaded["t"], values)
    steps = [event for event in events if event != "progress"]
    assert steps == ["buffer", *["read", "begin", "copy", "end"] * 5]


def test_buffers_begin_at_a_page() -> None:
    memory = HostStaging().buffer(PIECE)
    assert memory.data_ptr() % 4096 == 0
    assert memory.numel() == PIECE
