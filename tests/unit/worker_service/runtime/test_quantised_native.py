"""Quantised models on the compiled kernels: in float32 token for token what the weights made whole generate."""

from pathlib import Path

import pytest
import torch

from loader.checkpoint import open_checkpoint
from loader.layout import Linear, parameters
from loader.quantised.load import load_rank
from loader.quantised.roundings import ROUNDINGS, Rounding
from loader.shares import RankPlace
from tests.support.tiny_checkpoint import TINY_FAMILIES, make_tiny_llama
from tests.support.tiny_quantised_models import (
    ROUNDED_INPUTS,
    WEIGHT_ONLY,
    Format,
    gptq,
    make_tiny_quantised,
    stored_tensors,
)
from tests.support.tiny_runner import Driver, load_tiny, make_runner, one_thread
from worker_service.kernels import native
from worker_service.models.native import computes
from worker_service.runtime.engine import Engine, TorchEngine
from worker_service.runtime.loading import LoadJob, LoadPhases, load_into
from worker_service.runtime.native import NativeEngine
from worker_service.runtime.restart_store import RestartStore
from worker_service.runtime.runner import ModelRunner
from worker_service.runtime.step import Sampling

PROMPTS = ([5, 9, 200, 31], [7] * 11, [300, 4, 18, 77, 120, 66], list(range(1, 60)))
NUM_OUTPUTS = 16
INTEGERS = {name: form for name, form in WEIGHT_ONLY.items() if "fp8" not in name}

pytestmark = pytest.mark.skipif(native.load() is None, reason="the kernels cannot be compiled here")


def native_engine(
    folder: Path,
    pool: native.Pool,
    dtype: torch.dtype = torch.float32,
    rounding: Rounding | None = None,
    store: RestartStore | None = None,
) -> tuple[NativeEngine, list[str]]:
    """The engine with its weights, and the phases of the load."""
    job = LoadJob(open_checkpoint(folder), RankPlace(), dtype, torch.device("cpu"), rounding)
    config = job.checkpoint.config
    assert computes(config, job.place, dtype, rounding)
    engine, phases = NativeEngine(config, dtype, pool), LoadPhases(lambda *_: None, lambda: False)
    load_into(engine, job, store, phases)
    return engine, [phase.name for phase in phases.finish()]


def driver_of(engine: NativeEngine, sampling: Sampling | None = None) -> Driver:
    executor = engine.executor(64, 16, 128)
    driver = Driver(ModelRunner(executor, max_model_len=128), executor)
    for number, prompt in enumerate(PROMPTS, 1):
        driver.add(number, prompt, sampling)
    return driver


def greedy(engine: NativeEngine, chunk: int = 1000) -> list[list[int]]:
    driver = driver_of(engine)
    driver.run(NUM_OUTPUTS, chunk)
    return [driven.output for driven in driver.sequences.values()]


def reference(folder: Path, rounding: Rounding | None = None) -> list[list[int]]:
    """By plain torch, in float32."""
    with one_thread():
        driver = Driver(*make_runner(load_tiny(folder, rounding=rounding)))
        for number, prompt in enumerate(PROMPTS, 1):
            driver.add(number, prompt)
        driver.run(NUM_OUTPUTS)
    return [driven.output for driven in driver.sequences.values()]


@pytest.mark.parametrize("name", INTEGERS)
def test_generates_what_the_weights_made_whole_do(tmp_path: Path, pool: native.Pool, name: str) -> None:
    dense = tmp_path / "dense"
    folder = make_tiny_quantised(tmp_path / "quantised", INTEGERS[name], dense=dense)
    engine, _ = native_engine(folder, pool)
    tokens = greedy(engine)
    assert tokens == reference(dense)
    assert tokens == greedy(engine, chunk=3)
    assert len({token for output in tokens for token in output}) > 3


