"""Tiny TensorRT-LLM checkpoints, split the way its converters split, with numpy alone."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.support.tiny_checkpoint import tiny_tensors, write_safetensors, write_tiny_tokenizer

Tensors = dict[str, NDArray[np.float32]]
_GLOBAL = {"vocab_embedding": "model.embed_tokens", "ln_f": "model.norm"}
_COLUMNS = {"mlp.fc": "mlp.gate_proj", "mlp.gate": "mlp.up_proj"}
_ROWS = {"attention.dense": "self_attn.o_proj", "mlp.proj": "mlp.down_proj"}
_WHOLE = {
    "input_layernorm": "input_layernorm",
    "post_layernorm": "post_attention_layernorm",
    "attention.q_layernorm": "self_attn.q_norm",
    "attention.k_layernorm": "self_attn.k_norm",
}


def make_tiny_trtllm(
    folder: Path,
    config: Mapping[str, Any],
    *,
    tp: int = 1,
    pp: int = 1,
    embedding_dim: int | None = None,
    shares_head: bool = False,
    overrides: Mapping[str, Any] | None = None,
) -> Path:
    """Writes the checkpoint of the model that a Hugging Face `config` describes, and returns `folder`.

    `embedding_dim` is along which the ranks divide the embedding, `overrides` are laid over config.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_tiny_tokenizer(folder)
    said = {
        "architecture": config["architectures"][0],
        "dtype": "float32",
        "logits_dtype": "float32",
        "vocab_size": config["vocab_size"],
        "max_position_embeddings": config["max_position_embeddings"],
        "hidden_size": config["hidden_size"],
        "num_hidden_layers": config["num_hidden_layers"],
        "num_attention_heads": config["num_attention_heads"],
        "num_key_value_heads": config["num_key_value_heads"],
        "head_size": config["head_dim"],
        "hidden_act": "silu",
        "intermediate_size": config["intermediate_size"],
        "norm_epsilon": config["rms_norm_eps"],
        "position_embedding_type": "rope_gpt_neox",
        "use_parallel_embedding": embedding_dim is not None,
        "embedding_sharding_dim": embedding_dim or 0,
        "share_embedding_table": shares_head,
        "mapping": {"world_size": tp * pp, "tp_size": tp, "pp_size": pp, "gpus_per_node": 8},
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
        "rotary_base": config["rope_theta"],
        "rotary_scaling": None,
        "moe": {"num_experts": 0},
        "attn_bias": config.get("attention_bias") or False,
        "mlp_bias": config.get("mlp_bias") or False,
        **(overrides or {}),
    }
    (folder / "config.json").write_text(json.dumps(said))
    tensors = tiny_tensors(config, seed=0, tie=shares_head)
    for stage, layers in enumerate(np.array_split(np.arange(config["num_hidden_layers"]), pp)):
        for rank in range(tp):
            held = _layers(tensors, config, layers.tolist(), rank, tp)
            if stage == 0:
                embedding = tensors["model.embed_tokens.weight"]
                held["transformer.vocab_embedding.weight"] = _embedding(embedding, embedding_dim, rank, tp)
            if stage == pp - 1:
                held["transformer.ln_f.weight"] = tensors["model.norm.weight"]
                if not shares_head:
                    held["lm_head.weight"] = np.split(_padded(tensors["lm_head.weight"], tp), tp)[rank]
            write_safetensors(folder / f"rank{stage * tp + rank}.safetensors", held)
    return folder


def _layers(tensors: Tensors, config: Mapping[str, Any], layers: list[int], rank: int, tp: int) -> Tensors:
    held: Tensors = {}
    for number, layer in enumerate(layers):
        ours, theirs = f"model.layers.{layer}.", f"transformer.layers.{number}."
        for kind in ("weight", "bias"):
            if f"{ours}self_attn.q_proj.{kind}" in tensors:
                query = np.split(tensors[f"{ours}self_attn.q_proj.{kind}"], tp)[rank]
                others = [_key_value(tensors[f"{ours}self_attn.{x}_proj.{kind}"], config, rank, tp) for x in "kv"]
                held[f"{theirs}attention.qkv.{kind}"] = np.concatenate([query, *others])
            for new, old in _COLUMNS.items():
                if f"{ours}{old}.{kind}" in tensors:
                    held[f"{theirs}{new}.{kind}"] = np.split(tensors[f"{ours}{old}.{kind}"], tp)[rank]
            for new, old in _ROWS.items():
                if f"{ours}{old}.{kind}" in tensors:
                    whole = tensors[f"{ours}{old}.{kind}"]
                    held[f"{theirs}{new}.{kind}"] = whole if kind == "bias" else np.split(whole, tp, axis=1)[rank]
            for new, old in _WHOLE.items():
                if f"{ours}{old}.{kind}" in tensors:
                    held[f"{theirs}{new}.{kind}"] = tensors[f"{ours}{old}.{kind}"]
    return held


def _key_value(whole: NDArray[np.float32], config: Mapping[str, Any], rank: int, tp: int) -> NDArray[np.float32]:
    heads = np.split(whole, config["num_key_value_heads"])
    if len(heads) < tp:
        heads = [head for head in heads for _ in range(tp // len(heads))]
    return np.concatenate(np.split(np.stack(heads), tp)[rank])


def _embedding(whole: NDArray[np.float32], dim: int | None, rank: int, tp: int) -> NDArray[np.float32]:
    if dim is None:
        return whole
    return np.split(_padded(whole, tp) if dim == 0 else whole, tp, axis=dim)[rank]


def _padded(whole: NDArray[np.float32], tp: int) -> NDArray[np.float32]:
    return np.pad(whole, ((0, -len(whole) % tp), (0, 0)))
