"""The file system of the restart store is full, or fills up: the service goes on without it, and says so once."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from stepwire.client import Client
from tests.support.restart_store import python_process
from tests.support.small_disk import cannot_mount, filled, small_disk
from tests.support.stack import serve, tiny_limits
from tests.support.tiny_checkpoint import make_tiny_llama

WHY_NOT = cannot_mount()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    folder = tmp_path / "disk"
    folder.mkdir()
    return folder


def warnings_of(text: str) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return [record for record in records if record["level"] in ("warning", "error", "critical")]


def greedy(target: str) -> list[int]:
    with Client(target) as client:
        return client.complete("the quick brown fox", max_tokens=24, temperature=0.0, ignore_eos=True).token_ids


def test_a_service_goes_on_without_a_store_whose_file_system_is_full(model: Path, tmp_path: Path, disk: Path) -> None:
    """vllm #1125, #789, production-stack #899: where /dev/shm was too small, as in containers, nothing was served."""
    store = disk / "store"
    prefix = [*small_disk(disk, "1M"), *filled(disk)]
    with serve(model, tmp_path, *tiny_limits(256, 64, f"--restart-store={store}"), prefix=prefix) as server:
        tokens, pid = greedy(server.target), server.pids["worker"]
        for num_workers in (1, 2):
            told = warnings_of(server.worker_log_path.read_text())
            assert [record["message"] for record in told] == ["weights_not_kept"] * num_workers
            assert f"{store} has 0 bytes free" in told[-1]["reason"]
            if num_workers == 1:
                os.kill(pid, signal.SIGKILL)
                assert greedy(server.target) == tokens
                assert server.pids["worker"] != pid
        (there,) = Path(f"/proc/{server.pids['worker']}/root{store}").iterdir()
        assert there.name == ".lock"


LOAD = """
import json, os, sys
from pathlib import Path
from loader.shares import RankPlace
from stepwire.telemetry.logs import configure_logging
from worker_service.runtime.restart_store import RestartStore
from worker_service.runtime.worker import WorkerRuntime
from worker_service.settings import WorkerSettings
model, disk = map(Path, sys.argv[1:])
configure_logging(level="warning", service="test")
settings = WorkerSettings(restart_store=str(disk / "store"), threads=1)
runtime = WorkerRuntime(settings, RestartStore.of_settings(settings.restart_store, None))
runtime.init_device(RankPlace())
print("ready", flush=True)
def fill(phase, done_bytes, total_bytes):
    if phase == "store" and done_bytes:
        with (disk / "of-somebody-else").open("ab", buffering=0) as file, __import__("contextlib").suppress(OSError):
            while True:
                file.write(bytes(4096))
summary = runtime.load_model(model, "float32", fill, lambda: False)
print(json.dumps([summary.weight_bytes, summary.mapped_bytes, os.listdir(disk / "store")]), flush=True)
sys.stdin.readline()
"""
"""Loads the model argv[1] with a store on the file system argv[2], which another fills while the store is written."""


def test_a_disk_that_fills_up_while_weights_are_written_costs_another_read(
    model: Path, tmp_path: Path, disk: Path
) -> None:
    with (
        (tmp_path / "log").open("w") as log,
        python_process(LOAD, str(model), str(disk), prefix=small_disk(disk, "1M"), stderr=log) as worker,
    ):
        assert worker.stdout is not None
        weight_bytes, mapped_bytes, left = json.loads(worker.stdout.readline())
    assert weight_bytes > 0
    assert mapped_bytes == 0, "what could not be written is used"
    assert left == [".lock"]
    (told,) = warnings_of((tmp_path / "log").read_text())
    assert told["message"] == "restart_store_unusable"
    assert f"{disk / 'store'} is full (No space left on device)" in told["reason"]
    assert "restart_store" in told["reason"]
