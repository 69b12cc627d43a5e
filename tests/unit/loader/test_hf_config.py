import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from loader.config import ModelConfig, RopeConfig
from loader.errors import CheckpointError
from loader.families import FAMILIES
from loader.hf_config import read_hf_config
from tests.support.tiny_checkpoint import TINY_FAMILIES

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
FULL, SLIDING = "full_attention", "sliding_attention"
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def read(folder: Path, stored: str = "bfloat16", **changes: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps({**BASE, **changes}))
    return read_hf_config(folder, stored)


def refused(folder: Path, **changes: Any) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        read(folder, **changes)
    assert caught.value.file is not None
    return caught.value


def test_defaults_of_the_family(tmp_path: Path) -> None:
    config = read(tmp_path, num_key_value_heads=None, max_position_embeddings=None, rms_norm_eps=None)
    assert config == ModelConfig(
        architecture="LlamaForCausalLM",
        family="llama",
        vocab_size=320,
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=4,
        head_dim=16,
        intermediate_size=128,
        max_position_count=2048,
        rms_norm_eps=1e-6,
        rope=RopeConfig(10000.0, None, {}),
        tie_word_embeddings=False,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        hidden_act="silu",
        dtype="bfloat16",
        bos_token_id=None,
        eos_token_ids=(),
    )


def test_head_dim_of_its_own(tmp_path: Path) -> None:
    assert read(tmp_path, head_dim=32).head_dim == 32


def test_mistral_without_window(tmp_path: Path) -> None:
    config = read(tmp_path, architectures=["MistralForCausalLM"], sliding_window=None)
    assert (config.architecture, config.family) == ("MistralForCausalLM", "mistral")
    assert (config.sliding_window, config.sliding_layers, config.max_position_count) == (None, (), 512)


@pytest.mark.parametrize(
    ("architecture", "changes", "expected"),
    [
        ("Mistral", {}, (4096, (0, 1))),
        ("Mistral", {"sliding_window": 100}, (100, (0, 1))),
        ("Mistral", {"sliding_window": None}, (None, ())),
        ("Qwen2", {"sliding_window": 100}, (None, ())),
        ("Qwen2", {"sliding_window": 100, "use_sliding_window": False, "max_window_layers": 0}, (None, ())),
        ("Qwen2", {"sliding_window": 100, "use_sliding_window": True, "max_window_layers": 2}, (None, ())),
        ("Qwen2", {"sliding_window": 100, "use_sliding_window": True, "max_window_layers": 1}, (100, (1,))),
        ("Qwen2", {"use_sliding_window": True, "max_window_layers": 0}, (4096, (0, 1))),
        ("Qwen3", {"sliding_window": None, "use_sliding_window": True, "max_window_layers": 0}, (None, ())),
        ("Qwen3", {"sliding_window": 100, "use_sliding_window": True, "layer_types": [FULL, FULL]}, (None, ())),
        ("Qwen3", {"sliding_window": 100, "use_sliding_window": True, "layer_types": [SLIDING, FULL]}, (100, (0,))),
        ("Llama", {"sliding_window": 100}, (None, ())),
    ],
)
def test_sliding_windows(
    tmp_path: Path, architecture: str, changes: dict[str, Any], expected: tuple[int | None, tuple[int, ...]]
) -> None:
    config = read(tmp_path, architectures=[f"{architecture}ForCausalLM"], **changes)
    assert (config.sliding_window, config.sliding_layers) == expected
    assert config.max_position_count == 512


@pytest.mark.parametrize("kinds", [[FULL], [FULL, "chunked_attention"], "sliding_attention", [FULL, []], {}])
def test_kinds_of_layers_that_make_no_sense(tmp_path: Path, kinds: Any) -> None:
    error = refused(tmp_path, architectures=["Qwen3ForCausalLM"], use_sliding_window=True, layer_types=kinds)
    assert (error.code, error.expected) == ("invalid", "2 of full_attention or sliding_attention")


@pytest.mark.parametrize(
    ("architecture", "changes", "expected"),
    [
        ("Llama", {}, (False, False, False, False)),
        ("Llama", {"attention_bias": True, "mlp_bias": True}, (True, True, True, False)),
        ("Mistral", {"attention_bias": True, "mlp_bias": True}, (False, False, False, False)),
        ("Qwen2", {"attention_bias": False}, (True, False, False, False)),
        ("Qwen3", {}, (False, False, False, True)),
        ("Qwen3", {"attention_bias": True}, (True, True, False, True)),
    ],
)
def test_biases_and_norms_of_the_family(
    tmp_path: Path, architecture: str, changes: dict[str, Any], expected: tuple[bool, ...]
) -> None:
    config = read(tmp_path, architectures=[f"{architecture}ForCausalLM"], **changes)
    assert config.family == architecture.lower()
    assert (config.qkv_bias, config.output_bias, config.mlp_bias, config.qk_norm) == expected


