"""Limits of machine and control groups, read from made-up trees, and the plan of the cache."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from worker_service.runtime import memory
from worker_service.runtime.errors import RuntimeFailure
from worker_service.runtime.memory import (
    HostMemory,
    MemoryBudget,
    check_cache_fits,
    explains_out_of_memory,
    host_memory,
    plan_cache,
)
from worker_service.runtime.report import MemoryReport

CPU = torch.device("cpu")
GIB = 2**30


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="ascii")


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    write(tmp_path / "proc/meminfo", f"MemTotal: {16 * 2**20} kB\nMemAvailable: {10 * 2**20} kB\n")
    return tmp_path / "proc"


@pytest.fixture
def cgroup(tmp_path: Path) -> Path:
    return tmp_path / "cgroup"


def test_without_groups_the_machine_counts(proc: Path, cgroup: Path) -> None:
    assert host_memory(proc, cgroup) == HostMemory(16 * GIB, 10 * GIB)


def test_version_2_limits_hold_from_any_ancestor(proc: Path, cgroup: Path) -> None:
    write(proc / "self/cgroup", "0::/pod/container\n")
    write(cgroup / "pod/memory.max", f"{4 * GIB}\n")
    write(cgroup / "pod/memory.current", f"{3 * GIB}\n")
    write(cgroup / "pod/memory.stat", f"anon 1\ninactive_file {GIB}\n")
    write(cgroup / "pod/container/memory.max", "max\n")
    found = host_memory(proc, cgroup)
    assert found == HostMemory(4 * GIB, 2 * GIB)
    assert found.group == "/pod"


def test_version_1_limits(proc: Path, cgroup: Path) -> None:
    write(proc / "self/cgroup", "9:cpu:/a\n4:hugetlb,memory:/a\n0::/\n")
    write(cgroup / "memory/memory.limit_in_bytes", "9223372036854771712\n")
    write(cgroup / "memory/a/memory.limit_in_bytes", f"{2 * GIB}\n")
    write(cgroup / "memory/a/memory.usage_in_bytes", f"{GIB}\n")
    assert host_memory(proc, cgroup) == HostMemory(2 * GIB, GIB)


def test_a_namespaced_group_is_the_root_of_its_tree(proc: Path, cgroup: Path) -> None:
    write(proc / "self/cgroup", "0::/../../elsewhere\n")
    write(cgroup / "memory.max", f"{GIB}\n")
    write(cgroup / "memory.current", f"{2 * GIB}\n")
    assert host_memory(proc, cgroup) == HostMemory(GIB, 0)


def test_this_machine_has_memory() -> None:
    found = host_memory()
    assert 0 < found.free_bytes <= found.total_bytes
    assert 0 < memory.own_bytes(CPU) < found.total_bytes


def test_the_peak_of_a_call_is_measured_though_it_is_given_back() -> None:
    size = 64 * 2**20

    def call() -> None:
        np.ones(size, np.uint8)

    assert size * 0.9 <= memory.peak_bytes(CPU, call) < size * 3


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "device_memory", lambda _: HostMemory(20 * GIB, 10 * GIB))
    monkeypatch.setattr(memory, "own_bytes", lambda _: 2 * GIB)


def report(activation_bytes: int = GIB, **budget: object) -> MemoryReport:
    settings = {"memory_fraction": 0.9, "kv_cache_bytes": None, **budget}
    return plan_cache(CPU, MemoryBudget(**settings), weight_bytes=GIB, activation_bytes=activation_bytes)  # type: ignore[arg-type]


def plan(**values: object) -> int:
    return report(**values).available_bytes  # type: ignore[arg-type]


@pytest.mark.usefixtures("there")
def test_a_cpu_cache_takes_a_modest_part_of_the_memory() -> None:
    assert plan() == 4 * GIB
    assert plan(memory_fraction=0.2) == GIB
    assert plan(activation_bytes=15 * GIB) == GIB


def test_a_part_is_one_of_what_the_control_group_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "device_memory", lambda _: HostMemory(8 * GIB, 8 * GIB))
    monkeypatch.setattr(memory, "own_bytes", lambda _: GIB)
    assert plan() == 2 * GIB


@pytest.mark.usefixtures("there")
def test_ranks_of_one_machine_share_its_memory() -> None:
    assert plan(local_ranks=4) == GIB
    # 20 GiB x 0.9 / 5, less the 2 GiB that it holds and the 1 GiB of a step.
    assert plan(local_ranks=5, kv_cache_bytes=6 * GIB // 10) == 6 * GIB // 10
    with pytest.raises(RuntimeFailure, match=r"may use 3\.60 GiB of cpu.* leaves 0\.60 GiB"):
        plan(local_ranks=5, kv_cache_bytes=GIB)


@pytest.mark.usefixtures("there")
def test_a_hard_limit_holds_beside_the_fraction() -> None:
    assert report(memory_limit_bytes=5 * GIB).limit_bytes == 5 * GIB
    assert plan(memory_limit_bytes=5 * GIB) == 2 * GIB
    assert report(memory_limit_bytes=19 * GIB).limit_bytes == 18 * GIB


@pytest.mark.usefixtures("there")
def test_a_neighbour_that_comes_or_goes_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    reports = []
    for free_gib in (17, 10, 1, 0):
        monkeypatch.setattr(memory, "device_memory", lambda _, free=free_gib: HostMemory(20 * GIB, free * GIB))
        reports.append((report(), report(kv_cache_bytes=9 * GIB), report(memory_limit_bytes=6 * GIB)))
    assert set(reports) == {reports[0]}


def test_a_real_neighbour_changes_nothing() -> None:
    before, own = report(kv_cache_bytes=1), memory.own_bytes(CPU)
    command = [sys.executable, "-c", "held = bytearray(b'x') * (256 << 20); print(); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as neighbour:
        assert neighbour.stdout is not None and neighbour.stdin is not None
        neighbour.stdout.readline()
        assert report(kv_cache_bytes=1) == before
        assert abs(memory.own_bytes(CPU) - own) < 64 << 20
        neighbour.stdin.write(b"\n")


@pytest.mark.usefixtures("there")
def test_what_is_set_is_what_is_planned() -> None:
    assert plan(kv_cache_bytes=12345) == 12345
    assert plan(kv_cache_bytes=15 * GIB) == 15 * GIB


@pytest.mark.usefixtures("there")
@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"kv_cache_bytes": 15 * GIB + 1}, ("kv_cache_bytes asks for 15.00 GiB", "18.00 GiB", "raise memory_fraction")),
        ({"kv_cache_bytes": GIB, "memory_limit_bytes": 3 * GIB}, ("leaves 0.0 MiB", "raise memory_limit_bytes")),
        ({"memory_fraction": 0.1}, ("raise memory_fraction", "may use 2.00 GiB")),
        ({"memory_limit_bytes": GIB}, ("raise memory_limit_bytes", "may use 1.00 GiB")),
        ({"activation_bytes": 16 * GIB}, ("lower max_num_batched_tokens", "16.00 GiB more")),
    ],
)
def test_too_little_says_what_there_was_and_what_to_change(values: dict[str, object], words: tuple[str, ...]) -> None:
    with pytest.raises(RuntimeFailure) as failed:
        plan(**values)
    assert failed.value.code == "out_of_memory"
    assert all(word in str(failed.value) for word in words), str(failed.value)
    assert failed.value.metadata["own_bytes"] == str(2 * GIB)


@pytest.mark.usefixtures("there")
def test_a_cache_is_refused_when_others_hold_the_memory_now(monkeypatch: pytest.MonkeyPatch) -> None:
    check_cache_fits(CPU, 10 * GIB)
    monkeypatch.setattr(memory, "device_memory", lambda _: HostMemory(20 * GIB, 3 * GIB, "/pod/a"))
    monkeypatch.setattr(memory, "who_holds", lambda _: "python3 (process 7) 15.00 GiB")
    with pytest.raises(RuntimeFailure) as failed:
        check_cache_fits(CPU, 10 * GIB)
    text = str(failed.value)
    for words in (
        "needs 10.00 GiB",
        "control group /pod/a has 3.00 GiB free",
        "this process holds 2.00 GiB",
        "others hold: python3 (process 7) 15.00 GiB",
        "lower num_kv_blocks or kv_cache_bytes",
    ):
        assert words in text, text
    assert failed.value.metadata["free_bytes"] == str(3 * GIB)


def test_a_failed_allocation_is_explained() -> None:
    with (
        pytest.raises(RuntimeFailure, match=r"the model.*buy more") as failed,
        explains_out_of_memory(CPU, "the model", "buy more"),
    ):
        torch.empty(2**50)
    assert failed.value.code == "out_of_memory"


def test_other_errors_are_left_alone() -> None:
    with pytest.raises(RuntimeError, match="size"), explains_out_of_memory(CPU, "", ""):
        torch.ones(2) + torch.ones(3)
