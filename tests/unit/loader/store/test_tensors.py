"""What can be stored, and what cannot."""

import errno
import os

import pytest
import torch

from loader.store.errors import StoreFull
from loader.store.folder import Limits, StoreFolder
from loader.store.tensors import write_entry
from tests.support.restart_store import KEY, NO_LIMITS, write


@pytest.mark.parametrize(
    "tensor", [torch.ones(4, 6).T, torch.ones(4, 6)[:, :3], torch.ones(3, 3).to_sparse(), torch.ones(2).cfloat()]
)
def test_only_plain_tensors_can_be_stored(folder: StoreFolder, tensor: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="is no plain tensor"):
        write(folder, KEY, {"w": tensor})
    assert folder.entries() == []


def test_a_parameter_can_be_stored(folder: StoreFolder) -> None:
    assert write(folder, KEY, {"w": torch.nn.Parameter(torch.ones(3))}) > 0


def write_taking(folder: StoreFolder, tensors: dict[str, torch.Tensor], limits: Limits = NO_LIMITS) -> None:
    write_entry(folder, KEY, tensors, model="m", limits=limits, progress=lambda _: None, takes=True)


def test_tensors_are_taken_as_they_are_written_so_that_memory_holds_one_of_them_twice(folder: StoreFolder) -> None:
    tensors = {str(number): torch.full((100,), number) for number in range(10)}
    entry_bytes = write(folder, KEY, dict(tensors))
    folder.evict(KEY.name)
    with pytest.raises(StoreFull, match="writing them takes 800 bytes of memory"):
        write_taking(folder, tensors, Limits(None, lambda: 799))
    assert len(tensors) == 10
    write_taking(folder, tensors, Limits(None, lambda: 800))
    assert tensors == {} and folder.entries()[0].num_bytes == entry_bytes


def test_no_space_left_in_the_middle_is_an_error_and_no_crash(
    folder: StoreFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {str(number): torch.full((100,), number) for number in range(4)}
    write_for_real, calls = os.pwrite, []

    def fills_up(descriptor: int, data: memoryview, offset: int) -> int:
        calls.append(offset)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_for_real(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", fills_up)
    with pytest.raises(OSError, match="No space left"):
        write_taking(folder, tensors)
    assert list(tensors) == ["2", "3"] and folder.entries() == []
