"""Entries that are mapped: verified whole, and removed when they are not what was written."""

import os
import warnings
from pathlib import Path

import pytest
import torch

from loader.errors import LoadCancelled
from loader.store.errors import EntryDamaged
from loader.store.folder import StoreFolder, read_header
from loader.store.mapping import map_entry
from loader.store.tensors import mapped_tensors
from tests.support.restart_store import KEY, key, some_tensors, write


def path_of(folder: StoreFolder) -> Path:
    return folder.path / f"{KEY.name}.weights"


def test_every_kind_of_tensor_comes_back_bit_for_bit(folder: StoreFolder) -> None:
    tensors = some_tensors()
    num_bytes = write(folder, KEY, tensors)
    assert path_of(folder).stat().st_size == num_bytes
    done: list[int] = []
    entry = map_entry(folder, KEY.name, num_threads=2, progress=done.append)
    assert entry is not None and entry.header.key == KEY and entry.header.model == "/models/m"
    assert done == sorted(done) and done[-1] == sum(tensor.nbytes for tensor in tensors.values())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mapped = mapped_tensors(entry)
    assert mapped.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (mapped[name].dtype, mapped[name].shape) == (tensor.dtype, tensor.shape), name
        assert mapped[name].is_contiguous() and mapped[name].data_ptr() % 64 == 0
        assert torch.equal(mapped[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name


def test_tensors_of_several_pieces(folder: StoreFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("format", "tensors"):
        monkeypatch.setattr(f"loader.store.{module}.PIECE_BYTES", 1000)
    tensor = torch.arange(1234, dtype=torch.int64)
    write(folder, KEY, {"w": tensor})
    entry = map_entry(folder, KEY.name, num_threads=2)
    assert entry is not None and len(entry.header.tensors["w"].hashes) == 10
    assert torch.equal(mapped_tensors(entry)["w"], tensor)


def test_tensors_keep_their_entry_mapped(folder: StoreFolder) -> None:
    write(folder, KEY, some_tensors())
    entry = map_entry(folder, KEY.name, num_threads=1)
    assert entry is not None
    tensor = mapped_tensors(entry)["int64"][3:]
    del entry
    assert folder.entries()[0].pids == (os.getpid(),)
    assert torch.equal(tensor, some_tensors()["int64"][3:])
    del tensor
    assert folder.entries()[0].pids == ()


def damage(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


def test_a_changed_byte_of_any_tensor_is_found_and_the_entry_removed(folder: StoreFolder) -> None:
    for name in some_tensors().keys() - {"empty"}:
        write(folder, KEY, some_tensors())
        descriptor = folder.open_file(KEY.name)
        stored = read_header(descriptor).tensors[name]
        os.close(descriptor)
        damage(path_of(folder), stored.offset + stored.num_bytes - 1)
        with pytest.raises(EntryDamaged, match=f"tensor '{name}' is damaged"):
            map_entry(folder, KEY.name, num_threads=2)
        assert not path_of(folder).exists()
    assert map_entry(folder, KEY.name, num_threads=1) is None


@pytest.mark.parametrize("size", [0, 10, 32, 100, 5000])
def test_a_truncated_entry_is_removed(folder: StoreFolder, size: int) -> None:
    write(folder, KEY, some_tensors())
    os.truncate(path_of(folder), size)
    with pytest.raises(EntryDamaged):
        map_entry(folder, KEY.name, num_threads=1)
    assert not path_of(folder).exists()


def test_an_entry_of_another_version_or_name_is_removed(folder: StoreFolder) -> None:
    write(folder, KEY, some_tensors())
    with path_of(folder).open("r+b") as file:
        file.seek(7)
        file.write(b"\x09")
    with pytest.raises(EntryDamaged, match="format is version 9"):
        map_entry(folder, KEY.name, num_threads=1)
    write(folder, key(dtype="float16"), some_tensors())
    os.rename(folder.path / f"{key(dtype='float16').name}.weights", path_of(folder))
    with pytest.raises(EntryDamaged, match="other weights"):
        map_entry(folder, KEY.name, num_threads=1)
    assert folder.entries() == []


def test_an_unreadable_entry_is_listed_and_can_be_evicted(folder: StoreFolder) -> None:
    path_of(folder).write_bytes(b"rubbish")
    (entry,) = folder.entries()
    assert (entry.header, entry.num_bytes, entry.is_whole) == (None, 7, True)
    assert folder.evict(KEY.name) == 7


def test_a_removal_of_a_damaged_entry_spares_one_written_since(folder: StoreFolder) -> None:
    write(folder, KEY, some_tensors(0))
    old = folder.open_file(KEY.name)
    folder.evict(KEY.name)
    write(folder, KEY, some_tensors(1))
    folder.remove_damaged(KEY.name, old)
    os.close(old)
    assert path_of(folder).exists()


def test_links_are_not_followed(folder: StoreFolder, tmp_path: Path) -> None:
    write(folder, KEY, some_tensors())
    os.rename(path_of(folder), tmp_path / "elsewhere")
    path_of(folder).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError):
        map_entry(folder, KEY.name, num_threads=1)


def test_it_can_be_cancelled(folder: StoreFolder) -> None:
    write(folder, KEY, some_tensors())

    def cancel(_: int) -> None:
        raise LoadCancelled

    with pytest.raises(LoadCancelled):
        map_entry(folder, KEY.name, num_threads=1, progress=cancel)
    assert path_of(folder).exists()


def test_an_entry_being_evicted_is_a_miss(folder: StoreFolder) -> None:
    from loader.store.locks import try_lock

    write(folder, KEY, some_tensors())
    evictor = folder.open_file(KEY.name)
    assert try_lock(evictor, shared=False)
    assert map_entry(folder, KEY.name, num_threads=1) is None
    os.close(evictor)
    assert map_entry(folder, KEY.name, num_threads=1) is not None
