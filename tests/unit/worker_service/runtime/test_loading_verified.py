"""Files whose hash is known are held against it before they are read, and never twice."""

import hashlib
from pathlib import Path

import pytest
import torch

from loader.checkpoint import open_checkpoint
from loader.errors import CheckpointError
from loader.layout import weight_slices
from loader.shares import RankPlace
from tests.support.tiny_checkpoint import make_tiny_llama
from worker_service.runtime.engine import TorchEngine
from worker_service.runtime.loading import LoadJob, LoadPhases, load_into
from worker_service.runtime.report import LoadPhase

UNVERIFIED = ["inspect", "read", "pack", "attach"]


class Engine(TorchEngine):
    """Takes any weights, and computes nothing."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def pack(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return tensors

    def attach(self, packed: dict[str, torch.Tensor]) -> int:
        self.names = set(packed)
        return 0


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STEPWIRE_CACHE", str(tmp_path / "cache"))
    return make_tiny_llama(tmp_path / "m")


def write_hash(folder: Path) -> None:
    sha256 = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    (folder / "SHA256SUMS").write_text(f"{sha256}  model.safetensors\n")


def load(folder: Path) -> tuple[Engine, list[LoadPhase]]:
    engine, phases = Engine(), LoadPhases(lambda *_: None, lambda: False)
    job = LoadJob(open_checkpoint(folder), RankPlace(), torch.float32, torch.device("cpu"))
    load_into(engine, job, None, phases)
    assert engine.names == {want.name for want in weight_slices(job.checkpoint.config, RankPlace())}
    return engine, list(phases.finish())


def test_files_are_verified_by_the_first_load_alone(folder: Path) -> None:
    write_hash(folder)
    first = load(folder)[1]
    assert [phase.name for phase in first] == ["inspect", "verify", *UNVERIFIED[1:]]
    assert first[1].num_bytes == (folder / "model.safetensors").stat().st_size
    assert [phase.name for phase in load(folder)[1]] == UNVERIFIED


def test_without_a_hash_there_is_nothing_to_do(folder: Path) -> None:
    assert [phase.name for phase in load(folder)[1]] == UNVERIFIED


def test_wrong_bytes_of_the_right_size_are_refused_before_any_is_loaded(folder: Path) -> None:
    write_hash(folder)
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    phases = LoadPhases(lambda *_: None, lambda: False)
    job = LoadJob(open_checkpoint(folder), RankPlace(), torch.float32, torch.device("cpu"))
    engine = Engine()
    with pytest.raises(CheckpointError, match="does not hold what it was published with"):
        load_into(engine, job, None, phases)
    assert [phase.name for phase in phases.finish()] == ["inspect", "verify"]
    assert engine.names == set()
