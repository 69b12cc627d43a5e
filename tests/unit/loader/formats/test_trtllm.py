import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from loader.byte_runs import rank_byte_runs
from loader.checkpoint import Checkpoint, open_checkpoint
from loader.errors import CheckpointError
from loader.layout import weight_slices
from loader.shares import RankPlace
from loader.weights import load_weights
from tests.support.slow_reader import read_slowly
from tests.support.tiny_checkpoint import TINY_FAMILIES, make_tiny_llama
from tests.support.tiny_trtllm import make_tiny_trtllm

SPLITS = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 3)]


@pytest.fixture
def plain(tmp_path: Path) -> Callable[..., tuple[Checkpoint, dict[str, Any]]]:
    """The Hugging Face form of a tiny model, and its config."""

    def make(**options: Any) -> tuple[Checkpoint, dict[str, Any]]:
        folder = make_tiny_llama(tmp_path / "hf", **options)
        return open_checkpoint(folder), json.loads((folder / "config.json").read_text())

    return make


def assert_same_tensors(first: Checkpoint, second: Checkpoint) -> None:
    for want in weight_slices(first.config, RankPlace()):
        expected, found = read_slowly(first.tensors[want.name]), read_slowly(second.tensors[want.name])
        assert np.array_equal(found, expected), want.name


@pytest.mark.parametrize(("tp", "pp"), SPLITS)
def test_the_ranks_make_up_the_model(
    tmp_path: Path, plain: Callable[..., tuple[Checkpoint, dict[str, Any]]], tp: int, pp: int
) -> None:
    expected, config = plain(num_layers=3, vocab_size=321)
    found = open_checkpoint(make_tiny_trtllm(tmp_path / "trt", config, tp=tp, pp=pp))
    assert found.format == "tensorrt-llm"
    assert found.config.num_kv_heads == expected.config.num_kv_heads
    assert_same_tensors(expected, found)


@pytest.mark.parametrize("family", [name for name in TINY_FAMILIES if name in ("llama", "mistral", "qwen2", "qwen3")])
def test_families(tmp_path: Path, plain: Callable[..., tuple[Checkpoint, dict[str, Any]]], family: str) -> None:
    expected, config = plain(config_overrides=TINY_FAMILIES[family])
    assert_same_tensors(expected, open_checkpoint(make_tiny_trtllm(tmp_path / "trt", config, tp=2)))


def test_biases(tmp_path: Path, plain: Callable[..., tuple[Checkpoint, dict[str, Any]]]) -> None:
    expected, config = plain(config_overrides={"attention_bias": True, "mlp_bias": True})
    assert_same_tensors(expected, open_checkpoint(make_tiny_trtllm(tmp_path / "trt", config, tp=2)))


@pytest.mark.parametrize("dim", [0, 1])
def test_a_divided_embedding(tmp_path: Path, plain: Callable[..., Any], dim: int) -> None:
    expected, config = plain(vocab_size=321)
    found = open_checkpoint(make_tiny_trtllm(tmp_path / "trt", config, tp=4, embedding_dim=dim))
    assert_same_tensors(expected, found)


def test_a_shared_embedding(tmp_path: Path, plain: Callable[..., Any]) -> None:
    expected, config = plain(tie=True)
    found = open_checkpoint(make_tiny_trtllm(tmp_path / "trt", config, tp=2, shares_head=True))
    assert found.config.tie_word_embeddings
    assert_same_tensors(expected, found)


def test_the_config(tmp_path: Path, plain: Callable[..., Any]) -> None:
    expected, config = plain()
    scaling = {"type": "linear", "factor": 2.0}
    folder = make_tiny_trtllm(tmp_path / "trt", config, overrides={"rotary_scaling": scaling})
    found = open_checkpoint(folder).config
    assert (found.rope.scaling_type, found.rope.parameters) == ("linear", {"factor": 2.0})
    for name in ("architecture", "head_dim", "intermediate_size", "max_position_count", "rms_norm_eps", "dtype"):
        assert getattr(found, name) == getattr(expected.config, name), name


