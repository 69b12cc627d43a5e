"""Quantised checkpoints generate what the unquantised ones generate that they stand for."""

from pathlib import Path

import pytest
import torch

from loader.checkpoint import open_checkpoint
from loader.quantised.roundings import ROUNDINGS, Rounding
from loader.shares import RankPlace
from tests.support.runtime_settings import Settings
from tests.support.tiny_checkpoint import make_tiny_llama
from tests.support.tiny_quantised_models import (
    ROUNDED_INPUTS,
    WEIGHT_ONLY,
    Format,
    fp8_blocks,
    gptq,
    make_tiny_quantised,
)
from tests.support.tiny_runner import Driven, Driver, load_tiny, make_runner, one_thread
from worker_service.runtime.engine import TorchEngine
from worker_service.runtime.errors import RuntimeFailure
from worker_service.runtime.kv_cache import CacheShape, KvCache
from worker_service.runtime.loading import LoadJob, LoadPhases, load_into
from worker_service.runtime.report import LoadSummary
from worker_service.runtime.restart_store import RestartStore
from worker_service.runtime.runner import ModelRunner
from worker_service.runtime.step import Sampling
from worker_service.runtime.worker import WorkerRuntime

PROMPTS = ([5, 9, 200, 31], [7] * 11, [300, 4, 18, 77, 120, 66])


def generated(folder: Path, sampling: Sampling | None = None) -> list[Driven]:
    with one_thread():
        runner, cache = make_runner(load_tiny(folder))
        driver = Driver(runner, cache)
        driven = [driver.add(number, prompt, sampling) for number, prompt in enumerate(PROMPTS, 1)]
        driver.run(12)
    return driven


def greedy(folder: Path) -> list[list[int]]:
    return [sequence.output for sequence in generated(folder)]


@pytest.mark.parametrize("name", WEIGHT_ONLY)
def test_generates_what_the_unquantised_model_does(tmp_path: Path, name: str) -> None:
    dense = tmp_path / "dense"
    folder = make_tiny_quantised(tmp_path / "quantised", WEIGHT_ONLY[name], dense=dense)
    tokens = greedy(folder)
    assert tokens == greedy(dense)
    assert len({token for output in tokens for token in output}) > 3


@pytest.mark.parametrize("name", ROUNDED_INPUTS)
def test_rounding_inputs_changes_probabilities_a_little(tmp_path: Path, name: str) -> None:
    dense = tmp_path / "dense"
    folder = make_tiny_quantised(tmp_path / "quantised", ROUNDED_INPUTS[name], dense=dense)
    first, second = (
        [sequence.logprobs[0].logprob for sequence in generated(path, Sampling(logprobs=1))] for path in (folder, dense)
    )
    differences = [abs(a - b) for a, b in zip(first, second, strict=True)]
    assert 1e-5 < max(differences) < 0.3


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_a_worker_rounds_while_it_reads_and_that_is_part_of_what_it_holds(tmp_path: Path, rounding: Rounding) -> None:
    folder = make_tiny_llama(tmp_path, hidden_size=128, intermediate_size=256)
    runtime = WorkerRuntime(Settings(native_kernels=True))
    runtime.init_device(RankPlace())

    def load(quantize: str) -> LoadSummary:
        return runtime.load_model(folder, "float32", lambda *_: None, lambda: False, quantize)

    rounded = load(rounding)
    assert load(rounding).already_loaded
    whole = load("none")
    assert not whole.already_loaded
    assert rounded.weight_bytes < whole.weight_bytes * (0.5 if rounding == "int4" else 0.6)
    with pytest.raises(RuntimeFailure, match="int3"):
        load("int3")


@pytest.mark.parametrize("form", [gptq(act_order=True), fp8_blocks()], ids=["gptq", "fp8"])
def test_packed_weights_are_kept_for_a_restart(tmp_path: Path, form: Format) -> None:
    """They are mapped, computed with as they lie there, and give the same tokens."""
    folder = make_tiny_quantised(tmp_path / "model", form)
    expected = greedy(folder)
    job = LoadJob(open_checkpoint(folder), RankPlace(), torch.float32, torch.device("cpu"))
    for expected_phases in (["inspect", "map", "read", "pack", "store", "map", "attach"], ["inspect", "map", "attach"]):
        engine = TorchEngine(job.checkpoint.config, job.place, job.dtype, job.device)
        phases = LoadPhases(lambda *_: None, lambda: False)
        held = load_into(engine, job, RestartStore(tmp_path / "store", None, is_set=True), phases)
        assert [phase.name for phase in phases.finish()] == expected_phases
        assert held.mapped_bytes > 0
        with one_thread():
            runner = ModelRunner(engine.executor(256, 4, 256), max_model_len=256)
            driver = Driver(runner, KvCache(CacheShape(1, 1, 1, torch.float32), 256, 4, torch.device("cpu")))
            driven = [driver.add(number, prompt) for number, prompt in enumerate(PROMPTS, 1)]
            driver.run(12)
        assert [sequence.output for sequence in driven] == expected
