"""The decoder against transformers: whole, split over ranks, and with every option of its config."""

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from loader.checkpoint import open_checkpoint
from loader.config import ModelConfig
from loader.errors import CheckpointError
from loader.layout import weight_slices
from loader.shares import RankPlace
from loader.weights import load_weights
from tests.support.tiny_checkpoint import TINY_FAMILIES, make_tiny_llama
from worker_service.models.collectives import Collectives
from worker_service.models.decoder import Decoder
from worker_service.models.registry import build_model
from worker_service.runtime.attention import AttentionPlanner, PagedAttention
from worker_service.runtime.kv_cache import CacheShape, KvCache

CPU = torch.device("cpu")
TOKENS = torch.tensor([5, 300, 17, 17, 0, 319, 250, 3, 44])


class ThreadGroup:
    """A tensor-parallel group whose ranks are threads."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=20)
        self._tensors: list[torch.Tensor] = [torch.empty(0)] * size

    def rank(self, rank: int) -> Collectives:
        group = self

        class Rank:
            def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
                return torch.stack(group._exchange(rank, tensor)).sum(0)

            def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
                return torch.cat(group._exchange(rank, tensor), -1)

        return Rank()

    def _exchange(self, rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._tensors[rank] = tensor
        self._barrier.wait()
        tensors = list(self._tensors)
        self._barrier.wait()
        return tensors


def load_rank(path: Path, parallel: RankPlace, group: Collectives, dtype: torch.dtype = torch.float32) -> Decoder:
    checkpoint = open_checkpoint(path)
    model = build_model(checkpoint.config, parallel, group)
    wanted = weight_slices(model.config, model.rank_place)
    tensors = load_weights(checkpoint, wanted, dtype=dtype, progress=lambda _: None, cancelled=lambda: False)
    model.place_weights(tensors)
    assert not tensors
    model.prepare(64, dtype=dtype, device=CPU)
    return model


def forward(model: Decoder, x: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Hidden states of a stage for one sequence of TOKENS."""
    cache = KvCache(CacheShape(len(model.layers), model.num_kv_heads, model.config.head_dim, dtype), 8, 4, CPU)
    count, table = len(TOKENS), np.array([[6, 1, 4]])
    positions = np.arange(count)
    slots = table[0][positions // 4] * 4 + positions % 4
    planner = AttentionPlanner(cache, CPU, model.windows, model.scores)
    plan = planner.plan(slots, np.array([count]), np.array([0]), table)
    return model.forward(x, torch.from_numpy(positions), PagedAttention(cache, planner, plan))


def expected_logits(path: Path, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    with torch.no_grad():
        logits: torch.Tensor = model(TOKENS[None]).logits[0]
    return logits


def run_ranks(size: int, work: Callable[[int], torch.Tensor]) -> list[torch.Tensor]:
    results: dict[int, Any] = {}

    def run(rank: int) -> None:
        try:
            with torch.inference_mode():
                results[rank] = work(rank)
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results.values():
        if isinstance(result, BaseException):
            raise result
    return [results[rank] for rank in range(size)]


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CONFIGS: dict[str, dict[str, Any]] = {
    **{family: dict(overrides) for family, overrides in TINY_FAMILIES.items()},
    "tied": {"tie_word_embeddings": True},
    "biased": {"attention_bias": True, "mlp_bias": True},
    "llama3": {"rope_scaling": LLAMA3_ROPE},
    "mistral-window": {**TINY_FAMILIES["mistral"], "sliding_window": 4},
    "qwen2-tied": {**TINY_FAMILIES["qwen2"], "tie_word_embeddings": True},
    "qwen3-window": {
        **TINY_FAMILIES["qwen3"],
        "use_sliding_window": True,
        "sliding_window": 3,
        "max_window_layers": 2,
    },
    "qwen3-biased": {**TINY_FAMILIES["qwen3"], "attention_bias": True},
}


@pytest.fixture(scope="module", params=CONFIGS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    overrides = CONFIGS[request.param]
    tie = bool(overrides.get("tie_word_embeddings"))
    return make_tiny_llama(tmp_path_factory.mktemp("model"), num_layers=3, tie=tie, config_overrides=overrides)


def test_logits_equal_transformers(path: Path) -> None:
    model = load_rank(path, RankPlace(), None)
    with torch.inference_mode():
        logits = model.logits(forward(model, TOKENS))
    torch.testing.assert_close(logits, expected_logits(path), rtol=1e-4, atol=1e-4)


def test_bfloat16_errs_as_little_as_transformers(path: Path) -> None:
    model = load_rank(path, RankPlace(), None, torch.bfloat16)
    with torch.inference_mode():
        logits = model.logits(forward(model, TOKENS, torch.bfloat16)).float()
    exact, theirs = expected_logits(path), expected_logits(path, torch.bfloat16).float()
    assert (logits - exact).norm() <= 1.1 * (theirs - exact).norm()


@pytest.mark.parametrize("size", [2, 4])
def test_tensor_parallel_ranks_give_the_same_logits(path: Path, size: int) -> None:
    """With 4 ranks and 2 key-value heads, each head is held by two ranks."""
    group = ThreadGroup(size)

    models = [
        load_rank(path, RankPlace(tensor_rank=rank, tensor_parallel_size=size), group.rank(rank))
        for rank in range(size)
    ]

    def work(rank: int) -> torch.Tensor:
        return models[rank].logits(forward(models[rank], TOKENS))

    expected = expected_logits(path)
    for logits in run_ranks(size, work):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_a_vocabulary_that_does_not_divide_is_padded(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path, vocab_size=321, heads=6, kv_heads=6, hidden_size=96, intermediate_size=126)
    group = ThreadGroup(2)

    models = [
        load_rank(tmp_path, RankPlace(tensor_rank=rank, tensor_parallel_size=2), group.rank(rank)) for rank in range(2)
    ]

    def work(rank: int) -> torch.Tensor:
        return models[rank].logits(forward(models[rank], TOKENS))

    expected = expected_logits(tmp_path)
    for logits in run_ranks(2, work):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_pipeline_stages_give_the_same_logits(path: Path) -> None:
    stages = [load_rank(path, RankPlace(pipeline_rank=rank, pipeline_parallel_size=2), None) for rank in range(2)]
    assert [len(stage.layers) for stage in stages] == [2, 1]
    with torch.inference_mode():
        hidden = TOKENS
        for stage in stages:
            hidden = forward(stage, hidden)
        logits = stages[-1].logits(hidden)
    torch.testing.assert_close(logits, expected_logits(path), rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return open_checkpoint(make_tiny_llama(tmp_path_factory.mktemp("config"))).config


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"hidden_act": "relu"}, "relu"),
        ({"num_kv_heads": 3}, "evenly"),
        ({"family": "mamba", "architecture": "MambaForCausalLM"}, "MambaForCausalLM"),
    ],
)
def test_what_is_not_computed_is_refused(config: ModelConfig, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        build_model(replace(config, **changes), RankPlace(), None)


@pytest.mark.parametrize(
    ("size", "changes", "text"),
    [
        (3, {}, "number of heads, 4"),
        (8, {"num_heads": 8, "intermediate_size": 100}, "intermediate_size, 100"),
        (4, {"num_heads": 12, "num_kv_heads": 3}, "3"),
    ],
)
def test_a_model_that_cannot_be_split_is_refused(
    config: ModelConfig, size: int, changes: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        build_model(replace(config, **changes), RankPlace(0, size), None)


@pytest.mark.parametrize("place", [(2, 2, 0, 1), (-1, 1, 0, 1), (0, 0, 0, 1), (0, 1, 1, 1)])
def test_a_rank_outside_its_group_is_refused(place: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="does not lie in a group"):
        RankPlace(*place)


def test_calls_out_of_order_are_refused(config: ModelConfig) -> None:
    model = build_model(config, RankPlace(), None)
    with pytest.raises(RuntimeError, match="prepare"):
        forward(model, TOKENS)
