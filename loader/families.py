"""What sets one family of decoders apart from another, as data. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Window = Literal["none", "all_layers", "last_layers"]


@dataclass(frozen=True, slots=True)
class Family:
    """How a family differs from the others, and what its config.json leaves unsaid.

    A bias that is None is there when config.json says so (`attention_bias`, `mlp_bias`); one that is True or False
    is so whatever config.json says. `num_kv_heads` None stands for as many as there are heads, `head_dim` None for
    hidden size over heads. `window` tells which layers a sliding window applies to; `sliding_window` is its size
    where config.json does not name one.
    """

    name: str
    qkv_bias: bool | None = None
    output_bias: bool | None = None
    mlp_bias: bool | None = None
    qk_norm: bool = False
    num_kv_heads: int | None = None
    head_dim: int | None = None
    max_position_count: int = 2048
    window: Window = "none"
    sliding_window: int = 4096


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
}
"""Families by the architecture that config.json names."""
