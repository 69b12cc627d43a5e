"""Every kind of rotary embedding against transformers."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from loader.config import RopeConfig
from loader.errors import CheckpointError
from worker_service.models.rope import RopeShape, RotaryEmbedding, apply_rope, rope_frequencies

KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 2.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    "yarn, all parameters": {
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 16,
        "beta_slow": 2,
        "mscale": 0.7,
        "mscale_all_dim": 0.4,
        "truncate": False,
    },
    "yarn, attention_factor": {"factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.3},
}


def shape(kind: str, parameters: dict[str, Any], served_length: int = 128) -> RopeShape:
    return RopeShape(RopeConfig(10000.0, None if kind == "default" else kind, parameters), 32, 128, served_length)


def reference(kind: str, parameters: dict[str, Any]) -> LlamaRotaryEmbedding:
    config = LlamaConfig(
        hidden_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        rope_parameters={"rope_type": kind, "rope_theta": 10000.0, **parameters},
    )
    return LlamaRotaryEmbedding(config)


@pytest.mark.parametrize("name", KINDS)
def test_rotation_equals_transformers(name: str) -> None:
    kind, parameters = name.partition(",")[0], KINDS[name]
    positions = torch.tensor([0, 1, 5, 63, 64, 127])
    heads = torch.randn(6, 3, 32, generator=torch.Generator().manual_seed(0))
    theirs = reference(kind, parameters)
    cos, sin = theirs(heads, positions[None])
    expected, _ = apply_rotary_pos_emb(heads.transpose(0, 1)[None], heads.transpose(0, 1)[None], cos, sin)
    ours = RotaryEmbedding(shape(kind, parameters), dtype=torch.float32, device=torch.device("cpu"))
    got = apply_rope(heads, *ours.select(positions))
    torch.testing.assert_close(got, expected[0].transpose(0, 1), rtol=1e-5, atol=2e-6)


def test_dynamic_stretches_to_the_served_length() -> None:
    theirs = reference("dynamic", {"factor": 2.0})
    theirs(torch.zeros(1), torch.tensor([[511]]))
    ours, _ = rope_frequencies(shape("dynamic", {"factor": 2.0}, served_length=512))
    torch.testing.assert_close(ours, theirs.inv_freq)
    shorter, _ = rope_frequencies(shape("dynamic", {"factor": 2.0}, served_length=64))
    torch.testing.assert_close(shorter, rope_frequencies(shape("default", {}))[0])


@pytest.mark.parametrize("factor", [None, 1.0, 4.0])
def test_longrope_takes_one_list_by_the_served_length(factor: float | None) -> None:
    lists = {"short_factor": [1.0 + i / 16 for i in range(16)], "long_factor": [2.0 + i / 4 for i in range(16)]}
    parameters = {**lists, "original_max_position_embeddings": 64, **({} if factor is None else {"factor": factor})}
    theirs = reference("longrope", parameters)
    short, scale = rope_frequencies(shape("longrope", parameters, served_length=64))
    torch.testing.assert_close(short, theirs.inv_freq)
    assert scale == pytest.approx(theirs.attention_scaling)
    theirs(torch.zeros(1), torch.tensor([[64]]))
    long, scale = rope_frequencies(shape("longrope", parameters, served_length=65))
    torch.testing.assert_close(long, theirs.inv_freq)
    assert scale == pytest.approx(theirs.attention_scaling)


def test_part_of_a_head_may_be_rotated() -> None:
    heads = torch.randn(6, 3, 48, generator=torch.Generator().manual_seed(0))
    rope = RotaryEmbedding(shape("default", {}), dtype=torch.float32, device=torch.device("cpu"))
    rotation = rope.select(torch.arange(6))
    got = apply_rope(heads, *rotation)
    assert torch.equal(got[..., :32], apply_rope(heads[..., :32], *rotation))
    assert torch.equal(got[..., 32:], heads[..., 32:])


@pytest.mark.parametrize("kind", ["mrope"])
def test_other_kinds_are_refused_by_name(kind: str) -> None:
    with pytest.raises(CheckpointError, match=kind) as refused:
        rope_frequencies(shape(kind, {"factor": 2.0}))
    assert refused.value.code == "unsupported"


@pytest.mark.parametrize(
    ("kind", "parameters", "name"),
    [
        ("linear", {}, "factor"),
        ("linear", {"factor": "2"}, "factor"),
        ("linear", {"factor": float("nan")}, "factor"),
        ("dynamic", {"factor": 0.5}, "factor"),
        ("llama3", {"factor": 8.0, "high_freq_factor": 4.0}, "low_freq_factor"),
        ("llama3", {"factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}, "high_freq_factor"),
        ("yarn", {"factor": 0.0}, "factor"),
        ("longrope", {}, "short_factor"),
        ("longrope", {"short_factor": [1.0] * 15}, "15 divisors for 16"),
        ("longrope", {"short_factor": [1.0] * 15 + ["x"]}, "short_factor"),
    ],
)
def test_senseless_parameters_are_refused(kind: str, parameters: dict[str, Any], name: str) -> None:
    with pytest.raises(CheckpointError, match=name):
        rope_frequencies(shape(kind, parameters))