@pytest.mark.parametrize("architecture", sorted(FAMILIES))
def test_what_config_leaves_unsaid_is_what_transformers_takes(tmp_path: Path, architecture: str) -> None:
    """The widths are such that a default of ours which differs cannot come out alike."""
    kind = str(TINY_FAMILIES[FAMILIES[architecture].name].get("model_type", "llama"))
    changes = {"hidden_size": 256, "num_attention_heads": 64, "model_type": kind}
    unsaid = {"max_position_embeddings": None, "rms_norm_eps": None}
    content = {key: value for key, value in {**BASE, **changes, **unsaid}.items() if value is not None}
    del content["num_key_value_heads"]
    (tmp_path / "config.json").write_text(json.dumps({**content, "architectures": [architecture]}))
    ours, theirs = read_hf_config(tmp_path, "float32"), AutoConfig.from_pretrained(tmp_path)
    kinds = getattr(theirs, "layer_types", None) or ()
    if getattr(theirs, "sliding_window", None) is None or (kinds and SLIDING not in kinds):
        assert (ours.sliding_window, ours.sliding_layers) == (None, ())
    else:
        assert ours.sliding_window == theirs.sliding_window
        assert ours.sliding_layers == tuple(n for n in (0, 1) if not kinds or kinds[n] == SLIDING)
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 256 // 64)
    assert ours.max_position_count == theirs.max_position_embeddings
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.hidden_act == (getattr(theirs, "hidden_act", None) or theirs.hidden_activation)
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert_details_equal(ours, theirs)


def assert_details_equal(ours: ModelConfig, theirs: Any) -> None:
    ropes = theirs.rope_parameters
    assert ours.rope.theta == (ropes.get("full_attention") or ropes)["rope_theta"]
    assert (ours.local_rope is None) == ("sliding_attention" not in ropes)
    if ours.local_rope is not None:
        assert ours.local_rope.theta == ropes["sliding_attention"]["rope_theta"]
    assert ours.attention_softcap == getattr(theirs, "attn_logit_softcapping", None)
    assert ours.logit_softcap == getattr(theirs, "final_logit_softcapping", None)
    scalar = getattr(theirs, "query_pre_attn_scalar", None)
    assert ours.attention_scale == (None if scalar is None else scalar**-0.5)
    if ours.experts is None:
        assert not hasattr(theirs, "num_experts_per_tok")
    else:
        assert (ours.experts.num_experts, ours.experts.num_chosen) == (theirs.num_experts, theirs.num_experts_per_tok)
        assert ours.experts.intermediate_size == getattr(theirs, "moe_intermediate_size", theirs.intermediate_size)
        assert ours.experts.normalised == getattr(theirs, "norm_topk_prob", True)
        assert ours.experts.layers == (0, 1)


MOE = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (0, 1, 2, 3)),
        ({"decoder_sparse_step": 2}, (1, 3)),
        ({"mlp_only_layers": [0, 3]}, (1, 2)),
        ({"mlp_only_layers": [0, 1, 2, 3]}, ()),
    ],
)
def test_layers_with_experts(tmp_path: Path, changes: dict[str, Any], expected: tuple[int, ...]) -> None:
    experts = read(tmp_path, num_hidden_layers=4, **MOE, **changes).experts
    assert experts is not None
    assert experts.layers == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"num_experts": 0},
        {"num_experts_per_tok": 9},
        {"mlp_only_layers": [2]},
        {"mlp_only_layers": [True]},
        {"mlp_only_layers": 1},
        {"decoder_sparse_step": 0},
        {"moe_intermediate_size": 0},
        {"norm_topk_prob": 1},
        {"num_experts": 16384, "num_hidden_layers": 4096},
    ],
)
def test_experts_that_make_no_sense(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert refused(tmp_path, **{**MOE, **changes}).code == "invalid"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (0,)),
        ({"sliding_window_pattern": 3, "num_hidden_layers": 7}, (0, 1, 3, 4, 6)),
        ({"layer_types": [FULL, SLIDING]}, (1,)),
        ({"sliding_window": None}, ()),
    ],
)
def test_windows_by_pattern(tmp_path: Path, changes: dict[str, Any], expected: tuple[int, ...]) -> None:
    assert read(tmp_path, architectures=["Gemma2ForCausalLM"], **changes).sliding_layers == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (50.0, 30.0)),
        ({"attn_logit_softcapping": None, "final_logit_softcapping": 7}, (None, 7.0)),
        ({"attn_logit_softcapping": 0}, (None, 30.0)),
    ],
)
def test_softcaps(tmp_path: Path, changes: dict[str, Any], expected: tuple[float | None, ...]) -> None:
    config = read(tmp_path, architectures=["Gemma2ForCausalLM"], **changes)
    assert (config.attention_softcap, config.logit_softcap) == expected


