"""Each check against small worlds made for it."""

import os
import socket
from collections.abc import Iterable
from pathlib import Path

import pytest

from loader.inspection import Wish
from stepwire.cli.checks import devices, memory, software
from stepwire.cli.checks.checkpoint import check_checkpoint, check_log_dir
from stepwire.cli.checks.devices import check_devices, usable_cores
from stepwire.cli.checks.finding import Finding, human_bytes
from stepwire.cli.checks.memory import Memory, check_memory, read_memory
from stepwire.cli.checks.ports import check_port, owner_of
from stepwire.cli.checks.software import CudaDevice, TorchReport, check_software, probe_torch
from tests.support.tiny_checkpoint import make_tiny_llama

GIB = 2**30
GPU = CudaDevice("Fast 9000", 80 * GIB, 79 * GIB, "9.0")


def by_subject(findings: Iterable[Finding]) -> dict[str, Finding]:
    return {finding.subject: finding for finding in findings}


@pytest.mark.parametrize(("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 * 2**40, "5.0 TiB")])
def test_sizes_for_people(size: int, text: str) -> None:
    assert human_bytes(size) == text


def test_software_names_versions() -> None:
    found = by_subject(check_software(TorchReport(version="2.0", cuda_version="13.0", nccl_version="2.27.1")))
    assert "grpcio 1." in found["packages"].text
    assert found["torch"].text == "2.0 (CUDA 13.0, NCCL 2.27.1)"
    assert found["protocol"].status == "ok"


def test_missing_torch_is_a_warning_since_schedulers_need_none() -> None:
    finding = by_subject(check_software(TorchReport(error="No module named 'torch'")))["torch"]
    assert (finding.status, bool(finding.remedy)) == ("warn", True)


@pytest.mark.parametrize("script", ["raise ImportError('libcuda.so is missing')", "import os; os.abort()"])
def test_a_torch_that_breaks_does_not_break_the_doctor(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    monkeypatch.setattr(software, "_PROBE", script)
    assert probe_torch().error


def test_torch_is_read_from_its_own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    device = {"name": "x", "total_bytes": 2, "free_bytes": 1, "capability": "9.0"}
    report = {"version": "1", "cuda_version": None, "nccl_version": None, "num_threads": 2, "devices": [device]}
    monkeypatch.setattr(software, "_PROBE", f"import json; print('noise'); print(json.dumps({report!r}))")
    assert probe_torch() == TorchReport(version="1", num_threads=2, devices=(CudaDevice(**device),))  # type: ignore[arg-type]


def test_the_quota_of_the_control_group_counts(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert usable_cores(tmp_path)[1] == 1.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert usable_cores(tmp_path)[1] is None
    assert usable_cores(tmp_path / "none")[1] is None


def test_a_busy_device_is_named_with_its_occupants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_occupants", lambda: ["python (pid 7, 40 GiB)"])
    report = TorchReport(version="1", cuda_version="13", devices=(GPU, CudaDevice("Old", 10 * GIB, GIB, "7.0")))
    found = by_subject(check_devices(report, "cuda:1", None))
    assert found["cuda:0"].status == "ok"
    assert found["cuda:1"].status == "warn"
    assert "python (pid 7, 40 GiB)" in found["cuda:1"].text
    assert found["ranks"].status == "ok"


@pytest.mark.parametrize(
    ("device", "threads", "status"),
    [("cpu", None, "ok"), ("cpu", 4096, "warn"), ("cuda", None, "ok"), ("cuda:1", None, "fail")],
)
def test_ranks_against_devices(device: str, threads: int | None, status: str) -> None:
    report = TorchReport(version="1", cuda_version="13", devices=(GPU,))
    assert by_subject(check_devices(report, device, threads))["ranks"].status == status


def test_occupants_are_read_from_the_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'python, 123, 4096 MiB'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert devices._occupants() == ["python (pid 123, 4096 MiB)"]
    finding = by_subject(check_devices(TorchReport(version="1"), "cpu", None))["cuda"]
    assert (finding.status, "without CUDA" in finding.text) == ("warn", True)


def make_root(folder: Path, *, limit: str, used: str = "0") -> Path:
    (folder / "proc").mkdir()
    (folder / "proc/meminfo").write_text(f"MemTotal: {16 * 2**20} kB\nMemAvailable: {8 * 2**20} kB\n")
    (folder / "sys/fs/cgroup").mkdir(parents=True)
    (folder / "sys/fs/cgroup/memory.max").write_text(limit)
    (folder / "sys/fs/cgroup/memory.current").write_text(used)
    return folder


def test_memory_is_what_the_control_group_leaves(tmp_path: Path) -> None:
    found = read_memory(make_root(tmp_path, limit=str(4 * GIB), used=str(GIB)))
    assert found == Memory(16 * GIB, 8 * GIB, 4 * GIB, GIB)
    assert found.usable == 3 * GIB


def test_memory_without_a_limit(tmp_path: Path) -> None:
    found = read_memory(make_root(tmp_path, limit="max"))
    assert found is not None
    assert (found.limit, found.usable) == (None, 8 * GIB)
    assert read_memory(tmp_path / "none") is None


def test_little_memory_is_a_warning() -> None:
    findings = by_subject(check_memory(Memory(16 * GIB, 16 * GIB, 2 * GIB, GIB)))
    assert findings["memory"].status == "warn"
    assert by_subject(check_memory(Memory(16 * GIB, 8 * GIB, None, 0)))["memory"].status == "ok"
    assert by_subject(check_memory(None))["memory"].status == "warn"


def test_missing_and_small_shared_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert by_subject(check_memory(None, tmp_path / "none"))["shared memory"].status == "warn"

    class Small:
        f_frsize, f_blocks, f_bavail = 4096, 16384, 16384

    monkeypatch.setattr(memory.os, "statvfs", lambda _: Small)
    finding = by_subject(check_memory(None, tmp_path))["shared memory"]
    assert (finding.status, "shm_size" in finding.remedy) == ("warn", True)


def test_a_port_in_use_names_who_has_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        finding = check_port("127.0.0.1", port)
        assert finding.status == "fail"
        assert f"(pid {os.getpid()})" in finding.text
    assert owner_of(port) is None
    assert check_port("127.0.0.1", port).status == "ok"
    assert check_port("127.0.0.1", 0).status == "ok"


def test_an_address_of_another_machine_cannot_be_listened_on() -> None:
    finding = check_port("203.0.113.1", 50051)
    assert (finding.status, "--host" in finding.remedy) == ("fail", True)


def test_checkpoints(tmp_path: Path) -> None:
    assert check_checkpoint(None, None, Wish(), on_cpu=True).status == "ok"
    finding = check_checkpoint(str(tmp_path / "none"), None, Wish(), on_cpu=True)
    assert (finding.status, bool(finding.remedy)) == ("fail", True)


def test_a_checkpoint_that_cannot_fit_fails_on_cpu(tmp_path: Path) -> None:
    tiny_checkpoint = make_tiny_llama(tmp_path / "tiny")
    tight = Memory(GIB, 10, None, 0)
    assert check_checkpoint(str(tiny_checkpoint), None, Wish(), on_cpu=True).status == "ok"
    assert check_checkpoint(str(tiny_checkpoint), tight, Wish(), on_cpu=True).status == "fail"
    assert check_checkpoint(str(tiny_checkpoint), tight, Wish(), on_cpu=False).status == "ok"


def test_a_checkpoint_that_the_settings_do_not_fit_fails(tmp_path: Path) -> None:
    model = make_tiny_llama(tmp_path / "tiny")
    finding = check_checkpoint(str(model), None, Wish(num_kv_blocks=2), on_cpu=True)
    assert (finding.status, "max_model_len" in finding.remedy) == ("fail", True)
    (model / "tokenizer.json").unlink()
    assert "tokenizer.json" in check_checkpoint(str(model), None, Wish(), on_cpu=False).text


def test_log_folders(tmp_path: Path) -> None:
    assert check_log_dir(str(tmp_path / "a" / "b")).status == "ok"
    assert not (tmp_path / "a").exists()
    (tmp_path / "file").touch()
    assert check_log_dir(str(tmp_path / "file" / "b")).status == "fail"
