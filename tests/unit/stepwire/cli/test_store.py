"""`stepwire store`: what is kept for restarts, and how to be rid of it."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from loader.shares import RankPlace
from loader.store.folder import StoreFolder
from loader.store.mapping import map_entry
from tests.support.restart_store import HOLD, KEY, key, python_process, some_tensors, write


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreFolder]:
    monkeypatch.setenv("STEPWIRE_RESTART_STORE", str(tmp_path / "store"))
    with StoreFolder(tmp_path / "store", create=True) as folder:
        yield folder


def test_a_list_says_what_each_entry_is(folder: StoreFolder, run_command: Callable[..., Any]) -> None:
    other = key(place=RankPlace(1, 2), dtype="float16", quantisation="int8")
    write(folder, KEY, some_tensors())
    write(folder, other, some_tensors())
    (folder.path / f"{'0' * 32}.weights").write_bytes(b"rubbish")
    with python_process(HOLD, str(folder.path), KEY.name) as process:
        shown = run_command("store", "list")
        assert shown.exit_code == 0
        lines = shown.stdout.splitlines()
        ours = next(line for line in lines if line.startswith(KEY.name[:12]))
        for words in (" m ", "tp 0/1 pp 0/1", "bfloat16", "none", "KiB", "s ago", str(process.pid)):
            assert words in ours
        theirs = next(line for line in lines if line.startswith(other.name[:12]))
        for words in ("tp 1/2 pp 0/1", "float16", "int8"):
            assert words in theirs
        assert any("(unreadable)" in line for line in lines)
        assert lines[-1].startswith(f"{folder.path}: 3 entries")
        found = json.loads(run_command("store", "list", "--json").stdout)
    entries = {entry["key"]: entry for entry in found["entries"]}
    assert entries[KEY.name]["pids"] == [process.pid] and entries[KEY.name]["model"] == "/models/m"
    assert entries[other.name]["of"]["place"]["tensor_rank"] == 1
    assert "model" not in entries["0" * 32]


def test_no_store_is_an_empty_list(tmp_path: Path, run_command: Callable[..., Any]) -> None:
    shown = run_command("store", "list", "--folder", str(tmp_path / "none"))
    assert (shown.exit_code, shown.stdout) == (0, f"{tmp_path / 'none'}: 0 entries, 0 B\n")


def test_a_store_that_others_can_use_is_refused(folder: StoreFolder, run_command: Callable[..., Any]) -> None:
    folder.path.chmod(0o755)
    done = run_command("store", "list")
    assert done.exit_code == 1 and f"chmod 700 {folder.path}" in done.stderr


def test_verify_finds_and_removes_what_is_damaged(folder: StoreFolder, run_command: Callable[..., Any]) -> None:
    write(folder, KEY, some_tensors())
    before = folder.entries()[0].last_used_s
    assert run_command("store", "verify").stdout == f"{KEY.name[:12]}  sound\n"
    assert folder.entries()[0].last_used_s == before, "to look is not to use"
    path = folder.path / f"{KEY.name}.weights"
    data = bytearray(path.read_bytes())
    data[-64] ^= 1
    path.write_bytes(data)
    done = run_command("store", "verify", "--json")
    assert done.exit_code == 1
    assert json.loads(done.stdout)[KEY.name].startswith("damaged, removed: tensor")
    assert not path.exists()


def test_evict_by_the_beginning_of_a_key(folder: StoreFolder, run_command: Callable[..., Any]) -> None:
    other = key(dtype="float16")
    write(folder, KEY, some_tensors())
    write(folder, other, some_tensors())
    assert "evicted" in run_command("store", "evict", KEY.name[:10]).stdout
    assert [entry.name for entry in folder.entries()] == [other.name]
    done = run_command("store", "evict", KEY.name[:10])
    assert done.exit_code == 1 and "key of 0 entries" in done.stderr
    assert run_command("store", "evict").exit_code == 2
    assert run_command("store", "evict", "x", "--all").exit_code == 2


def test_evict_all_spares_what_is_in_use(folder: StoreFolder, run_command: Callable[..., Any]) -> None:
    write(folder, KEY, some_tensors())
    write(folder, key(dtype="float16"), some_tensors())
    (folder.path / f"{'1' * 32}.1-2.writing").write_bytes(b"left by a writer that was killed")
    entry = map_entry(folder, KEY.name, num_threads=1)
    assert entry is not None
    done = run_command("store", "evict", "--all")
    assert done.exit_code == 1 and "is in use by" in done.stderr
    assert [entry.name for entry in folder.entries()] == [KEY.name]
    del entry
    assert run_command("store", "evict", "--all").exit_code == 0
    assert folder.entries() == []


def test_it_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from stepwire.cli.main import run; "
        f"run(['store', 'list', '--folder', {str(tmp_path / 'none')!r}]); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0