@pytest.mark.parametrize(
    ("changes", "full", "local"),
    [
        ({}, RopeConfig(1e6, None, {}), RopeConfig(1e4, None, {})),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_local_base_freq": 5.0, "rope_theta": 7.0},
            RopeConfig(7.0, "linear", {"factor": 8.0}),
            RopeConfig(5.0, None, {}),
        ),
        (
            {"rope_parameters": {FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 9.0}, SLIDING: None}},
            RopeConfig(9.0, "linear", {"factor": 8.0}),
            RopeConfig(1e4, None, {}),
        ),
    ],
)
def test_rope_by_kind_of_layer(tmp_path: Path, changes: dict[str, Any], full: RopeConfig, local: RopeConfig) -> None:
    config = read(tmp_path, architectures=["Gemma3ForCausalLM"], **changes)
    assert (config.rope, config.local_rope) == (full, local)


PHI3 = {"architectures": ["Phi3ForCausalLM"], "original_max_position_embeddings": 128}


@pytest.mark.parametrize("kind", ["longrope", "su", "yarn"])
def test_longrope_by_all_its_names(tmp_path: Path, kind: str) -> None:
    lists = {"short_factor": [1.0] * 6, "long_factor": [2] * 6}
    config = read(tmp_path, **PHI3, partial_rotary_factor=0.75, rope_scaling={"type": kind, **lists})
    expected = {"original_max_position_embeddings": 128, "short_factor": (1.0,) * 6, "long_factor": (2,) * 6}
    assert (config.rope, config.rotary_dim) == (RopeConfig(1e4, "longrope", expected), 12)


@pytest.mark.parametrize(
    "factors", [None, [1.0] * 7, [1.0] * 7 + [0], [1.0] * 7 + [float("nan")], [True] * 8, "12345678"]
)
def test_longrope_with_bad_lists(tmp_path: Path, factors: Any) -> None:
    scaling = {"type": "longrope", "short_factor": factors, "long_factor": [2.0] * 8}
    assert refused(tmp_path, **PHI3, rope_scaling=scaling).code == "invalid"


def test_a_model_that_sees_what_is_to_come_is_refused(tmp_path: Path) -> None:
    changes = {"architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": True}
    assert refused(tmp_path, **changes).code == "unsupported"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_theta": 5e5}, RopeConfig(5e5, None, {})),
        ({"rope_scaling": None, "rope_theta": 7.0}, RopeConfig(7.0, None, {})),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, RopeConfig(1e4, "linear", {"factor": 4.0})),
        ({"rope_scaling": {"rope_type": "default"}}, RopeConfig(1e4, None, {})),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3}, "rope_theta": 5e5}, RopeConfig(5e5, "llama3", LLAMA3)),
        ({"rope_scaling": {"rope_type": "llama3", "type": "x", **LLAMA3}}, RopeConfig(1e4, "llama3", LLAMA3)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 9e4}}, RopeConfig(9e4, None, {})),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}, "rope_theta": 1.5},
            RopeConfig(5e5, "llama3", LLAMA3),
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2}, "original_max_position_embeddings": 256},
            RopeConfig(1e4, "yarn", {"factor": 2, "original_max_position_embeddings": 256}),
        ),
    ],
)
def test_rope(tmp_path: Path, changes: dict[str, Any], expected: RopeConfig) -> None:
    assert read(tmp_path, **changes).rope == expected


