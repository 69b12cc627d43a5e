from pathlib import Path

import pytest
import torch

from worker_service.runtime import device
from worker_service.runtime.device import choose_dtype, device_name, does_natively, open_device, usable_cores
from worker_service.runtime.errors import RuntimeFailure

CPU = torch.device("cpu")


def test_the_cpu_is_always_there() -> None:
    assert open_device("cpu") == CPU
    assert device_name(CPU)


@pytest.mark.parametrize("name", ["tpu", "cuda:x", "cuda:-1", "cuda:999", "cpu:0", ""])
def test_a_device_that_is_not_there_is_named(name: str) -> None:
    with pytest.raises(RuntimeFailure) as failed:
        open_device(name)
    assert failed.value.code == "device_unavailable"
    assert repr(name) in str(failed.value)
    assert failed.value.metadata == {"device": name}


def test_a_torch_without_cuda_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    with pytest.raises(RuntimeFailure, match="CUDA build"):
        open_device("cuda")


def test_a_machine_without_a_cuda_device_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(RuntimeFailure, match="CUDA_VISIBLE_DEVICES"):
        open_device("cuda:0")


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="ascii")


def test_threads_respect_the_groups_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    assert usable_cores(tmp_path) == 8
    write(tmp_path / "cpu/cpu.cfs_quota_us", "50000\n")
    write(tmp_path / "cpu/cpu.cfs_period_us", "100000\n")
    assert usable_cores(tmp_path) == 1
    write(tmp_path / "cpu.max", "350000 100000\n")
    assert usable_cores(tmp_path) == 3
    write(tmp_path / "cpu.max", "max 100000\n")
    assert usable_cores(tmp_path) == 8


@pytest.mark.parametrize(
    ("features", "stored", "expected"),
    [
        ("fpu avx512f avx512_bf16", "bfloat16", torch.bfloat16),
        ("fpu amx_bf16", "bfloat16", torch.bfloat16),
        ("fpu avx2 avx512f", "bfloat16", torch.float32),
        ("fpu avx512_bf16", "float16", torch.float32),
        ("fpu avx512_fp16", "float16", torch.float16),
        ("fpu", "float32", torch.float32),
        ("fpu avx512_bf16", "float8_e4m3", torch.float32),
    ],
)
def test_auto_takes_the_stored_type_where_the_cpu_does_it_well(
    monkeypatch: pytest.MonkeyPatch, features: str, stored: str, expected: torch.dtype
) -> None:
    monkeypatch.setattr(device, "cpu_flags", lambda: frozenset(features.split()))
    assert choose_dtype("auto", stored, CPU) == expected


def test_a_type_that_is_asked_for_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "cpu_flags", frozenset)
    assert not does_natively("bfloat16", CPU)
    assert choose_dtype("bfloat16", "float32", CPU) == torch.bfloat16


def test_an_unknown_type_is_refused() -> None:
    with pytest.raises(RuntimeFailure, match="int3") as failed:
        choose_dtype("int3", "float32", CPU)
    assert failed.value.code == "invalid"
