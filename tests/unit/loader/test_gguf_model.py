from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from loader.checkpoint import Checkpoint, open_checkpoint
from loader.config import RopeConfig
from loader.errors import CheckpointError
from loader.gguf_format import read_gguf_file
from loader.gguf_model import gguf_config
from loader.gguf_names import gguf_tensors
from loader.gguf_rope import llama3_divisors
from tests.support.tiny_checkpoint import TINY_FAMILIES, make_tiny_llama
from tests.support.tiny_gguf import make_tiny_gguf
from tests.support.tiny_gguf_families import ARCHITECTURES, FAMILY_CONFIGS, make_family_gguf

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def opened(folder: Path, **arguments: Any) -> Checkpoint:
    return open_checkpoint(make_tiny_gguf(folder / "m.gguf", **arguments))


def refused(folder: Path, **arguments: Any) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        opened(folder, **arguments)
    return caught.value


def test_config(tmp_path: Path) -> None:
    config = opened(tmp_path).config
    assert (config.architecture, config.family) == ("LlamaForCausalLM", "llama")
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (2, 4, 2, 16)
    assert (config.rms_norm_eps, config.rope) == (1e-5, RopeConfig(10000.0, None, {}))
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))


def test_absent_output_means_tied(tmp_path: Path) -> None:
    assert opened(tmp_path, tie=True).config.tie_word_embeddings
    assert not opened(tmp_path, tie=False).config.tie_word_embeddings


@pytest.mark.parametrize(
    ("quantisation", "dtype"),
    [("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16"), ("Q8_0", "bfloat16"), ("Q4_1", "bfloat16")],
)
def test_dtype(tmp_path: Path, quantisation: str, dtype: str) -> None:
    assert opened(tmp_path, quantisation=quantisation).config.dtype == dtype


def test_only_rotary_projections_are_reordered(tmp_path: Path) -> None:
    tensors = opened(tmp_path).tensors
    reordered = {name: info.rotary_heads for name, info in tensors.items() if info.rotary_heads is not None}
    assert reordered == {
        f"model.layers.{layer}.self_attn.{part}_proj.weight": heads
        for layer in range(2)
        for part, heads in (("q", 4), ("k", 2))
    }


@pytest.mark.parametrize(
    ("architecture", "name", "expected"),
    [("qwen2", "Qwen2ForCausalLM", (True, False, False, False)), ("qwen3", "Qwen3ForCausalLM", (False,) * 3 + (True,))],
)
def test_config_of_qwen(tmp_path: Path, architecture: str, name: str, expected: tuple[bool, ...]) -> None:
    checkpoint = opened(tmp_path, architecture=architecture)
    config = checkpoint.config
    assert (config.architecture, config.family, config.head_dim) == (name, architecture, 16)
    assert (config.qkv_bias, config.output_bias, config.mlp_bias, config.qk_norm) == expected
    assert {info.rotary_heads for info in checkpoint.tensors.values()} == {None}


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_both_formats_agree_on_qwen(tmp_path: Path, architecture: str) -> None:
    overrides = {**TINY_FAMILIES[architecture], "head_dim": 16}
    folder = make_tiny_llama(tmp_path / "hf", config_overrides=overrides)
    assert opened(tmp_path, architecture=architecture).config == open_checkpoint(folder).config


@pytest.mark.parametrize(
    ("architecture", "missing"), [("qwen2", "blk.0.attn_q.bias"), ("qwen3", "blk.1.attn_k_norm.weight")]
)
def test_qwen_without_its_own_tensors(tmp_path: Path, architecture: str, missing: str) -> None:
    error = refused(tmp_path, architecture=architecture, without=[missing])
    assert (error.code, error.found) == ("invalid", "nothing")


def test_ends_of_a_turn(tmp_path: Path) -> None:
    metadata = {"tokenizer.ggml.eos_token_id": 0, "tokenizer.ggml.eot_token_id": 5}
    # <|im_end|>, a control token, ends a turn though nothing says so.
    assert opened(tmp_path, metadata=metadata).config.eos_token_ids == (0, 5, 2)