@pytest.mark.parametrize(
    "scaling",
    [
        {"type": "linear"},
        {"type": "linear", "factor": 0},
        {"type": "linear", "factor": "four"},
        {"type": "linear", "factor": float("nan")},
        {"rope_type": "llama3", "factor": 8.0},
        {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0},
        {"rope_type": 5},
        {"type": "linear", "factor": 1.0, "rope_theta": -1},
    ],
)
def test_rope_with_bad_numbers(tmp_path: Path, scaling: dict[str, Any]) -> None:
    assert refused(tmp_path, rope_scaling=scaling).code == "invalid"


@pytest.mark.parametrize("scaling", [{"type": "spiral", "factor": 2.0}, {"full_attention": {"rope_type": "x"}}, [1]])
def test_rope_we_do_not_have(tmp_path: Path, scaling: Any) -> None:
    assert refused(tmp_path, rope_scaling=scaling).code == "unsupported"


@pytest.mark.parametrize(
    ("changes", "stored", "expected"),
    [
        ({"torch_dtype": "float16"}, "bfloat16", "float16"),
        ({"dtype": "float32", "torch_dtype": "float16"}, "bfloat16", "float32"),
        ({"torch_dtype": "torch.bfloat16"}, "float32", "bfloat16"),
        ({"torch_dtype": None}, "float16", "float16"),
        ({"torch_dtype": "auto"}, "float32", "float32"),
    ],
)
def test_dtype(tmp_path: Path, changes: dict[str, Any], stored: str, expected: str) -> None:
    assert read(tmp_path, stored, **changes).dtype == expected


def test_generation_config_names_the_ends(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8, 7], "bos_token_id": 1}')
    config = read(tmp_path, eos_token_id=2, bos_token_id=0)
    assert (config.bos_token_id, config.eos_token_ids) == (1, (7, 8))


@pytest.mark.parametrize(("eos", "expected"), [(2, (2,)), ([2, 3], (2, 3)), (None, ()), (-1, ()), ([], ())])
def test_eos_from_config(tmp_path: Path, eos: Any, expected: tuple[int, ...]) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": null}')
    assert read(tmp_path, eos_token_id=eos).eos_token_ids == expected


@pytest.mark.parametrize("architectures", [["FancyForCausalLM"], [], None, "LlamaForCausalLM", [5], {"a": 1}])
def test_unknown_architecture_names_those_we_have(tmp_path: Path, architectures: Any) -> None:
    error = refused(tmp_path, architectures=architectures)
    assert error.code == "unsupported"
    assert "LlamaForCausalLM" in error.remedy


def test_unknown_architecture_is_named(tmp_path: Path) -> None:
    assert "FancyForCausalLM" in refused(tmp_path, architectures=["FancyForCausalLM"]).message


def test_partial_rotary(tmp_path: Path) -> None:
    assert refused(tmp_path, partial_rotary_factor=0.5).code == "unsupported"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("vocab_size", 0),
        ("vocab_size", -5),
        ("vocab_size", 1 << 40),
        ("vocab_size", None),
        ("vocab_size", "320"),
        ("vocab_size", True),
        ("hidden_size", 1 << 30),
        ("hidden_size", 66),
        ("num_hidden_layers", 0),
        ("num_hidden_layers", 10**9),
        ("num_attention_heads", 0),
        ("num_key_value_heads", 3),
        ("num_key_value_heads", 8),
        ("head_dim", 15),
        ("head_dim", 0),
        ("intermediate_size", 1.5),
        ("max_position_embeddings", 0),
        ("max_position_embeddings", 10**12),
        ("rms_norm_eps", 0),
        ("rms_norm_eps", float("inf")),
        ("rope_theta", 0),
        ("rope_theta", float("nan")),
        ("tie_word_embeddings", "yes"),
        ("attention_bias", 1),
        ("hidden_act", 5),
        ("eos_token_id", 320),
        ("eos_token_id", [1, "2"]),
        ("bos_token_id", True),
    ],
)
def test_value_out_of_bounds(tmp_path: Path, name: str, value: Any) -> None:
    error = refused(tmp_path, **{name: value})
    assert error.code == "invalid"
    assert error.expected


def test_unknown_dtype(tmp_path: Path) -> None:
    assert refused(tmp_path, torch_dtype="int3").code == "unsupported"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"{", "not valid JSON"),
        (b"[1]", "not an object"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git-LFS"),
        (b"<html>", "web page"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
    ],
)
def test_broken_config_file(tmp_path: Path, content: bytes, text: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_hf_config(tmp_path, "bfloat16")
    assert text in caught.value.message


def test_config_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(BASE).encode())
    assert read_hf_config(tmp_path, "bfloat16").vocab_size == 320
