"""A GGUF whose weights stay packed generates, in float32, token for token what they generate when made whole."""

from pathlib import Path
from typing import Any

import pytest
import torch

from loader.checkpoint import Checkpoint, open_checkpoint
from loader.needs import rank_needs
from loader.quantised.load import load_rank
from loader.quantised.packed import take_packed
from loader.quantised.settle import Quantize, settle
from loader.shares import RankPlace
from tests.support.runtime_settings import Settings
from tests.support.tiny_gguf import make_tiny_gguf
from tests.support.tiny_gguf_families import make_family_gguf
from tests.support.tiny_runner import Driver, load_tiny, make_runner, one_thread
from worker_service.kernels import native
from worker_service.models.native import computes
from worker_service.runtime.engine import Engine, TorchEngine
from worker_service.runtime.loading import LoadJob, LoadPhases, load_into
from worker_service.runtime.native import NativeEngine
from worker_service.runtime.restart_store import RestartStore
from worker_service.runtime.runner import ModelRunner
from worker_service.runtime.worker import WorkerRuntime

PROMPTS = ([5, 9, 200, 31], [7] * 11, [300, 4, 18, 77, 120, 66], list(range(1, 60)))
NUM_OUTPUTS = 16
# What blocks of 256 fit into.
WIDE = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 512}
# As llama.cpp mixes types: values and some of the others have more bits, and the output layer too.
MIXED = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q6_K"}
MODELS: dict[str, dict[str, Any]] = {
    "Q4_0": {"quantisation": "Q4_0"},
    "Q4_1": {"quantisation": "Q4_1", "types": {"token_embd": "Q8_0"}, "tie": True},
    "Q5_0": {"quantisation": "Q5_0", "types": {"attn_v": "Q8_0"}},
    "Q5_1": {"quantisation": "Q5_1", "types": {"attn_q": "Q4_0", "ffn_up": "F32"}},
    "Q8_0": {"quantisation": "Q8_0", "tie": True},
    "Q4_K_M": {"quantisation": "Q4_K", "types": MIXED, "sizes": WIDE, "tie": True},
    "Q5_K_M": {"quantisation": "Q5_K", "types": {**MIXED, "output.": "Q6_K", "token_embd": "Q5_K"}, "sizes": WIDE},
    "Q3_K_M": {"quantisation": "Q3_K", "types": {"attn_v": "Q4_K", "attn_k": "Q5_0"}, "sizes": WIDE},
    "Q2_K": {"quantisation": "Q2_K", "types": {"attn_output": "Q3_K"}, "sizes": WIDE},
}

needs_kernels = pytest.mark.skipif(native.load() is None, reason="the kernels cannot be compiled here")


def make(folder: Path, name: str) -> Path:
    return make_tiny_gguf(folder / "model.gguf", **MODELS[name])


def opened(path: Path, quantize: Quantize = "auto") -> Checkpoint:
    return settle(open_checkpoint(path), quantize)[0]


def native_engine(
    checkpoint: Checkpoint, pool: native.Pool, dtype: torch.dtype = torch.float32, store: RestartStore | None = None
) -> tuple[NativeEngine, list[str]]:
    """The engine with its weights, and the phases of the load."""
    job = LoadJob(checkpoint, RankPlace(), dtype, torch.device("cpu"))
    assert computes(checkpoint.config, job.place, dtype)
    engine, phases = NativeEngine(checkpoint.config, dtype, pool), LoadPhases(lambda *_: None, lambda: False)
    load_into(engine, job, store, phases)
    return engine, [phase.name for phase in phases.finish()]


def by_kernels(engine: NativeEngine, chunk: int = 1000) -> list[list[int]]:
    executor = engine.executor(64, 16, 128)
    driver = Driver(ModelRunner(executor, max_model_len=128), executor)
    for number, prompt in enumerate(PROMPTS, 1):
        driver.add(number, prompt)
    driver.run(NUM_OUTPUTS, chunk)
    return [driven.output for driven in driver.sequences.values()]


def by_torch(path: Path, *, keep_blocks: bool) -> list[list[int]]:
    with one_thread():
        driver = Driver(*make_runner(load_tiny(path, keep_blocks=keep_blocks)))
        for number, prompt in enumerate(PROMPTS, 1):
            driver.add(number, prompt)
        driver.run(NUM_OUTPUTS)
    return [driven.output for driven in driver.sequences.values()]


@needs_kernels
@pytest.mark.parametrize("name", MODELS)
def test_generates_what_the_weights_made_whole_do(tmp_path: Path, pool: native.Pool, name: str) -> None:
    path = make(tmp_path, name)
    whole = by_torch(path, keep_blocks=False)
    assert by_torch(path, keep_blocks=True) == whole
    engine, _ = native_engine(opened(path), pool)
    assert by_kernels(engine) == whole
    assert by_kernels(engine, chunk=3) == whole
    assert len({token for output in whole for token in output}) > 3


