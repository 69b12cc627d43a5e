"""What the ranks hold, against what there is."""

import dataclasses
from typing import Any

import pytest

from loader.checkpoint import open_checkpoint
from loader.config import ExpertsConfig, ModelConfig
from loader.layout import expected_tensors, tensor_parallel_problem, tensor_parallel_sizes, weight_slices
from loader.shares import RankPlace, Share, even_share, grouped_share, stage_layers, vocabulary_share
from tests.support.tiny_checkpoint import make_tiny_llama


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = make_tiny_llama(
        tmp_path_factory.mktemp("plan") / "m", num_layers=3, hidden_size=64, heads=8, kv_heads=2, vocab_size=323
    )
    return open_checkpoint(folder).config


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"qkv_bias": True},
        {"output_bias": True, "mlp_bias": True, "qk_norm": True},
        {"norms": "around"},
        {"norms": "after", "qk_norm": True, "qk_norm_whole": True},
        {"experts": ExpertsConfig(8, 2, 24, normalised=True, layers=(0, 2))},
        {"experts": ExpertsConfig(16, 2, 25, normalised=True, layers=(0, 1, 2)), "intermediate_size": 127},
    ],
)
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("pp", [1, 2, 3])
def test_the_ranks_hold_every_element_and_each_adds_a_bias_once(
    config: ModelConfig, tp: int, pp: int, changes: dict[str, Any], tied: bool
) -> None:
    config = dataclasses.replace(config, tie_word_embeddings=tied, **changes)
    held: dict[str, list[set[int]]] = {}
    for stage in range(pp):
        for rank in range(tp):
            for want in weight_slices(config, RankPlace(rank, tp, stage, pp)):
                assert want.shape == expected_tensors(config)[want.name]
                part = range(want.shape[0]) if want.dim is None else range(want.start, want.stop)
                held.setdefault(want.name, []).append(set(part))
    assert held.keys() == expected_tensors(config).keys()
    for name, parts in held.items():
        whole = expected_tensors(config)[name]
        assert set.union(*parts) in (set(range(whole[0])), set(range(whole[-1])))
        shared = ("norm.weight", ".k_proj.weight", ".k_proj.bias", ".v_proj.weight", ".v_proj.bias", ".mlp.gate.weight")
        replicated = name.endswith(shared)
        stages = 2 if name == "model.embed_tokens.weight" and tied and pp > 1 else 1
        if not replicated:
            assert sum(map(len, parts)) == stages * len(set.union(*parts)), name


def test_shares_cover_everything_once() -> None:
    assert [vocabulary_share(10, rank, 4) for rank in range(4)] == [
        Share(10, 0, 3),
        Share(10, 3, 6),
        Share(10, 6, 9),
        Share(10, 9, 10),
    ]
    assert [list(stage_layers(7, stage, 3)) for stage in range(3)] == [[0, 1, 2], [3, 4], [5, 6]]
    for stages in range(1, 8):
        assert [layer for stage in range(stages) for layer in stage_layers(7, stage, stages)] == list(range(7))
    assert [grouped_share(2, rank, 4).start for rank in range(4)] == [0, 0, 1, 1]
    assert even_share(12, 1, 3, what="it").scaled(2) == Share(24, 8, 16)


@pytest.mark.parametrize(
    ("changes", "size", "words"),
    [
        ({}, 3, "the number of heads, 8"),
        ({"num_heads": 12, "num_kv_heads": 6, "intermediate_size": 48}, 4, "key-value heads, 6"),
        ({"num_heads": 12, "num_kv_heads": 4, "intermediate_size": 48}, 6, "nor be replicated"),
        ({"intermediate_size": 126}, 4, "intermediate_size, 126"),
        ({"vocab_size": 9}, 8, "without a token"),
        ({"experts": ExpertsConfig(6, 2, 24, normalised=True, layers=(0,))}, 4, "the number of experts, 6"),
    ],
)
def test_a_size_that_does_not_split_the_model_has_a_reason(
    config: ModelConfig, changes: dict[str, Any], size: int, words: str
) -> None:
    config = dataclasses.replace(config, **changes)
    problem = tensor_parallel_problem(config, size)
    assert problem is not None
    assert words in problem
    assert size not in tensor_parallel_sizes(config)
    assert 1 in tensor_parallel_sizes(config)


def test_all_sizes_that_split_the_model(config: ModelConfig) -> None:
    assert tensor_parallel_sizes(config) == (1, 2, 4, 8)
    grouped = dataclasses.replace(config, num_heads=12, num_kv_heads=3, intermediate_size=48)
    assert tensor_parallel_sizes(grouped) == (1, 3, 6, 12)
    with pytest.raises(ValueError, match="2 layers cannot fill 3 stages"):
        stage_layers(2, 0, 3)
    with pytest.raises(ValueError, match="tensor_rank 2"):
        RankPlace(2, 2)
