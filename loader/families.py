"""What sets one family of decoders apart from another, as data. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from loader.config import Norms

Window = Literal["none", "all_layers", "all_layers_if_asked", "last_layers", "by_pattern"]


@dataclass(frozen=True, slots=True)
class Family:
    """How a family differs from the others, and what its config.json leaves unsaid.

    A bias that is None is there when config.json says so (`attention_bias`, `mlp_bias`); one that is True or False
    is so whatever config.json says. `num_kv_heads` None stands for as many as there are heads, `head_dim` None for
    hidden size over heads. `window` tells which layers a sliding window applies to; `sliding_window` is its size
    where config.json does not name one, None for none. By pattern, every `window_period`-th layer sees everything.

    A softcap of 0.0 stands for none unless config.json names one, None for a family that has no such thing. A
    `query_pre_attn_scalar` or a `local_rope_theta` is what a family takes that knows these fields. `fused` tells that
    products of one input are stored as one tensor, `partial_rotary` that a head may be rotated in part.
    """

    name: str
    qkv_bias: bool | None = None
    output_bias: bool | None = None
    mlp_bias: bool | None = None
    qk_norm: bool = False
    qk_norm_whole: bool = False
    num_kv_heads: int | None = None
    head_dim: int | None = None
    max_position_count: int = 2048
    window: Window = "none"
    sliding_window: int | None = 4096
    window_period: int = 1
    norms: Norms = "before"
    norm_offset: float = 0.0
    rms_norm_eps: float = 1e-6
    activation_field: str = "hidden_act"
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    scales_embedding: bool = False
    query_pre_attn_scalar: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    rope_theta: float = 10000.0
    local_rope_theta: float | None = None
    original_max_position_count: int | None = None
    partial_rotary: bool = False
    fused: bool = False
    experts: "ExpertsFamily | None" = None


@dataclass(frozen=True, slots=True)
class ExpertsFamily:
    """How a family's mixtures of experts are described, and what its config.json leaves unsaid: their number and the
    rest of `loader.config.ExpertsConfig`.

    `normalised` None stands for what config.json says (`norm_topk_prob`). `size_field` names the field of an expert's
    width. Where `may_skip_layers`, `decoder_sparse_step` and `mlp_only_layers` tell which layers have no experts.
    `stored_names` are the modules of a layer as stored, in parts, and what we call them.
    """

    num_experts: int
    num_chosen: int
    size_field: str
    intermediate_size: int
    normalised: bool | None = None
    may_skip_layers: bool = False
    stored_names: tuple[tuple[str, str], ...] = ()


FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family("llama"),
    "MistralForCausalLM": Family(
        "mistral",
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        num_kv_heads=8,
        max_position_count=131072,
        window="all_layers",
    ),
    "Qwen2ForCausalLM": Family(
        "qwen2",
        qkv_bias=True,
        output_bias=False,
        mlp_bias=False,
        num_kv_heads=32,
        max_position_count=32768,
        window="last_layers",
    ),
    "Qwen3ForCausalLM": Family(
        "qwen3",
        mlp_bias=False,
        qk_norm=True,
        num_kv_heads=32,
        head_dim=128,
        max_position_count=32768,
        window="last_layers",
    ),
    "Gemma2ForCausalLM": Family(
        "gemma2",
        mlp_bias=False,
        num_kv_heads=4,
        head_dim=256,
        max_position_count=8192,
        window="by_pattern",
        window_period=2,
        norms="around",
        norm_offset=1.0,
        activation_field="hidden_activation",
        hidden_act="gelu_pytorch_tanh",
        tie_word_embeddings=True,
        scales_embedding=True,
        query_pre_attn_scalar=256.0,
        attention_softcap=50.0,
        logit_softcap=30.0,
    ),
    "Gemma3ForCausalLM": Family(
        "gemma3",
        mlp_bias=False,
        qk_norm=True,
        num_kv_heads=4,
        head_dim=256,
        max_position_count=131072,
        window="by_pattern",
        window_period=6,
        norms="around",
        norm_offset=1.0,
        activation_field="hidden_activation",
        hidden_act="gelu_pytorch_tanh",
        tie_word_embeddings=True,
        scales_embedding=True,
        query_pre_attn_scalar=256.0,
        logit_softcap=0.0,
        rope_theta=1e6,
        local_rope_theta=1e4,
    ),
    "Phi3ForCausalLM": Family(
        "phi3",
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        max_position_count=4096,
        window="all_layers",
        sliding_window=None,
        rms_norm_eps=1e-5,
        original_max_position_count=4096,
        partial_rotary=True,
        fused=True,
    ),
    "Olmo2ForCausalLM": Family(
        "olmo2", mlp_bias=False, qk_norm=True, qk_norm_whole=True, norms="after", rms_norm_eps=1e-5
    ),
    "MixtralForCausalLM": Family(
        "mixtral",
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        num_kv_heads=8,
        max_position_count=131072,
        window="all_layers",
        sliding_window=None,
        rms_norm_eps=1e-5,
        rope_theta=1e6,
        experts=ExpertsFamily(
            num_experts=8,
            num_chosen=2,
            size_field="intermediate_size",
            intermediate_size=14336,
            normalised=True,
            stored_names=(
                ("block_sparse_moe", "mlp"),
                ("w1", "gate_proj"),
                ("w2", "down_proj"),
                ("w3", "up_proj"),
            ),
        ),
    ),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe",
        mlp_bias=False,
        qk_norm=True,
        num_kv_heads=4,
        max_position_count=32768,
        window="all_layers_if_asked",
        experts=ExpertsFamily(
            num_experts=128,
            num_chosen=8,
            size_field="moe_intermediate_size",
            intermediate_size=768,
            may_skip_layers=True,
        ),
    ),
}
"""Families by the architecture that config.json names."""
