"""Who holds memory, from made-up process tables."""

from pathlib import Path

import pytest
import torch

from worker_service.runtime.holders import Holder, host_holders, who_holds

MIB = 2**20


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    sizes = {"1": ("init", 8), "20": ("python3", 4096), "21": ("node", 900), "22": ("sh", 70), "99": ("worker", 2000)}
    for number, (name, size_mib) in sizes.items():
        folder = tmp_path / number
        folder.mkdir()
        (folder / "status").write_text(f"Name:\t{name}\nUmask:\t0022\nVmRSS:\t {size_mib * 1024} kB\n")
    (tmp_path / "30").mkdir()  # a process that ends while it is looked at
    (tmp_path / "self").mkdir()
    (tmp_path / "meminfo").write_text(f"MemTotal: {2**24} kB\nShmem: {300 * 1024} kB\n")
    return tmp_path


def test_the_largest_others_are_named_and_files_in_memory(proc: Path) -> None:
    assert host_holders(proc, own_id=99) == [
        Holder("python3 (process 20)", 4096 * MIB),
        Holder("node (process 21)", 900 * MIB),
        Holder("sh (process 22)", 70 * MIB),
        Holder("files in memory", 300 * MIB),
    ]


def test_what_is_small_is_not_named(proc: Path) -> None:
    (proc / "meminfo").write_text("Shmem: 4 kB\n")
    for number in ("20", "21", "22"):
        (proc / number / "status").unlink()
    assert host_holders(proc, own_id=99) == []


def test_nothing_to_be_seen_is_no_failure(tmp_path: Path) -> None:
    assert host_holders(tmp_path / "none") == []


def test_holders_are_told_in_words() -> None:
    assert str(Holder("python3 (process 20)", 4 * 2**30)) == "python3 (process 20) 4.00 GiB"
    assert "this process" not in who_holds(torch.device("cpu"))


def test_of_cuda_only_the_sum_of_all_others_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (2 * 2**30, 16 * 2**30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: 3 * 2**30)
    assert who_holds(torch.device("cuda", 0)) == "other processes and CUDA itself 11.00 GiB"
