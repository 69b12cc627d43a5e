"""What is read of models that are none of our families."""

import json
from pathlib import Path
from typing import Any

import pytest

from loader.checkpoint import open_checkpoint
from loader.config import ModelConfig
from loader.errors import CheckpointError
from loader.hf_config import read_hf_config
from loader.inspection import Wish, inspect_checkpoint
from loader.layout import weight_slices
from loader.shares import RankPlace
from tests.support.tiny_checkpoint import write_safetensors, write_tiny_tokenizer
from tests.support.tiny_others import SERVED, make_tiny_other

GPT2 = {"n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 256, "vocab_size": 320}
NEW = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 320}


def read(folder: Path, **content: Any) -> ModelConfig:
    named = {"architectures": ["SomeForCausalLM"], "model_type": "some", **content}
    (folder / "config.json").write_text(json.dumps(named))
    return read_hf_config(folder, "bfloat16")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (GPT2, (48, 3, 6, 6, 8, 256, 192)),
        ({**NEW, "num_key_value_heads": 2, "max_position_embeddings": 99}, (64, 2, 4, 2, 16, 99, 256)),
        ({**NEW, "multi_query": True, "intermediate_size": 7}, (64, 2, 4, 1, 16, 2048, 7)),
        (
            {**NEW, "multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 2},
            (64, 2, 4, 2, 16, 2048, 256),
        ),
        ({**NEW, "head_dim": 32, "rope_scaling": {"type": "spiral"}, "n_inner": None}, (64, 2, 4, 4, 32, 2048, 256)),
    ],
)
def test_sizes_by_any_of_their_names(tmp_path: Path, content: dict[str, Any], expected: tuple[int, ...]) -> None:
    config = read(tmp_path, **content)
    assert (config.family, config.architecture) == ("transformers", "SomeForCausalLM")
    assert (
        config.hidden_size,
        config.num_layers,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.max_position_count,
        config.intermediate_size,
    ) == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": None},
        {"hidden_size": None},
        {"architectures": ["SomeForMaskedLM"]},
        {"architectures": ["../../ForCausalLM"]},
        {"architectures": ["A" * 200 + "ForCausalLM"]},
        {"model_type": None},
        {"model_type": 5},
        {"quantization_config": {"quant_method": "fp8"}},
    ],
)
def test_what_cannot_be_run_is_unsupported(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError) as refused:
        read(tmp_path, **{**NEW, **changes})
    assert refused.value.code == "unsupported"


@pytest.mark.parametrize("changes", [{"num_attention_heads": 3}, {"vocab_size": 0}, {"num_hidden_layers": "2"}])
def test_sizes_that_make_no_sense_are_invalid(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError) as refused:
        read(tmp_path, **{**NEW, **changes})
    assert refused.value.code == "invalid"


def test_all_tensors_are_wanted_whole_by_one_rank(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_tiny_other(tmp_path, "gpt2", SERVED["gpt2"]))
    config = checkpoint.config
    assert {want.name: want.shape for want in weight_slices(config, RankPlace())} == {
        name: info.shape for name, info in checkpoint.tensors.items()
    }


def test_names_of_code_are_left_out(tmp_path: Path) -> None:
    config = read(tmp_path, **NEW, auto_map={"AutoConfig": "evil.Evil"}, _attn_implementation="evil", extra=1)
    assert config.other is not None
    assert config.other.content.keys() == {*NEW, "architectures", "model_type", "extra"}


def test_check_says_what_it_cannot_know(tmp_path: Path) -> None:
    read(tmp_path, **NEW)
    write_safetensors(tmp_path / "model.safetensors", {})
    write_tiny_tokenizer(tmp_path, 320)
    inspection = inspect_checkpoint(open_checkpoint(tmp_path), Wish(tensor_parallel_size=2, pipeline_parallel_size=2))
    assert {problem.code for problem in inspection.problems} == {"tensor_parallel", "pipeline_parallel"}
    assert any("transformers' definition" in warning for warning in inspection.warnings)
