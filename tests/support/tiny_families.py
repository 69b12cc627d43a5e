"""What the tensors of a family are where they are not Llama's: norms elsewhere, products fused, experts."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tensors = dict[str, NDArray[np.float32]]


def arrange_for_family(tensors: Tensors, config: Mapping[str, Any], rng: np.random.Generator) -> None:
    """Turns the tensors of a Llama into those of the family of `config["model_type"]`."""
    arrange = _FAMILIES.get(str(config.get("model_type")))
    if arrange is not None:
        for layer in range(int(config["num_hidden_layers"])):
            arrange(tensors, f"model.layers.{layer}.", layer, config, rng)
    if config.get("model_type") in ("gemma2", "gemma3_text"):
        for name in list(tensors):
            if "norm" in name:
                # 1 is added to these weights.
                tensors[name] = tensors[name] - np.float32(1.0)


def _norm(rng: np.random.Generator, size: int) -> NDArray[np.float32]:
    return (1.0 + 0.3 * rng.standard_normal(size)).astype(np.float32)


def _gemma(tensors: Tensors, prefix: str, _layer: int, config: Mapping[str, Any], rng: np.random.Generator) -> None:
    for name in ("pre_feedforward_layernorm", "post_feedforward_layernorm"):
        tensors[f"{prefix}{name}.weight"] = _norm(rng, int(config["hidden_size"]))
    if config["model_type"] == "gemma3_text":
        for part in ("q", "k"):
            tensors[f"{prefix}self_attn.{part}_norm.weight"] = _norm(rng, int(config["head_dim"]))


def _phi3(tensors: Tensors, prefix: str, _layer: int, _config: Mapping[str, Any], _rng: np.random.Generator) -> None:
    for fused, parts in (("self_attn.qkv", ("q", "k", "v")), ("mlp.gate_up", ("gate", "up"))):
        outer = fused.partition(".")[0]
        joined = [tensors.pop(f"{prefix}{outer}.{part}_proj.weight") for part in parts]
        tensors[f"{prefix}{fused}_proj.weight"] = np.concatenate(joined)


def _olmo2(tensors: Tensors, prefix: str, _layer: int, config: Mapping[str, Any], rng: np.random.Generator) -> None:
    tensors[f"{prefix}post_feedforward_layernorm.weight"] = tensors.pop(f"{prefix}input_layernorm.weight")
    for part, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads")):
        size = int(config[heads]) * int(config["head_dim"])
        tensors[f"{prefix}self_attn.{part}_norm.weight"] = _norm(rng, size)


def _mixtral(tensors: Tensors, prefix: str, _layer: int, config: Mapping[str, Any], rng: np.random.Generator) -> None:
    names = {"gate": "w1", "down": "w2", "up": "w3"}
    _to_experts(tensors, prefix, config, rng, int(config["num_local_experts"]), int(config["intermediate_size"]))
    for name in list(tensors):
        if name.startswith(f"{prefix}mlp."):
            renamed = name.replace("mlp.", "block_sparse_moe.")
            for ours, theirs in names.items():
                renamed = renamed.replace(f"{ours}_proj", theirs)
            tensors[renamed] = tensors.pop(name)


def _qwen3_moe(tensors: Tensors, prefix: str, layer: int, config: Mapping[str, Any], rng: np.random.Generator) -> None:
    if layer not in config["mlp_only_layers"] and (layer + 1) % config.get("decoder_sparse_step", 1) == 0:
        _to_experts(tensors, prefix, config, rng, int(config["num_experts"]), int(config["moe_intermediate_size"]))


def _to_experts(
    tensors: Tensors,
    prefix: str,
    config: Mapping[str, Any],
    rng: np.random.Generator,
    num_experts: int,
    inner: int,
) -> None:
    hidden = int(config["hidden_size"])
    for name in ("gate", "up", "down"):
        del tensors[f"{prefix}mlp.{name}_proj.weight"]
    # So far apart that rounding seldom changes which experts are chosen.
    router = rng.standard_normal((num_experts, hidden)) * 3 / np.sqrt(hidden)
    tensors[f"{prefix}mlp.gate.weight"] = router.astype(np.float32)
    for expert in range(num_experts):
        for name, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
            drawn = rng.standard_normal(shape) / np.sqrt(shape[1])
            tensors[f"{prefix}mlp.experts.{expert}.{name}_proj.weight"] = drawn.astype(np.float32)


_FAMILIES = {
    "gemma2": _gemma,
    "gemma3_text": _gemma,
    "phi3": _phi3,
    "olmo2": _olmo2,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
}
