from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from loader.checkpoint import open_checkpoint
from loader.completeness import check_tensors
from loader.errors import CheckpointError
from loader.hf_config import read_hf_config
from loader.layout import expected_tensors
from loader.tensors import TensorInfo
from tests.support.tiny_checkpoint import TINY_FAMILIES, make_tiny_llama


@pytest.mark.parametrize(
    "overrides",
    [
        # What the others have in memory is not what they store: see models/test_families.py.
        *(TINY_FAMILIES[name] for name in sorted(TINY_FAMILIES.keys() - {"phi3", "mixtral", "qwen3_moe"})),
        {"attention_bias": True, "mlp_bias": True},
        {"head_dim": 32},
        {"tie_word_embeddings": True},
        {**TINY_FAMILIES["qwen3"], "attention_bias": True},
        # Neither family's definition looks at these.
        {**TINY_FAMILIES["mistral"], "attention_bias": True, "mlp_bias": True},
        {**TINY_FAMILIES["qwen2"], "attention_bias": False, "mlp_bias": True},
    ],
)
def test_expects_what_transformers_builds(tmp_path: Path, overrides: dict[str, object]) -> None:
    make_tiny_llama(tmp_path, config_overrides=overrides)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if overrides.get("tie_word_embeddings"):
        del expected["lm_head.weight"]
    assert expected_tensors(read_hf_config(tmp_path, "float32")) == expected


def test_ignores_what_old_exporters_added(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_tiny_llama(tmp_path))
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    extra = {**checkpoint.tensors, name: TensorInfo(name, "F32", (8,), tmp_path, 0, 32, name)}
    check_tensors(tmp_path, checkpoint.config, extra)


def test_refuses_a_tensor_without_a_place(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_tiny_llama(tmp_path))
    name = "model.layers.0.self_attn.q_proj.bias"
    extra = {**checkpoint.tensors, name: TensorInfo(name, "F32", (64,), tmp_path, 0, 256, name)}
    with pytest.raises(CheckpointError) as caught:
        check_tensors(tmp_path, checkpoint.config, extra)
    assert caught.value.tensor == name


def test_a_tied_model_may_carry_its_head(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_tiny_llama(tmp_path, tie=False))
    check_tensors(tmp_path, replace(checkpoint.config, tie_word_embeddings=True), checkpoint.tensors)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen2", "model.layers.1.self_attn.k_proj.bias"),
        ("qwen3", "model.layers.0.self_attn.q_norm.weight"),
        ("qwen3", "model.layers.1.self_attn.k_norm.weight"),
    ],
)
def test_refuses_a_family_without_its_own_tensors(tmp_path: Path, family: str, name: str) -> None:
    checkpoint = open_checkpoint(make_tiny_llama(tmp_path, config_overrides=TINY_FAMILIES[family]))
    tensors = {key: info for key, info in checkpoint.tensors.items() if key != name}
    with pytest.raises(CheckpointError) as caught:
        check_tensors(tmp_path, checkpoint.config, tensors)
    assert (caught.value.tensor, caught.value.found) == (name, "nothing")
    wrong = replace(checkpoint.tensors[name], shape=(7,))
    with pytest.raises(CheckpointError, match=r"has the shape \[7\]"):
        check_tensors(tmp_path, checkpoint.config, {**tensors, name: wrong})


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen2", "model.layers.0.self_attn.o_proj.bias"),
        ("qwen2", "model.layers.0.self_attn.q_norm.weight"),
        ("qwen3", "model.layers.0.self_attn.q_proj.bias"),
        ("mistral", "model.layers.0.self_attn.q_proj.bias"),
        ("llama", "model.layers.0.self_attn.k_norm.weight"),
    ],
)
def test_refuses_what_belongs_to_another_family(tmp_path: Path, family: str, name: str) -> None:
    checkpoint = open_checkpoint(make_tiny_llama(tmp_path, config_overrides=TINY_FAMILIES[family]))
    extra = {**checkpoint.tensors, name: TensorInfo(name, "F32", (64,), tmp_path, 0, 256, name)}
    with pytest.raises(CheckpointError) as caught:
        check_tensors(tmp_path, checkpoint.config, extra)
    assert caught.value.tensor == name