def test_linear_rope_scaling(tmp_path: Path) -> None:
    metadata = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    assert opened(tmp_path, metadata=metadata).config.rope == RopeConfig(10000.0, "linear", {"factor": 4.0})


def test_divisors_are_those_of_transformers() -> None:
    config = LlamaConfig(
        hidden_size=512,
        num_attention_heads=4,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3},
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, device=torch.device("cpu"))
    plain = 1.0 / 500000.0 ** (torch.arange(0, 128, 2).float() / 128)
    assert torch.allclose(plain / scaled, torch.tensor(llama3_divisors(500000.0, 128, LLAMA3)), rtol=1e-4)


def test_llama3_rope_scaling_is_found_from_its_divisors(tmp_path: Path) -> None:
    divisors = np.array(llama3_divisors(500000.0, 16, LLAMA3), np.float32)
    rope = opened(
        tmp_path, metadata={"llama.rope.freq_base": 500000.0}, extra_tensors={"rope_freqs.weight": divisors}
    ).config.rope
    assert rope == RopeConfig(500000.0, "llama3", LLAMA3)


def test_other_divisors_are_refused(tmp_path: Path) -> None:
    divisors = np.linspace(1, 8, 8).astype(np.float32)
    error = refused(tmp_path, extra_tensors={"rope_freqs.weight": divisors})
    assert (error.code, error.tensor) == ("unsupported", "rope_freqs.weight")


def test_divisors_of_another_shape_are_refused(tmp_path: Path) -> None:
    assert refused(tmp_path, extra_tensors={"rope_freqs.weight": np.ones(5, np.float32)}).expected == "F32 [8]"


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0, -1.0])
def test_divisors_that_are_no_numbers_are_refused(tmp_path: Path, bad: float) -> None:
    divisors = np.full(8, bad, np.float32)
    assert refused(tmp_path, extra_tensors={"rope_freqs.weight": divisors}).file is not None


def test_unknown_architecture(tmp_path: Path) -> None:
    error = refused(tmp_path, architecture="mamba")
    assert (error.code, error.found) == ("unsupported", "mamba")
    assert error.expected == "llama, qwen2, qwen3, qwen3moe, gemma2, gemma3, phi3, olmo2"


@pytest.mark.parametrize(
    ("architecture", "metadata"),
    [("qwen2", {"qwen2.expert_count": 4}), ("olmo2", {"olmo2.attention.sliding_window": 4096})],
)
def test_architectures_that_mean_another_family(tmp_path: Path, architecture: str, metadata: dict[str, int]) -> None:
    assert refused(tmp_path, architecture=architecture, metadata=metadata).code == "unsupported"


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_both_formats_agree(tmp_path: Path, family: str) -> None:
    overrides = {**FAMILY_CONFIGS[family], "rms_norm_eps": 1e-5}
    plain = open_checkpoint(make_tiny_llama(tmp_path / "hf", config_overrides=overrides)).config
    config = open_checkpoint(make_family_gguf(tmp_path / "m.gguf", family)).config
    # GGUF has no names for ends of turns in these files, and its norms hold what is added to them.
    assert config == replace(plain, bos_token_id=None, eos_token_ids=(), norm_offset=0.0)


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_the_largest_gemma_scales_scores_by_another_size(tmp_path: Path, family: str) -> None:
    make_family_gguf(tmp_path / "m.gguf", family)
    file = read_gguf_file(tmp_path / "m.gguf")
    layers, heads = {"gemma2": (46, 32), "gemma3": (62, 32)}[family]
    sizes = {"block_count": layers, "embedding_length": 4608, "attention.head_count": heads}
    changed = {f"{family}.{key}": value for key, value in sizes.items()}
    config = gguf_config(replace(file, metadata={**file.metadata, **changed}))
    assert config.attention_scale == pytest.approx((4608 / heads) ** -0.5)


