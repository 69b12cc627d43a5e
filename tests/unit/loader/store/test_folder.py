"""The folder of the store: who may use it, what is evicted and what never is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from loader.errors import LoadCancelled
from loader.store import locks
from loader.store.errors import EntryInUse, StoreBusy, StoreFull, StoreRefused
from loader.store.folder import Limits, StoreFolder, default_folder, evict_idle
from loader.store.mapping import map_entry
from tests.support.restart_store import HOLD, KEY, key, python_process, some_tensors, write

TENSORS = {"w": torch.arange(4096, dtype=torch.float32)}


def files(folder: StoreFolder) -> set[str]:
    return {path.name for path in folder.path.iterdir()} - {".lock"}


def fill(folder: StoreFolder, *names: str) -> list[str]:
    """Makes entries, the first of them used longest ago; answers their names."""
    made = []
    for number, name in enumerate(names):
        write(folder, key(content=name), TENSORS)
        made.append(key(content=name).name)
        os.utime(folder.path / f"{made[-1]}.weights", (1000 + number, 1000 + number))
    return made


def test_a_folder_is_made_for_its_user_alone(tmp_path: Path) -> None:
    os.umask(before := os.umask(0))
    path = tmp_path / "store"
    with StoreFolder(path, create=True):
        assert path.stat().st_mode & 0o777 == 0o700
    assert os.umask(before) == before
    assert str(default_folder()) == f"/dev/shm/stepwire-{os.geteuid()}"


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701, 0o777])
def test_a_folder_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "store"
    path.mkdir()
    path.chmod(mode)
    with pytest.raises(StoreRefused, match=f"mode {mode:04o}.*chmod 700 {path}"):
        StoreFolder(path, create=True)


def test_links_files_and_nothing_are_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "file").touch()
    for name in ("link", "file"):
        with pytest.raises(StoreRefused, match="not a folder, or is a symbolic link; set restart_store"):
            StoreFolder(tmp_path / name, create=True)
    with pytest.raises(StoreRefused, match="No such file"):
        StoreFolder(tmp_path / "none", create=False)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "store"
    path.mkdir(mode=0o700)
    os.chown(path, 65534, 65534)
    with pytest.raises(StoreRefused, match="belongs to user 65534"):
        StoreFolder(path, create=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_an_entry_of_another_user_is_not_used(folder: StoreFolder) -> None:
    (name,) = fill(folder, "a")
    os.chown(folder.path / f"{name}.weights", 65534, 65534)
    with pytest.raises(OSError, match="not a file of this user"):
        map_entry(folder, name, num_threads=1)


def test_what_was_used_longest_ago_is_evicted_first(folder: StoreFolder) -> None:
    oldest, middle, newest = fill(folder, "a", "b", "c")
    size = folder.entries()[0].num_bytes
    write(folder, key(content="d"), TENSORS, Limits(3 * size, lambda: 1 << 50))
    assert [entry.name for entry in folder.entries()] == [key(content="d").name, newest, middle]
    assert map_entry(folder, middle, num_threads=1) is not None  # now used last
    write(folder, key(content="e"), TENSORS, Limits(3 * size, lambda: 1 << 50))
    assert {entry.name for entry in folder.entries()} == {middle, key(content="d").name, key(content="e").name}
    assert oldest not in str(files(folder))


def test_free_memory_limits_it_too(folder: StoreFolder) -> None:
    fill(folder, "a")
    size = folder.entries()[0].num_bytes
    # Memory is short until the old entry is gone.
    write(folder, key(content="b"), TENSORS, Limits(None, lambda: (1 - len(folder.entries())) * size))
    assert [entry.name for entry in folder.entries()] == [key(content="b").name]
    with pytest.raises(StoreFull, match="bytes of memory, and 0 are free"):
        write(folder, key(content="c"), TENSORS, Limits(None, lambda: 100 - size))
    assert len(folder.entries()) == 1, "nothing is evicted in vain"


def test_an_entry_in_use_is_never_evicted(folder: StoreFolder) -> None:
    (name,) = fill(folder, "a")
    entry = map_entry(folder, name, num_threads=1)
    assert entry is not None
    assert folder.entries()[0].pids == (os.getpid(),)
    with pytest.raises(EntryInUse, match=f"in use by {os.getpid()}"):
        folder.evict(name)
    with pytest.raises(StoreFull, match="may hold 100 "):
        write(folder, key(content="b"), TENSORS, Limits(100, lambda: 1 << 50))
    view = entry.data[:8]
    del entry
    with pytest.raises(EntryInUse):
        folder.evict(name)
    del view
    assert folder.evict(name) > 0
    with pytest.raises(FileNotFoundError):
        folder.evict(name)


def test_another_process_holds_it_until_it_is_killed(folder: StoreFolder) -> None:
    (name,) = fill(folder, "a")
    with python_process(HOLD, str(folder.path), name) as process:
        assert folder.entries()[0].pids == (process.pid,)
        with pytest.raises(EntryInUse, match=str(process.pid)):
            folder.evict(name)
        process.kill()
        process.wait()
        assert folder.entries()[0].pids == ()
        assert folder.evict(name) > 0


WRITE_AND_HANG = """
import sys, time
from pathlib import Path
import torch
from loader.store.folder import StoreFolder
from tests.support.restart_store import KEY, NO_LIMITS
from loader.store.tensors import write_entry
def progress(done):
    if not done:
        return
    print("ready", flush=True)
    time.sleep(600)
