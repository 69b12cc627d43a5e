"""Every family on the runner, token for token against transformers."""

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny_checkpoint import TINY_FAMILIES, make_tiny_llama
from tests.support.tiny_runner import Driver, load_tiny, make_runner, reference_tokens

LENGTHS = (1, 3, 8, 17, 64, 101)
NUM_OUTPUTS = 64


def prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(320) for _ in range(length)] for length in LENGTHS]


WINDOWED = {"use_sliding_window": True, "sliding_window": 20}
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    **TINY_FAMILIES,
    "mistral-window": {**TINY_FAMILIES["mistral"], "sliding_window": 20},
    "qwen2-window": {**TINY_FAMILIES["qwen2"], **WINDOWED, "max_window_layers": 1},
    "qwen3-window": {**TINY_FAMILIES["qwen3"], **WINDOWED, "layer_types": ["sliding_attention", "full_attention"]},
}


@pytest.fixture(scope="module", params=CONFIGS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    return make_tiny_llama(folder, config_overrides=CONFIGS[request.param])


@pytest.fixture(scope="module")
def reference(path: Path) -> list[list[int]]:
    return reference_tokens(path, prompts(), NUM_OUTPUTS)


@pytest.fixture
def driver(path: Path) -> Driver:
    return Driver(*make_runner(load_tiny(path)))


def outputs(driver: Driver) -> list[list[int]]:
    return [driven.output for driven in driver.sequences.values()]


@pytest.mark.parametrize("chunk", [1000, 7])
def test_greedy_tokens_equal_transformers(driver: Driver, reference: list[list[int]], chunk: int) -> None:
    for i, prompt in enumerate(prompts()):
        driver.add(i, prompt)
    driver.run(NUM_OUTPUTS, chunk)
    assert outputs(driver) == reference


def test_chunks_preemption_and_late_comers_equal_transformers(driver: Driver, reference: list[list[int]]) -> None:
    rng = random.Random(5)
    todo = prompts()
    while any(len(s.output) < NUM_OUTPUTS for s in driver.sequences.values()) or todo:
        if todo:
            driver.add(len(LENGTHS) - len(todo), todo.pop(0))
        waiting = [s for s in driver.sequences.values() if len(s.output) < NUM_OUTPUTS]
        victim = rng.choice(waiting)
        if victim.known and rng.random() < 0.2:
            driver.preempt(victim.sequence_id)
        driver.step({s.sequence_id: rng.choice((1, 3, 11, 29)) for s in waiting})
    assert outputs(driver) == reference


def test_a_shared_prefix_is_not_computed_again(driver: Driver, reference: list[list[int]]) -> None:
    prompt = prompts()[4]
    first = driver.add(1, prompt)
    driver.step({1: 1000})
    sibling = driver.add(2, prompt)
    num_shared = (len(prompt) - 1) // driver.block_size
    sibling.blocks, sibling.computed = first.blocks[:num_shared], num_shared * driver.block_size
    driver.run(NUM_OUTPUTS)
    assert first.output == sibling.output == reference[4]
