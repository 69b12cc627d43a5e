"""Limits of machine and control groups, read from made-up trees, and the plan of the cache."""

from pathlib import Path

import numpy as np
import pytest
import torch

from worker_service.runtime import memory
from worker_service.runtime.errors import RuntimeFailure
from worker_service.runtime.memory import CacheBudget, HostMemory, explains_out_of_memory, host_memory, plan_cache

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
    assert host_memory(proc, cgroup) == HostMemory(4 * GIB, 2 * GIB)


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


def plan(fraction: float = 0.9, kv_cache_bytes: int | None = None, activation_bytes: int = GIB) -> int:
    budget = CacheBudget(fraction, kv_cache_bytes)
    return plan_cache(CPU, budget, weight_bytes=GIB, activation_bytes=activation_bytes).available_bytes


@pytest.mark.usefixtures("there")
def test_a_cpu_cache_takes_a_modest_part_of_what_is_free() -> None:
    assert plan() == int(2.5 * GIB)
    assert plan(fraction=0.2) == GIB
    assert plan(activation_bytes=9 * GIB) == GIB


@pytest.mark.usefixtures("there")
def test_a_large_machine_is_not_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "device_memory", lambda _: HostMemory(200 * GIB, 150 * GIB))
    assert plan() == 4 * GIB


@pytest.mark.usefixtures("there")
def test_what_is_set_is_what_is_planned() -> None:
    assert plan(kv_cache_bytes=12345) == 12345
    assert plan(kv_cache_bytes=9 * GIB) == 9 * GIB


@pytest.mark.usefixtures("there")
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kv_cache_bytes": 9 * GIB + 1}, ("kv_cache_bytes", "9.00 GiB", "10.00 GiB", "memory_fraction")),
        ({"fraction": 0.1}, ("memory_fraction", "2.00 GiB")),
        ({"activation_bytes": 10 * GIB}, ("max_num_batched_tokens", "10.00 GiB")),
    ],
)
def test_too_little_says_what_there_was_and_what_to_change(settings: dict[str, float], words: tuple[str, ...]) -> None:
    with pytest.raises(RuntimeFailure) as failed:
        plan(**settings)  # type: ignore[arg-type]
    assert failed.value.code == "out_of_memory"
    assert all(word in str(failed.value) for word in words), str(failed.value)
    assert failed.value.metadata["free_bytes"] == str(10 * GIB)


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