def test_experts_are_parts_of_one_tensor_or_tensors_of_their_own(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_family_gguf(tmp_path / "m.gguf", "mixtral", "Q8_0"))
    first, second = (checkpoint.tensors[f"model.layers.1.mlp.experts.{n}.down_proj.weight"] for n in (0, 1))
    assert first.stored_name == second.stored_name == "blk.1.ffn_down_exps.weight"
    assert (first.shape, second.offset - first.offset) == ((64, 128), 64 * 128 // 32 * 34)
    file = read_gguf_file(tmp_path / "m.gguf")
    joined = next(tensor for tensor in file.tensors if tensor.name == "blk.1.ffn_down_exps.weight")
    single = replace(joined, name="blk.1.ffn_down.3.weight", shape=(64, 128))
    assert gguf_tensors(replace(file, tensors=(single,)), checkpoint.config).keys() == {
        "model.layers.1.mlp.experts.3.down_proj.weight"
    }


@pytest.mark.parametrize(
    "metadata",
    [
        {"llama.rope.dimension_count": 8},
        {"llama.attention.value_length": 32},
        {"llama.rope.scaling.type": "spiral", "llama.rope.scaling.factor": 2.0},
    ],
)
def test_variants_we_do_not_have(tmp_path: Path, metadata: dict[str, Any]) -> None:
    assert refused(tmp_path, metadata=metadata).code == "unsupported"


@pytest.mark.parametrize(
    "metadata",
    [
        {"llama.block_count": None},
        {"llama.block_count": 0},
        {"llama.block_count": 4_000_000_000},
        {"llama.attention.head_count": 0},
        {"llama.attention.head_count": [4, 4]},
        {"llama.attention.head_count_kv": 3},
        {"llama.context_length": 0},
        {"llama.embedding_length": "64"},
        {"llama.attention.layer_norm_rms_epsilon": None},
        {"llama.rope.freq_base": float("inf")},
        {"llama.rope.scaling.type": "linear"},
        {"tokenizer.ggml.eos_token_id": 4000},
    ],
)
def test_numbers_out_of_bounds(tmp_path: Path, metadata: dict[str, Any]) -> None:
    error = refused(tmp_path, metadata=metadata)
    assert error.code == "invalid"
    assert error.expected


@pytest.mark.parametrize(
    ("missing", "name"),
    [
        ("blk.1.ffn_up.weight", "model.layers.1.mlp.up_proj.weight"),
        ("token_embd.weight", "model.embed_tokens.weight"),
    ],
)
def test_missing_tensor(tmp_path: Path, missing: str, name: str) -> None:
    metadata = {"llama.vocab_size": 320}
    assert refused(tmp_path, without=[missing], metadata=metadata).tensor == name


def test_tensor_without_a_place(tmp_path: Path) -> None:
    extra = {"blk.0.attn_sinks.weight": np.ones(16, np.float32)}
    assert refused(tmp_path, extra_tensors=extra).tensor == "blk.0.attn_sinks.weight"


def test_quantised_vector_is_refused_from_the_header(tmp_path: Path) -> None:
    file = read_gguf_file(make_tiny_gguf(tmp_path / "m.gguf"))
    tensors = [replace(one, dtype="Q4_1") if one.name == "output_norm.weight" else one for one in file.tensors]
    with pytest.raises(CheckpointError) as caught:
        gguf_tensors(replace(file, tensors=tuple(tensors)), gguf_config(file))
    error = caught.value
    assert (error.code, error.tensor, error.found) == ("unsupported", "output_norm.weight", "Q4_1")


def test_token_types_that_are_no_list_name_no_ends(tmp_path: Path) -> None:
    assert opened(tmp_path, metadata={"tokenizer.ggml.token_type": 3}).config.eos_token_ids == (2,)