with StoreFolder(Path(sys.argv[1]), create=True) as folder:
    write_entry(folder, KEY, {"a": torch.ones(99), "b": torch.ones(9)}, model="m", limits=NO_LIMITS,
                progress=progress)
"""


def test_what_is_idle_can_be_evicted_as_a_whole(folder: StoreFolder, tmp_path: Path) -> None:
    used, _ = fill(folder, "a", "b")
    (folder.path / "x.1-2.writing").touch()
    entry = map_entry(folder, used, num_threads=1)
    assert entry is not None
    evict_idle(folder.path)
    assert files(folder) == {f"{used}.weights"}
    del entry
    folder.path.chmod(0o755)
    evict_idle(folder.path)
    evict_idle(tmp_path / "none")
    assert files(folder) == {f"{used}.weights"} and not (tmp_path / "none").exists()


def test_a_writer_that_is_killed_leaves_nothing_that_counts(folder: StoreFolder) -> None:
    with python_process(WRITE_AND_HANG, str(folder.path)) as process:
        assert map_entry(folder, KEY.name, num_threads=1) is None
        (entry,) = folder.entries()
        assert (entry.is_whole, entry.pids) == (False, (process.pid,))
        folder.sweep()
        assert len(files(folder)) == 1, "one that is being written stays"
    assert map_entry(folder, KEY.name, num_threads=1) is None
    write(folder, KEY, TENSORS)
    assert files(folder) == {f"{KEY.name}.weights"}


def cancel(done: int) -> None:
    if done:
        raise LoadCancelled


def test_what_fails_while_it_is_written_leaves_nothing(folder: StoreFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LoadCancelled):
        write(folder, KEY, TENSORS, progress=cancel)
    assert files(folder) == set()

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        write(folder, KEY, TENSORS)
    assert files(folder) == set()


def test_the_file_system_limits_it(folder: StoreFolder) -> None:
    system = os.statvfs(folder.path)
    with (
        pytest.raises(StoreFull, match="bytes free"),
        folder.create("x", system.f_frsize * system.f_blocks, Limits(None, lambda: 1 << 60)),
    ):
        pass


def test_the_first_of_two_writers_of_one_entry_wins(folder: StoreFolder) -> None:
    first, second = some_tensors(0), some_tensors(1)

    def other_writes(_: int) -> None:
        if not folder.path.joinpath(f"{KEY.name}.weights").exists():
            with StoreFolder(folder.path, create=False) as other:
                write(other, KEY, first)

    write(folder, KEY, second, progress=other_writes)
    assert files(folder) == {f"{KEY.name}.weights"}
    with StoreFolder(folder.path, create=False) as again:
        write(again, KEY, second)
    entry = map_entry(folder, KEY.name, num_threads=1)
    assert entry is not None
    stored = entry.header.tensors["float32"]
    data = entry.data[stored.offset : stored.offset + stored.num_bytes].tobytes()
    assert data == first["float32"].numpy().tobytes()


def test_a_lock_that_is_not_let_go_is_an_error_and_no_hang(folder: StoreFolder, tmp_path: Path) -> None:
    descriptor = os.open(folder.path / ".lock", os.O_RDWR)
    mine = os.open(folder.path / ".lock", os.O_RDWR)
    try:
        with (
            locks.locked(mine, folder.path),
            pytest.raises(StoreBusy, match="not free within"),
            locks.locked(descriptor, folder.path, timeout_s=0.05),
        ):
            pass
        with locks.locked(descriptor, folder.path, timeout_s=0.05):
            pass
    finally:
        os.close(descriptor)
        os.close(mine)


def test_holders_are_read_from_the_kernels_list(tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    status = (tmp_path / "f").stat()
    place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    (tmp_path / "locks").write_text(
        f"1: FLOCK  ADVISORY  READ 41 {place} 0 EOF\n2: POSIX  ADVISORY  READ 42 {place} 0 EOF\n"
        f"3: FLOCK  ADVISORY  WRITE 43 {place}1 0 EOF\n4: FLOCK  ADVISORY  READ 40 {place} 0 EOF\nrubbish\n"
        f"4: -> FLOCK  ADVISORY  WRITE 44 {place} 0 EOF\n"
    )
    assert locks.holders(status, tmp_path / "locks") == (40, 41)
    assert locks.holders(status, tmp_path / "none") == ()


def test_reading_the_folder_needs_no_torch() -> None:
    code = "import sys, loader.store.mapping, loader.store.folder; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
