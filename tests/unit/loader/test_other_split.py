"""Which part of each stored tensor of another model a rank holds."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loader.checkpoint import open_checkpoint
from loader.config import ModelConfig, OtherModel
from loader.layout import (
    num_held_kv_heads,
    pipeline_parallel_problem,
    tensor_parallel_problem,
    tensor_parallel_sizes,
    weight_slices,
)
from loader.needs import rank_needs
from loader.shares import RankPlace
from tests.support.tiny_others import SERVED, make_tiny_other


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelConfig]:
    folder = tmp_path_factory.mktemp("others")
    names = ("granite", "olmoe", "gpt_neox", "phi", "gpt2")
    return {name: open_checkpoint(make_tiny_other(folder / name, name, SERVED[name])).config for name in names}


def parts(config: ModelConfig, place: RankPlace) -> dict[str, tuple[int, ...]]:
    return {want.name: want.part_shape for want in weight_slices(config, place)}


def test_layers_are_cut_by_the_plan_and_the_vocabulary_by_token_ids(configs: dict[str, ModelConfig]) -> None:
    held = parts(configs["granite"], RankPlace(1, 2))
    layer = "model.layers.1"
    assert held[f"{layer}.self_attn.q_proj.weight"] == (16, 32)
    assert held[f"{layer}.self_attn.k_proj.weight"] == (8, 32)
    assert held[f"{layer}.self_attn.o_proj.weight"] == (32, 16)
    assert held[f"{layer}.mlp.down_proj.weight"] == (32, 24)
    assert held[f"{layer}.input_layernorm.weight"] == (32,)
    assert held["model.embed_tokens.weight"] == (160, 32)
    assert parts(configs["phi"], RankPlace(1, 2))["lm_head.bias"] == (160,)


def test_more_ranks_than_key_value_heads_share_them(configs: dict[str, ModelConfig]) -> None:
    wanted = {want.name: (want.start, want.stop) for want in weight_slices(configs["granite"], RankPlace(3, 4))}
    assert wanted["model.layers.0.self_attn.k_proj.weight"] == (8, 16)
    assert wanted["model.layers.0.self_attn.q_proj.weight"] == (24, 32)
    assert [num_held_kv_heads(configs["granite"], RankPlace(0, size)) for size in (1, 2, 4)] == [2, 1, 1]
    # Of these the products are gathered, and every rank attends with all heads.
    assert num_held_kv_heads(configs["olmoe"], RankPlace(0, 2)) == 2


def test_experts_that_are_stored_apart_are_cut_each(configs: dict[str, ModelConfig]) -> None:
    held = parts(configs["olmoe"], RankPlace(0, 2))
    assert held["model.layers.0.mlp.experts.3.up_proj.weight"] == (24, 32)
    assert held["model.layers.0.mlp.experts.3.down_proj.weight"] == (32, 24)
    assert held["model.layers.0.mlp.gate.weight"] == (4, 32)


def test_stages_divide_the_layers_and_hold_an_end_each(configs: dict[str, ModelConfig]) -> None:
    first, last = (parts(configs["gpt_neox"], RankPlace(0, 1, stage, 2)) for stage in range(2))
    assert "gpt_neox.embed_in.weight" in first.keys() - last.keys()
    assert {name for name in last if "embed_out" in name or "lm_head" in name} == last.keys() - {
        name for name in (*first, *last) if "layers" in name
    } - first.keys()
    assert {name.split(".")[2] for name in last if ".layers." in name} == {"1"}
    # A head that is the embedding needs it on the last stage too.
    tied = [parts(configs["gpt2"], RankPlace(0, 1, stage, 2)) for stage in range(2)]
    assert all("transformer.wte.weight" in held for held in tied)


def test_what_cannot_be_split_says_why(configs: dict[str, ModelConfig]) -> None:
    assert tensor_parallel_sizes(configs["granite"]) == (1, 2, 4)
    problem = tensor_parallel_problem(configs["gpt2"], 2)
    assert problem is not None
    assert "GPT2LMHeadModel runs through transformers' own definition, and there is no plan" in problem
    assert tensor_parallel_sizes(configs["gpt2"]) == (1,)
    assert pipeline_parallel_problem(configs["gpt2"], 3) == "the model has 2 layers"
    assert "heads, 4" in str(tensor_parallel_problem(configs["granite"], 3))
    with pytest.raises(ValueError, match="no plan"):
        weight_slices(configs["gpt2"], RankPlace(0, 2))


@pytest.mark.parametrize("names", [["model.layers.0.w"], ["a.0.w", "a.1.w", "b.0.w", "b.1.w"], ["w"]])
def test_layers_must_be_one_list_of_the_right_length(configs: dict[str, ModelConfig], names: list[str]) -> None:
    content: dict[str, Any] = {"model_type": "granite"}
    config = replace(configs["granite"], other=OtherModel(content, dict.fromkeys(names, (4,))))
    for problem in (tensor_parallel_problem(config, 2), pipeline_parallel_problem(config, 2)):
        assert "not those of one list of 2 layers" in str(problem)


def test_a_rank_needs_less_than_the_whole(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_tiny_other(tmp_path, "granite", SERVED["granite"]))
    alone = rank_needs(checkpoint, RankPlace(), "float32")
    both = [rank_needs(checkpoint, RankPlace(rank, 2), "float32") for rank in range(2)]
    vectors = sum(4 * shape[0] for shape in checkpoint.config.other.tensors.values() if len(shape) == 1)  # type: ignore[union-attr]
    assert sum(needs.weight_bytes for needs in both) == alone.weight_bytes + vectors
    assert [needs.kv_bytes_per_token for needs in both] == [alone.kv_bytes_per_token // 2] * 2
