"""The compiled kernels on the runner: every dense family token for token against transformers, and in bfloat16 the same
whatever else is in the batch."""

import random
from pathlib import Path

import pytest
import torch

from loader.checkpoint import open_checkpoint
from loader.layout import weight_slices
from loader.shares import RankPlace
from loader.weights import load_weights
from tests.support.served_runner import Oracle
from tests.support.tiny_checkpoint import TINY_FAMILIES, make_tiny_llama
from tests.support.tiny_runner import Driver, reference_tokens
from worker_service.kernels import native
from worker_service.models.native import computes
from worker_service.runtime import drafting
from worker_service.runtime.errors import RuntimeFailure
from worker_service.runtime.native import NativeEngine, NativeExecutor
from worker_service.runtime.runner import ModelRunner
from worker_service.runtime.step import Sampling

LENGTHS = (1, 3, 8, 17, 64, 101)
NUM_OUTPUTS = 64
WINDOWED = {"use_sliding_window": True, "sliding_window": 20}
CONFIGS = {
    **{name: config for name, config in TINY_FAMILIES.items() if "moe" not in name and name != "mixtral"},
    "mistral-window": {**TINY_FAMILIES["mistral"], "sliding_window": 20},
    "qwen3-window": {**TINY_FAMILIES["qwen3"], **WINDOWED, "layer_types": ["sliding_attention", "full_attention"]},
    "biases": {"attention_bias": True, "mlp_bias": True},
}

pytestmark = pytest.mark.skipif(native.load() is None, reason="the kernels cannot be compiled here")


def engine_of(path: Path, dtype: torch.dtype, pool: native.Pool, stored: torch.dtype | None = None) -> NativeEngine:
    checkpoint = open_checkpoint(path)
    config = checkpoint.config
    assert computes(config, RankPlace(), dtype, stored=stored)
    wanted = weight_slices(config, RankPlace())
    tensors = load_weights(checkpoint, wanted, dtype=dtype, progress=lambda _: None, cancelled=lambda: False)
    engine = NativeEngine(config, dtype, pool, stored=stored)
    assert engine.attach(engine.pack(tensors)) > 0
    assert not tensors
    return engine


def driver_of(engine: NativeEngine, seed: int = 0) -> Driver:
    executor = engine.executor(64, 16, 256)
    return Driver(ModelRunner(executor, max_model_len=256), executor, seed)


def prompts(seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(320) for _ in range(length)] for length in LENGTHS]


def outputs(driver: Driver) -> list[list[int]]:
    return [driven.output for driven in driver.sequences.values()]


def run_mixed(driver: Driver, sampling: Sampling, seed: int) -> dict[int, list[int]]:
    """Late comers, chunks of any size, preemptions."""
    rng, todo = random.Random(seed), list(enumerate(prompts()))
    rng.shuffle(todo)
    while todo or any(len(s.output) < NUM_OUTPUTS for s in driver.sequences.values()):
        if todo:
            driver.add(*todo.pop(), sampling)
        waiting = [s for s in driver.sequences.values() if len(s.output) < NUM_OUTPUTS]
        victim = rng.choice(waiting) if waiting else None
        if victim is not None and victim.known and rng.random() < 0.2:
            driver.preempt(victim.sequence_id)
        driver.step({s.sequence_id: rng.choice((1, 3, 11, 29)) for s in waiting})
    return {sequence_id: driven.output[:NUM_OUTPUTS] for sequence_id, driven in driver.sequences.items()}


@pytest.mark.parametrize("family", CONFIGS)
def test_every_dense_family_equals_transformers(family: str, tmp_path: Path, pool: native.Pool) -> None:
    path = make_tiny_llama(tmp_path / "m", config_overrides=CONFIGS[family])
    reference = reference_tokens(path, prompts(), NUM_OUTPUTS)
    engine = engine_of(path, torch.float32, pool)
    driver = driver_of(engine)
    for number, prompt in enumerate(prompts()):
        driver.add(number, prompt)
    driver.run(NUM_OUTPUTS)
    assert outputs(driver) == reference
    assert run_mixed(driver_of(engine, 1), Sampling(), 5) == dict(enumerate(reference))


def test_a_prefix_that_the_same_step_fills_is_read(tmp_path: Path, pool: native.Pool) -> None:
    path = make_tiny_llama(tmp_path / "m")
    prompt = prompts()[4]
    (reference,) = reference_tokens(path, [prompt], NUM_OUTPUTS)
    driver = driver_of(engine_of(path, torch.float32, pool))
    first, sibling = driver.add(1, prompt), driver.add(2, prompt)
    num_shared = (len(prompt) - 1) // 16
    first.blocks = [driver.free.pop() for _ in range(-(-len(prompt) // 16))]
    sibling.blocks, sibling.computed = first.blocks[:num_shared], num_shared * 16
    driver.run(NUM_OUTPUTS)
    assert first.output == sibling.output == reference


@pytest.mark.parametrize(
    ("sampling", "stored"),
    [
        (Sampling(), None),
        (Sampling(temperature=1.0, top_p=0.95, seed=3), None),
        (Sampling(temperature=1.0, top_p=0.95, seed=3), torch.int8),
    ],
)
def test_in_bfloat16_an_answer_does_not_depend_on_its_batch(
    tmp_path: Path, pool: native.Pool, sampling: Sampling, stored: torch.dtype | None
) -> None:
    engine = engine_of(make_tiny_llama(tmp_path / "m"), torch.bfloat16, pool, stored)
    alone = {}
    for number, prompt in enumerate(prompts()):
        driver = driver_of(engine)
        driver.add(number, prompt, sampling)
        driver.run(NUM_OUTPUTS)
        alone[number] = driver.sequences[number].output
    for seed in range(3):
        assert run_mixed(driver_of(engine, seed), sampling, seed) == alone


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, frequency_penalty=0.4, seed=3)])
def test_in_bfloat16_speculation_gives_the_same_tokens(
    tmp_path: Path, pool: native.Pool, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(make_tiny_llama(tmp_path / "m"), torch.bfloat16, pool)
    driver = driver_of(engine)
    for number, prompt in enumerate(prompts()):
        driver.add(number, prompt, sampling)
    num_steps = driver.run(NUM_OUTPUTS)
    expected = outputs(driver)
    transcripts = [driven.token_ids for driven in driver.sequences.values()]
    monkeypatch.setattr(drafting, "look_up", Oracle(transcripts, 320, wrong=0.1))
    monkeypatch.setattr(NativeExecutor, "num_cheap_tokens", 64)
    for seed in range(2):
        speculating = driver_of(engine, seed)
        for number, prompt in enumerate(prompts()):
            speculating.add(number, prompt, sampling, num_outputs=NUM_OUTPUTS)
        assert speculating.run(NUM_OUTPUTS, num_drafts=5) < num_steps / 2
        assert outputs(speculating) == expected


def test_a_block_size_that_is_not_served_is_refused(tmp_path: Path, pool: native.Pool) -> None:
    engine = engine_of(make_tiny_llama(tmp_path / "m"), torch.float32, pool)
    with pytest.raises(RuntimeFailure, match="multiple of 16"):
        engine.executor(8, 24, 64)
    with pytest.raises(RuntimeFailure, match="num_kv_blocks"):
        engine.executor(2**38, 16, 64)
