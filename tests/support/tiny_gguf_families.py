"""Tiny GGUF files of the families that have more than Llama, named by the `gguf` package's own tables."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from tests.support.tiny_checkpoint import TINY_FAMILIES, tiny_tensors
from tests.support.tiny_gguf import TINY_CONFIG, add_metadata, to_gguf_order

ARCHITECTURES: Mapping[str, gguf.MODEL_ARCH] = {
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3": gguf.MODEL_ARCH.GEMMA3,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "olmo2": gguf.MODEL_ARCH.OLMO2,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
}
FAMILY_CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "gemma2": {**TINY_FAMILIES["gemma2"], "query_pre_attn_scalar": 16},
    # The period and the base of sliding layers are fixed in llama.cpp.
    "gemma3": {**TINY_FAMILIES["gemma3"], "query_pre_attn_scalar": 16, "sliding_window_pattern": 6},
    "phi3": {
        **TINY_FAMILIES["phi3"],
        "sliding_window": 9,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0, 1.25, 1.5, 1.75, 2.0, 2.25],
            "long_factor": [2.0, 4.0, 8.0, 16.0, 32.0, 64.0],
            "attention_factor": 1.25,
        },
        "original_max_position_embeddings": 256,
    },
    "olmo2": TINY_FAMILIES["olmo2"],
    "mixtral": TINY_FAMILIES["mixtral"],
    "qwen3_moe": {**TINY_FAMILIES["qwen3_moe"], "mlp_only_layers": []},
}
"""What config.json says of each, where GGUF can say the same."""

_EXPERT = re.compile(r"model\.layers\.(\d+)\.(mlp|block_sparse_moe)\.experts\.\d+\.(\w+)\.weight")


def make_family_gguf(path: Path, family: str, quantisation: str = "F32") -> Path:
    """Writes the GGUF of what `make_tiny_llama(config_overrides=FAMILY_CONFIGS[family])` writes; returns its path."""
    arch = ARCHITECTURES[family]
    config = {**TINY_CONFIG, **FAMILY_CONFIGS[family]}
    tensors = tiny_tensors(config, seed=0, tie=bool(config.get("tie_word_embeddings")))
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    for key, value in _metadata(gguf.MODEL_ARCH_NAMES[arch], config).items():
        add_metadata(writer, key, value)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for name, tensor in _merged(tensors).items():
        stored = names.get_name(name, try_suffixes=(".weight",))
        assert stored is not None, name
        ordered = np.ascontiguousarray(_as_converted(family, name, tensor))
        kind = gguf.GGMLQuantizationType[quantisation]
        if tensor.ndim == 1 or quantisation == "F32":
            writer.add_tensor(stored, ordered)
        else:
            writer.add_tensor(stored, gguf.quants.quantize(ordered, kind), raw_dtype=kind)
    rope = config.get("rope_scaling", {})
    for kind_name in ("short", "long"):
        if f"{kind_name}_factor" in rope:
            factors = np.array(rope[f"{kind_name}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{kind_name}.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _as_converted(family: str, name: str, tensor: NDArray[np.float32]) -> NDArray[np.float32]:
    if family.startswith("gemma") and "norm" in name:
        return tensor + np.float32(1.0)
    return to_gguf_order(name, tensor, TINY_CONFIG) if family == "mixtral" else tensor


def _merged(tensors: Mapping[str, NDArray[np.float32]]) -> dict[str, NDArray[np.float32]]:
    """All experts of a layer as one tensor, under the names that llama.cpp's converter gives these."""
    merged: dict[str, list[NDArray[np.float32]]] = {}
    plain = dict(tensors)
    for name in tensors:
        if match := _EXPERT.fullmatch(name):
            outer = f"model.layers.{match[1]}.mlp" if match[2] == "mlp" else f"layers.{match[1]}.feed_forward"
            merged.setdefault(f"{outer}.experts.{match[3]}.weight", []).append(plain.pop(name))
    return {**plain, **{name: np.stack(experts) for name, experts in merged.items()}}


def _metadata(arch: str, config: Mapping[str, Any]) -> dict[str, Any]:
    rope = config.get("rope_scaling", {})
    values = {
        "block_count": config["num_hidden_layers"],
        "context_length": 512,
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "rope.freq_base": float(config.get("rope_theta", 10000.0)),
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.sliding_window": config.get("sliding_window"),
        "attn_logit_softcapping": config.get("attn_logit_softcapping"),
        "final_logit_softcapping": config.get("final_logit_softcapping"),
        "rope.scaling.type": rope.get("rope_type"),
        "rope.scaling.factor": rope.get("factor"),
        "rope.scaling.attn_factor": rope.get("attention_factor"),
        "rope.scaling.original_context_length": config.get("original_max_position_embeddings"),
        "rope.dimension_count": int(config["head_dim"] * config.get("partial_rotary_factor", 1.0)),
        "expert_count": config.get("num_local_experts", config.get("num_experts")),
        "expert_used_count": config.get("num_experts_per_tok"),
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
    }
    return {f"{arch}.{key}": value for key, value in values.items() if value is not None}
