"""What a GGUF says of its model, in Hugging Face terms. Imports no torch."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from loader import fields
from loader.config import ExpertsConfig, ModelConfig
from loader.errors import CheckpointError
from loader.families import FAMILIES, Family
from loader.fields import Fields
from loader.gguf_format import GgufFile
from loader.gguf_names import UNQUANTISED
from loader.gguf_rope import read_local_rope, read_rope, shortest
from loader.hf_config import check_experts, check_heads, head_dim, unsupported_architecture

# GGUF calls Mistral a llama, and tells neither from the other; a llama with experts is a Mixtral.
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
}
SUPPORTED_GGUF_ARCHITECTURES = tuple(_ARCHITECTURES)
# Converters write no window for the others.
_HAVE_WINDOWS = ("gemma2", "gemma3", "phi3")
# The number of layers by which llama.cpp knows the one Gemma of each generation, of 27 B parameters, that scales
# scores by hidden size over heads and not by the size of a head. GGUF has no field for it.
_SCALED_BY_HIDDEN_SIZE = {"gemma2": 46, "gemma3": 62}
# Turn-ending tokens which GGUF files often hold without naming them as such.
_TURN_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>")
_CONTROL_TOKEN = 3


def gguf_config(file: GgufFile) -> ModelConfig:
    """The config of a parsed GGUF. Raises CheckpointError like `read_hf_config`."""
    architecture, values = _architecture(file)
    family = FAMILIES[architecture]
    hidden_size = values.integer("embedding_length", fields.HIDDEN_BOUNDS)
    num_heads = values.integer("attention.head_count", fields.HEAD_BOUNDS)
    num_kv_heads = values.integer("attention.head_count_kv", fields.HEAD_BOUNDS, num_heads)
    size = _head_dim(values, hidden_size, num_heads)
    rotary_dim = _rotary_dim(values, family, size)
    vocab_size = _vocab_size(file, values)
    names = {tensor.name for tensor in file.tensors}
    tokens = Fields(file.path, file.metadata)
    bos = tokens.token_ids("tokenizer.ggml.bos_token_id", vocab_size)
    config = ModelConfig(
        architecture=architecture,
        family=family.name,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=values.integer("block_count", fields.LAYER_BOUNDS),
        num_heads=num_heads,
        num_kv_heads=check_heads(values, num_heads, num_kv_heads),
        head_dim=size,
        intermediate_size=values.integer("feed_forward_length", fields.INTERMEDIATE_BOUNDS),
        max_position_count=values.integer("context_length", fields.POSITION_BOUNDS),
        rms_norm_eps=shortest(values.number("attention.layer_norm_rms_epsilon", fields.EPSILON_BOUNDS)),
        rope=read_rope(file, values, family, rotary_dim),
        tie_word_embeddings="output.weight" not in names,
        qkv_bias="blk.0.attn_q.bias" in names if family.qkv_bias is None else family.qkv_bias,
        output_bias="blk.0.attn_output.bias" in names if family.output_bias is None else family.output_bias,
        mlp_bias="blk.0.ffn_gate.bias" in names if family.mlp_bias is None else family.mlp_bias,
        hidden_act=family.hidden_act,
        dtype=_dtype(file),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=_eos_token_ids(tokens, vocab_size),
        qk_norm=family.qk_norm,
        rotary_dim=None if rotary_dim == size else rotary_dim,
    )
    return _with_details(config, values, family)


def _architecture(file: GgufFile) -> tuple[str, Fields]:
    """The architecture as Hugging Face names it, and the metadata of the model without its prefix."""
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in _ARCHITECTURES:
        raise unsupported_architecture(file.path, str(name)[:100], SUPPORTED_GGUF_ARCHITECTURES)
    prefix = f"{name}."
    model = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    values = Fields(file.path, model, "convert the model again with a current llama.cpp")
    architecture = _ARCHITECTURES[name]
    if values.integer("expert_count", (0, 1 << 14), 0) > 0 and FAMILIES[architecture].experts is None:
        if name != "llama":
            raise unsupported_architecture(file.path, f"{name} with experts", (f"{name} without experts",))
        architecture = "MixtralForCausalLM"
    if name == "olmo2" and values.integer("attention.sliding_window", (0, fields.POSITION_BOUNDS[1]), 0) > 0:
        raise unsupported_architecture(file.path, "olmo2 with a sliding window (OLMo 3)", SUPPORTED_GGUF_ARCHITECTURES)
    return architecture, values


def _with_details(config: ModelConfig, values: Fields, family: Family) -> ModelConfig:
    """The config with what only some families have. Converters have added their offset to the weights of norms."""
    softcaps = [
        None if default is None else values.number(name, (0.0, 1e6), default) or None
        for name, default in (
            ("attn_logit_softcapping", family.attention_softcap),
            ("final_logit_softcapping", family.logit_softcap),
        )
    ]
    window, layers = _window(config, values, family)
    return replace(
        config,
        sliding_window=window,
        sliding_layers=layers,
        norms=family.norms,
        qk_norm_whole=family.qk_norm_whole,
        embedding_scale=math.sqrt(config.hidden_size) if family.scales_embedding else 1.0,
        attention_scale=_attention_scale(config, family),
        attention_softcap=softcaps[0],
        logit_softcap=softcaps[1],
        local_rope=read_local_rope(values, family),
        experts=_experts(config, values, family),
    )


def _window(config: ModelConfig, values: Fields, family: Family) -> tuple[int | None, tuple[int, ...]]:
    if family.name not in _HAVE_WINDOWS:
        return None, ()
    size = values.integer("attention.sliding_window", (0, fields.POSITION_BOUNDS[1]), family.sliding_window or 0)
    if size == 0:
        return None, ()
    if family.window == "all_layers":
        return size, tuple(range(config.num_layers))
    return size, tuple(n for n in range(config.num_layers) if (n + 1) % family.window_period)


def _attention_scale(config: ModelConfig, family: Family) -> float | None:
    if family.query_pre_attn_scalar is None:
        return None
    if _SCALED_BY_HIDDEN_SIZE.get(family.name) == config.num_layers:
        return 1 / math.sqrt(config.hidden_size / config.num_heads)
    return 1 / math.sqrt(config.head_dim)


def _experts(config: ModelConfig, values: Fields, family: Family) -> ExpertsConfig | None:
    if family.experts is None:
        return None
    count = values.integer("expert_count", (1, 1 << 14))
    experts = ExpertsConfig(
        count,
        values.integer("expert_used_count", (1, count)),
        values.integer("expert_feed_forward_length", fields.INTERMEDIATE_BOUNDS, config.intermediate_size),
        normalised=True,  # in llama.cpp, for both architectures
        layers=tuple(range(config.num_layers)),
    )
    return check_experts(values, "expert_count", experts)


def _head_dim(values: Fields, hidden_size: int, num_heads: int) -> int:
    size = head_dim(values, "attention.key_length", hidden_size, num_heads)
    other = values.integer("attention.value_length", fields.HEAD_DIM_BOUNDS, size)
    if other != size:
        raise _other_size(values.file, "attention.value_length", other, size)
    return size


def _rotary_dim(values: Fields, family: Family, size: int) -> int:
    rotary_dim = values.integer("rope.dimension_count", fields.HEAD_DIM_BOUNDS, size)
    if rotary_dim != size and not (family.partial_rotary and rotary_dim < size and rotary_dim % 2 == 0):
        raise _other_size(values.file, "rope.dimension_count", rotary_dim, size)
    return rotary_dim


def _other_size(file: Path, name: str, found: int, size: int) -> CheckpointError:
    return CheckpointError(
        "unsupported",
        f"{file}: {name} {found} differs from the head size {size}",
        "use a model whose heads have one size and are rotated whole",
        file=file,
        expected=str(size),
        found=str(found),
    )


def _vocab_size(file: GgufFile, values: Fields) -> int:
    embedding = next((tensor for tensor in file.tensors if tensor.name == "token_embd.weight"), None)
    if embedding is not None and len(embedding.shape) == 2:
        # The metadata is absent in old files; the rows of the embedding are what can be looked up.
        return Fields(file.path, {"rows of token_embd.weight": embedding.shape[0]}).integer(
            "rows of token_embd.weight", fields.VOCAB_BOUNDS
        )
    return values.integer("vocab_size", fields.VOCAB_BOUNDS)


def _eos_token_ids(tokens: Fields, vocab_size: int) -> tuple[int, ...]:
    ids: dict[int, None] = {}
    for key in ("eos_token_id", "eot_token_id", "eom_token_id"):
        ids.update(dict.fromkeys(tokens.token_ids(f"tokenizer.ggml.{key}", vocab_size)))
    texts, kinds = tokens.values.get("tokenizer.ggml.tokens"), tokens.values.get("tokenizer.ggml.token_type")
    if isinstance(texts, list) and isinstance(kinds, Sequence) and len(texts) <= vocab_size:
        special = [number for number, kind in enumerate(kinds) if kind == _CONTROL_TOKEN]
        ids.update({number: None for number in special if number < len(texts) and texts[number] in _TURN_ENDS})
    return tuple(ids)


def _dtype(file: GgufFile) -> str:
    weights = {tensor.dtype for tensor in file.tensors if len(tensor.shape) > 1}
    return UNQUANTISED[weights.pop()] if len(weights) == 1 and weights <= UNQUANTISED.keys() else "bfloat16"
