from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from loader.checkpoint import open_checkpoint
from loader.errors import CheckpointError
from loader.hf_config import read_hf_config
from loader.llama import check_tensors, expected_tensors
from loader.tensors import TensorInfo
from tests.support.tiny_checkpoint import make_tiny_llama


@pytest.mark.parametrize(
    "overrides",
    [{}, {"attention_bias": True, "mlp_bias": True}, {"head_dim": 32}, {"tie_word_embeddings": True}],
)
def test_expects_what_transformers_builds(tmp_path: Path, overrides: dict[str, object]) -> None:
    make_tiny_llama(tmp_path, config_overrides=overrides)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if overrides.get("tie_word_embeddings"):
        del expected["lm_head.weight"]
    assert dict(expected_tensors(read_hf_config(tmp_path, "float32"))) == expected


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