@needs_kernels
@pytest.mark.parametrize("name", ["Q4_1", "Q4_K_M"])
def test_in_bfloat16_nothing_depends_on_the_batch(tmp_path: Path, pool: native.Pool, name: str) -> None:
    engine, _ = native_engine(opened(make(tmp_path, name)), pool, torch.bfloat16)
    executor = engine.executor(64, 16, 128)
    driver = Driver(ModelRunner(executor, max_model_len=128), executor)
    for number, prompt in enumerate(PROMPTS, 1):
        driver.add(number, prompt)
        while len(driver.sequences[number].output) < NUM_OUTPUTS:
            driver.step({number: 5})
    assert [driven.output for driven in driver.sequences.values()] == by_kernels(engine)


@needs_kernels
@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q4_K_M", "Q5_K_M", "Q2_K"])
def test_packed_weights_stay_packed(tmp_path: Path, pool: native.Pool, name: str) -> None:
    """In either engine, embedding and head too: what they hold is what headers tell."""
    checkpoint = opened(make(tmp_path, name))
    place, dtype = RankPlace(), torch.bfloat16
    needs = rank_needs(checkpoint, place, "bfloat16")
    engines: list[Engine] = [
        NativeEngine(checkpoint.config, dtype, pool),
        TorchEngine(checkpoint.config, place, dtype, torch.device("cpu")),
    ]
    held = []
    for engine in engines:
        tensors = load_rank(checkpoint, place, dtype=dtype, progress=lambda _: None, cancelled=lambda: False)
        held.append(sum(tensor.nbytes for tensor in engine.pack(tensors).values()))
    # Norms are in float32 there; and of products that are joined, all get groups as small as some have.
    assert held[0] == pytest.approx(needs.weight_bytes, rel=0.04 if "_M" in name else 0.03)
    assert held[1] <= held[0]
    assert needs.resident_bytes == needs.weight_bytes
    # Integers of 5 and 6 bits are bytes, and those of 2 have 4.
    most = {"Q2_K": 1.9, "Q5_0": 1.55, "Q5_K_M": 1.55, "Q4_K_M": 1.3}.get(name, 1.2)
    assert needs.weight_bytes < checkpoint.total_bytes * most


@pytest.mark.parametrize("name", ["Q4_1", "Q5_0", "Q4_K_M", "Q3_K_M"])
def test_ranks_hold_their_parts(tmp_path: Path, name: str) -> None:
    """Also where a share ends inside a block."""
    path = make(tmp_path, name)
    for rank in range(4):
        place = RankPlace(rank, 4)
        kept, whole = held_whole(opened(path), place), held_whole(opened(path, "none"), place)
        assert kept.keys() == whole.keys()
        for tensor, value in whole.items():
            assert torch.equal(kept[tensor], value), tensor


def held_whole(checkpoint: Checkpoint, place: RankPlace) -> dict[str, torch.Tensor]:
    """The weights of a rank, made whole if they are not."""
    tensors = load_rank(checkpoint, place, dtype=torch.float32, progress=lambda _: None, cancelled=lambda: False)
    names = [name.removesuffix(".form") for name in tensors if name.endswith(".form")]
    assert bool(names) == (checkpoint.config.quantisation is not None)
    for name in names:
        packed = take_packed(name, tensors)
        assert packed is not None
        tensors[f"{name}.weight"] = packed.dequantise()
    return tensors


@needs_kernels
def test_a_restart_maps_them_and_not_what_was_made_whole(tmp_path: Path, pool: native.Pool) -> None:
    path, store = make(tmp_path, "Q4_1"), RestartStore(tmp_path / "store", None, is_set=True)
    read, mapped = ["inspect", "map", "read", "pack", "store", "map", "attach"], ["inspect", "map", "attach"]
    wishes: tuple[Quantize, ...] = ("auto", "none")
    outputs = []
    for expected in (read, mapped):
        for quantize in wishes:
            engine, phases = native_engine(opened(path, quantize), pool, store=store)
            assert phases == expected
            outputs.append(by_kernels(engine))
    assert outputs == [outputs[0]] * 4


@pytest.mark.parametrize("family", ["gemma2", "phi3", "mixtral"])
def test_families(tmp_path: Path, family: str) -> None:
    """Fused tensors and experts among them."""
    path = make_family_gguf(tmp_path / "model.gguf", family, "Q8_0")
    assert by_torch(path, keep_blocks=True) == by_torch(path, keep_blocks=False)


def test_a_worker_keeps_them_unless_it_is_told_otherwise(tmp_path: Path) -> None:
    path = make(tmp_path, "Q4_1")
    runtime = WorkerRuntime(Settings(native_kernels=True))
    runtime.init_device(RankPlace())

    def load(quantize: str) -> tuple[int, bool]:
        summary = runtime.load_model(path, "bfloat16", lambda *_: None, lambda: False, quantize)
        return summary.weight_bytes, summary.already_loaded

    kept, _ = load("auto")
    assert load("auto") == (kept, True)
    whole, already = load("none")
    assert not already
    assert kept < 0.55 * whole
    rounded, already = load("int4")
    assert not already
    assert rounded < 0.55 * whole
    runtime.close()
