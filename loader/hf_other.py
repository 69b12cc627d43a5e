"""Models of none of our families, which transformers may know: what config.json says of them under other names.

Whether transformers knows the class, and whether its definition can be served, is found out where weights are
loaded: here is only what the memory plan and the scheduler need. Imports neither torch nor transformers.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from loader.config import ModelConfig, OtherModel
from loader.errors import CheckpointError
from loader.families import FAMILIES, Family
from loader.tensors import TensorInfo

OTHER = Family("transformers", qkv_bias=False, output_bias=False, mlp_bias=False)
"""The family of all models that run through transformers' own definitions."""
_CAUSAL_ENDINGS = ("ForCausalLM", "LMHeadModel")
# What we need, and what it is called in configs of transformers; the first that is there counts.
_NAMES: Mapping[str, tuple[str, ...]] = {
    "vocab_size": ("vocab_size",),
    "hidden_size": ("hidden_size", "n_embd", "d_model", "dim"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"),
    "num_key_value_heads": ("num_key_value_heads", "num_kv_heads", "n_kv_heads"),
    "head_dim": ("head_dim",),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "ffn_config"),
    "max_position_embeddings": (
        "max_position_embeddings",
        "n_positions",
        "max_seq_len",
        "n_ctx",
        "max_sequence_length",
    ),
}
_TAKEN_AS_THEY_ARE = (
    "bos_token_id",
    "eos_token_id",
    "dtype",
    "torch_dtype",
    "quantization_config",
    "compression_config",
)


def is_other_causal_lm(content: Mapping[str, Any], name: str) -> bool:
    """Whether `name`, an architecture that config.json names, is that of a causal LM that transformers may know."""
    return name.isidentifier() and len(name) < 100 and name.endswith(_CAUSAL_ENDINGS) and _has_type(content)


def common_content(content: Mapping[str, Any]) -> dict[str, Any]:
    """The content of config.json under the names that our families have; what is not needed is left out."""
    common = {name: content[name] for name in _TAKEN_AS_THEY_ARE if name in content}
    for ours, theirs in _NAMES.items():
        value = next((content[name] for name in theirs if content.get(name) is not None), None)
        if value is not None:
            common[ours] = value
    if content.get("multi_query") is True and not content.get("new_decoder_architecture"):
        common["num_key_value_heads"] = 1
    if not isinstance(common.get("intermediate_size"), int) and isinstance(common.get("hidden_size"), int):
        common["intermediate_size"] = 4 * common["hidden_size"]
    return common


def refuse_without_sizes(file: Path, architecture: str, common: Mapping[str, Any]) -> None:
    """Raises CheckpointError "unsupported" for a model that does not say what a decoder with attention has."""
    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"):
        if name not in common:
            raise CheckpointError(
                "unsupported",
                f"{file}: {architecture} is none of the families that we compute, and its {name} is not there, by none "
                "of the names that transformers has for it",
                f"use a model of one of these: {', '.join(FAMILIES)}",
                file=file,
                expected=" or ".join(_NAMES[name]),
                found=architecture,
            )


def with_tensors(config: ModelConfig, tensors: Mapping[str, TensorInfo]) -> ModelConfig:
    """The config of another model with the tensors that a checkpoint of it holds; any other config as it is."""
    if config.other is None:
        return config
    shapes = {name: stored.shape for name, stored in tensors.items()}
    return replace(config, other=replace(config.other, tensors=shapes))


def other_model(content: Mapping[str, Any]) -> OtherModel:
    """What transformers' definition is made from: config.json without what names code or how to run it."""
    kept = {name: value for name, value in content.items() if not name.startswith("_") and name != "auto_map"}
    return OtherModel(kept, {})


def _has_type(content: Mapping[str, Any]) -> bool:
    return isinstance(content.get("model_type"), str)