@pytest.mark.parametrize("name", [*WEIGHT_ONLY, *ROUNDED_INPUTS])
def test_packed_weights_stay_packed(tmp_path: Path, pool: native.Pool, name: str) -> None:
    """In either engine, its head too: by their bits, with scales, zero points and orders that are small beside them."""
    form = {**WEIGHT_ONLY, **ROUNDED_INPUTS}[name]
    folder = make_tiny_quantised(tmp_path, form, hidden_size=128, intermediate_size=256)
    job = LoadJob(open_checkpoint(folder), RankPlace(), torch.bfloat16, torch.device("cpu"))
    config = job.checkpoint.config
    products = [part for part in parameters(config, job.place) if isinstance(part, Linear) and part.scheme is not None]
    whole = sum(len(part.outputs) * len(part.inputs) for part in products) * 2
    bits = form.shape.bits if "I32" in {tensor.dtype for tensor in stored_tensors(folder).values()} else 8
    engines: list[tuple[Engine, int]] = [(TorchEngine(config, job.place, job.dtype, job.device), bits)]
    # Inputs of products that are computed as one have the order of none where each has its own.
    if computes(config, job.place, job.dtype) and "ordered" not in name:
        engines.append((NativeEngine(config, job.dtype, pool), max(bits, 4)))
    for engine, kept_bits in engines:
        tensors = load_rank(
            job.checkpoint, job.place, dtype=job.dtype, progress=lambda _: None, cancelled=lambda: False
        )
        packed = engine.pack(tensors)
        owners = {name.removesuffix(".form") for name in packed if name.endswith(".form")}
        held = sum(tensor.nbytes for name, tensor in packed.items() if name.rpartition(".")[0] in owners)
        assert whole * kept_bits / 16 <= held <= whole * (kept_bits / 16 + 0.065)


def test_inputs_are_rounded_as_the_reference_rounds_them(tmp_path: Path, pool: native.Pool) -> None:
    folder = make_tiny_quantised(tmp_path, ROUNDED_INPUTS["w8a8"])
    assert greedy(native_engine(folder, pool)[0]) == reference(folder)


@pytest.mark.parametrize("rounding", ["int8", "int4"])
@pytest.mark.parametrize("tied", [False, True])
def test_what_is_rounded_at_load_generates_alike(
    tmp_path: Path, pool: native.Pool, rounding: Rounding, tied: bool
) -> None:
    folder = make_tiny_llama(tmp_path, hidden_size=96, head_dim=16, tie=tied)
    engine, _ = native_engine(folder, pool, rounding=rounding)
    assert greedy(engine) == reference(folder, rounding)


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "olmo2"])
def test_families_with_biases_and_norms_of_their_own(tmp_path: Path, pool: native.Pool, family: str) -> None:
    folder = make_tiny_llama(tmp_path, config_overrides=TINY_FAMILIES[family])
    assert greedy(native_engine(folder, pool, rounding="int8")[0]) == reference(folder, "int8")


@pytest.mark.parametrize("form", [gptq(act_order=True, symmetric=False), ROUNDED_INPUTS["w8a8"], None])
def test_in_bfloat16_nothing_depends_on_the_batch(tmp_path: Path, pool: native.Pool, form: Format | None) -> None:
    folder = make_tiny_llama(tmp_path) if form is None else make_tiny_quantised(tmp_path, form)
    engine, _ = native_engine(folder, pool, torch.bfloat16, "int4" if form is None else None)
    together = greedy(engine)
    driver = driver_of(engine)
    for number in driver.sequences:
        while len(driver.sequences[number].output) < NUM_OUTPUTS:
            driver.step({number: 5})
    assert [driven.output for driven in driver.sequences.values()] == together


@pytest.mark.parametrize("rounding", ["int8", None])
def test_a_restart_maps_what_was_packed(tmp_path: Path, pool: native.Pool, rounding: Rounding | None) -> None:
    if rounding is None:
        folder = make_tiny_quantised(tmp_path / "model", gptq(lm_head=True, symmetric=False))
    else:
        folder = make_tiny_llama(tmp_path / "model", tie=True)
    first, phases = native_engine(folder, pool, rounding=rounding, store=store_at(tmp_path))
    assert phases == ["inspect", "map", "read", "pack", "store", "map", "attach"]
    second, phases = native_engine(folder, pool, rounding=rounding, store=store_at(tmp_path))
    assert phases == ["inspect", "map", "attach"]
    assert greedy(first) == greedy(second)


def store_at(tmp_path: Path) -> RestartStore:
    return RestartStore(tmp_path / "store", None, is_set=True)


@pytest.mark.parametrize("name", [*WEIGHT_ONLY, *ROUNDED_INPUTS])
def test_formats_of_floats_and_static_scales_are_left_to_torch(tmp_path: Path, name: str) -> None:
    folder = make_tiny_quantised(tmp_path, {**WEIGHT_ONLY, **ROUNDED_INPUTS}[name])
    config = open_checkpoint(folder).config
    assert computes(config, RankPlace(), torch.float32) == ("fp8" not in name)


def test_of_the_roundings_floats_are_left_to_torch(tmp_path: Path) -> None:
    config = open_checkpoint(make_tiny_llama(tmp_path)).config
    computed = [rounding for rounding in ROUNDINGS if computes(config, RankPlace(), torch.bfloat16, rounding)]
    assert computed == ["int8", "int4"]