def test_any_split_of_ours_finds_its_bytes(tmp_path: Path, plain: Callable[..., Any]) -> None:
    """The ranges of four ranks together are as many bytes as those of the plain form, but for copies of heads."""
    expected, config = plain(kv_heads=4)
    found = open_checkpoint(make_tiny_trtllm(tmp_path / "trt", config, tp=2))
    for rank in range(4):
        wanted = weight_slices(expected.config, RankPlace(rank, 4))
        sizes = [sum(run.num_bytes for run in rank_byte_runs(c.path, c.tensors, wanted)) for c in (expected, found)]
        assert sizes[0] == sizes[1]


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (4, 1), (2, 2)])
def test_any_split_of_ours_loads_the_same(tmp_path: Path, plain: Callable[..., Any], tp: int, pp: int) -> None:
    expected, config = plain()
    found = open_checkpoint(make_tiny_trtllm(tmp_path / "trt", config, tp=4))
    for place in (RankPlace(rank, tp, stage, pp) for stage in range(pp) for rank in range(tp)):
        wanted = weight_slices(expected.config, place)
        first, second = (
            load_weights(c, wanted, dtype=torch.float32, progress=lambda n: None, cancelled=lambda: False)
            for c in (expected, found)
        )
        assert all(torch.equal(first[name], second[name]) for name in first)


# --- what is refused


def refused(path: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    return caught.value


@pytest.mark.parametrize(
    ("overrides", "code", "text"),
    [
        ({"quantization": {"quant_algo": "W4A16_AWQ"}}, "unsupported", "W4A16_AWQ"),
        ({"quantization": {"quant_algo": None, "kv_cache_quant_algo": "INT8"}}, "unsupported", "INT8"),
        ({"moe": {"num_experts": 8}}, "unsupported", "num_experts 8"),
        ({"position_embedding_type": "alibi"}, "unsupported", "alibi"),
        ({"residual_mlp": True}, "unsupported", "residual_mlp"),
        ({"architecture": "GPTForCausalLM"}, "unsupported", "GPTForCausalLM"),
        ({"mapping": {"tp_size": 2, "pp_size": 1, "world_size": 4}}, "invalid", "world_size"),
        ({"mapping": {"tp_size": 2, "cp_size": 2}}, "invalid", "cp_size"),
        ({"mapping": {"tp_size": 0}}, "invalid", "tp_size"),
        ({"mapping": {"tp_size": 4}}, "not_found", "rank2.safetensors"),
        ({"num_attention_heads": 3, "num_key_value_heads": 3}, "invalid", "cannot be divided by 2"),
        ({"num_hidden_layers": 3}, "invalid", "model.layers.2"),
        ({"intermediate_size": 256}, "invalid", r"expected \[256, 64\]"),
        ({"vocab_size": 400}, "invalid", r"expected \[200, 64\]"),
    ],
)
def test_a_config_that_is_not_for_us(
    tmp_path: Path, plain: Callable[..., Any], overrides: dict[str, Any], code: str, text: str
) -> None:
    folder = make_tiny_trtllm(tmp_path / "trt", plain()[1], tp=2, overrides=overrides)
    error = refused(folder)
    assert error.code == code
    with pytest.raises(CheckpointError, match=text):
        raise error


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda t: t.pop("transformer.layers.1.attention.dense.weight"), "o_proj"),
        (lambda t: t.pop("transformer.layers.1.attention.qkv.weight"), "q_proj"),
        (lambda t: t.update({"transformer.layers.0.mlp.fused_fc.weight": np.ones((2, 2), np.float32)}), "fused_fc"),
        (lambda t: t.update({"transformer.layers.0.attention.qkv.weight": np.ones((2, 64), np.float32)}), "expected"),
        (lambda t: t.update({"transformer.ln_f.weight": np.ones((), np.float32)}), "ln_f"),
        (lambda t: t.update({"transformer.layers.0.mlp.fc.weight": np.ones((64, 64), np.float16)}), "does not go with"),
    ],
)
def test_a_rank_that_does_not_fit(
    tmp_path: Path, plain: Callable[..., Any], change: Callable[[dict[str, Any]], object], text: str
) -> None:
    folder = make_tiny_trtllm(tmp_path / "trt", plain()[1], tp=2)
    tensors = load_file(folder / "rank1.safetensors")
    change(tensors)
    save_file(tensors, folder / "rank1.safetensors")
    with pytest.raises(CheckpointError, match=text):
        open_checkpoint(folder)
