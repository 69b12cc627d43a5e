"""Workers that are killed, and those that take their weights over: nothing is read again, and nothing changes."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from loader.store.folder import StoreFolder
from stepwire.client import Client
from tests.support.restart_store import python_process
from tests.support.stack import serve, tiny_limits
from tests.support.tiny_checkpoint import make_tiny_llama

PROMPT, NUM_TOKENS = "the quick brown fox", 24


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def shm(tmp_path: Path) -> Iterator[Path]:
    """A folder for a store on the tmpfs."""
    path = Path(f"/dev/shm/stepwire-test-{os.getpid()}-{tmp_path.name}")
    yield path
    subprocess.run([sys.executable, "-m", "stepwire.cli.main", "store", "evict", "--all", "--folder", path], check=True)
    (path / ".lock").unlink()
    path.rmdir()


def greedy(target: str) -> list[int]:
    with Client(target) as client:
        return client.complete(PROMPT, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True).token_ids


def loaded(log: Path) -> dict[str, Any]:
    """What the worker logged of its last load."""
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    found: dict[str, Any] = [line for line in lines if line["message"] == "model_loaded"][-1]
    return found


def test_a_worker_after_one_that_was_killed_maps_its_weights_and_says_the_same(
    model: Path, tmp_path: Path, shm: Path
) -> None:
    flags = tiny_limits(256, 64, f"--restart-store={shm}")
    with serve(model, tmp_path / "first", *flags) as server:
        tokens, pid = greedy(server.target), server.pids["worker"]
        with StoreFolder(shm, create=False) as folder:
            (entry,) = folder.entries()
            assert entry.pids == (pid,)
        assert {"read", "store"} <= loaded(server.worker_log_path)["phases"].keys()
        os.kill(pid, signal.SIGKILL)
        assert greedy(server.target) == tokens
        again = server.pids["worker"]
        assert again != pid
        assert loaded(server.worker_log_path)["phases"].keys() == {"inspect", "map", "attach"}
        with StoreFolder(shm, create=False) as folder:
            assert [entry.pids for entry in folder.entries()] == [(again,)]


LOAD = """
import json, os, sys
from pathlib import Path
from loader.shares import RankPlace
from stepwire.telemetry.logs import configure_logging
from worker_service.runtime.restart_store import RestartStore
from worker_service.runtime.step import NewSequence, Sampling, StepInput
from worker_service.runtime.worker import WorkerRuntime
from worker_service.settings import WorkerSettings
configure_logging(level="error", service="test")
settings = WorkerSettings(restart_store=sys.argv[2], threads=1)
runtime = WorkerRuntime(settings, RestartStore.of_settings(settings.restart_store, None))
runtime.init_device(RankPlace())
print("ready", flush=True)
sys.stdin.readline()
summary = runtime.load_model(Path(sys.argv[1]), "float32", lambda *_: None, lambda: False)
runtime.initialize_cache(8, 16, 64)
new = NewSequence(1, "r", [1, 2, 3, 4, 5], 5, Sampling(), range(1))
output = runtime.execute(StepInput(1, [new], [1], [5], [0], [0], [], [], []))
print(json.dumps([list(output.token_ids), [phase.name for phase in summary.phases]]), flush=True)
sys.stdin.readline()
"""
"""Loads the model argv[1] with the store argv[2] after one line, says what it sampled, and ends after another."""


def test_workers_that_load_at_once_share_one_entry(model: Path, shm: Path) -> None:
    with ExitStack() as stack:
        workers = [stack.enter_context(python_process(LOAD, str(model), str(shm))) for _ in range(2)]
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.write("\n")
            worker.stdin.flush()
        answers = [json.loads(worker.stdout.readline()) for worker in workers if worker.stdout is not None]
        assert len(answers) == 2 and answers[0][0] == answers[1][0]
        assert all(answer[1][-2:] == ["map", "attach"] for answer in answers)
        with StoreFolder(shm, create=False) as folder:
            (entry,) = folder.entries()
            assert entry.pids == tuple(sorted(worker.pid for worker in workers))
            assert {path.suffix for path in shm.iterdir()} == {"", ".weights"}
