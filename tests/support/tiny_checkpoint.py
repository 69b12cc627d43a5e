"""Tiny random checkpoints of Llama and its kin that this project and transformers both load.

Needs neither torch nor a network.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from tests.support.tiny_families import arrange_for_family

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BOS_TOKEN_ID = 1
EOS_TOKEN_ID = 2
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# What config.json says of each family, to be given as `config_overrides`; None removes what Llama alone knows.
TINY_FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "mistral": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": None,
        "attention_bias": None,
        "mlp_bias": None,
    },
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "use_sliding_window": False,
        "sliding_window": 32768,
        "attention_bias": None,
        "mlp_bias": None,
    },
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 32, "mlp_bias": None},
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 24,
        "sliding_window": 6,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "tie_word_embeddings": True,
        "mlp_bias": None,
    },
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 24,
        "sliding_window": 6,
        "sliding_window_pattern": 2,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "tie_word_embeddings": True,
        "mlp_bias": None,
    },
    "phi3": {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 512,
        "attention_bias": None,
        "mlp_bias": None,
        "pad_token_id": 0,
    },
    "olmo2": {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "mlp_bias": None, "pad_token_id": 0},
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "attention_bias": None,
        "mlp_bias": None,
    },
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
        "mlp_bias": None,
    },
}
_NULL_MATTERS = ("sliding_window",)
_SAFETENSORS_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def make_tiny_llama(
    folder: Path,
    *,
    num_layers: int = 2,
    hidden_size: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    intermediate_size: int = 128,
    vocab_size: int = 320,
    max_position_count: int = 512,
    sharded: bool = False,
    seed: int = 0,
    tie: bool = False,
    dtype: str = "float32",
    eos_token_ids: Sequence[int] = (EOS_TOKEN_ID,),
    chat_template: str = CHAT_TEMPLATE,
    config_overrides: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a whole checkpoint into `folder` (made when missing) and returns `folder`.

    The tokenizer is a byte-level BPE of `vocab_size` tokens (at least 259): 3 special tokens, the 256 bytes, and
    merges of letter pairs. Equal arguments give equal bytes. `config_overrides` is laid over config.json, None
    values remove a key, but for `sliding_window`, where null tells of none.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim or hidden_size // heads,
        "max_position_embeddings": max_position_count,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tie,
        "torch_dtype": dtype,
        "bos_token_id": BOS_TOKEN_ID,
        "eos_token_id": eos_token_ids[0] if eos_token_ids else None,
    }
    for key, value in (config_overrides or {}).items():
        if value is None and key not in _NULL_MATTERS:
            config.pop(key, None)
        else:
            config[key] = value
    _write_json(folder / "config.json", config)
    _write_json(
        folder / "generation_config.json", {"bos_token_id": BOS_TOKEN_ID, "eos_token_id": list(eos_token_ids) or None}
    )
    write_tiny_tokenizer(folder, vocab_size, chat_template)
    tensors = tiny_tensors(config, seed=seed, tie=tie or config.get("tie_word_embeddings") is True)
    if sharded:
        _write_shards(folder, tensors, dtype)
    else:
        write_safetensors(folder / "model.safetensors", tensors, dtype=dtype)
    return folder


def tiny_tensors(config: Mapping[str, Any], *, seed: int, tie: bool) -> dict[str, NDArray[np.float32]]:
    """Random weights under Hugging Face names, scaled so that logits are far from ties."""
    rng = np.random.default_rng(seed)
    hidden, inner = int(config["hidden_size"]), int(config["intermediate_size"])
    q_size = int(config["num_attention_heads"]) * int(config["head_dim"])
    kv_size = int(config["num_key_value_heads"]) * int(config["head_dim"])

    def linear(rows: int, columns: int) -> NDArray[np.float32]:
        return (rng.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)

    def norm() -> NDArray[np.float32]:
        return (1.0 + 0.1 * rng.standard_normal(hidden)).astype(np.float32)

    tensors = {"model.embed_tokens.weight": linear(int(config["vocab_size"]), hidden) * np.float32(4.0)}
    for layer in range(int(config["num_hidden_layers"])):
        prefix = f"model.layers.{layer}."
        tensors[prefix + "input_layernorm.weight"] = norm()
        tensors[prefix + "self_attn.q_proj.weight"] = linear(q_size, hidden)
        tensors[prefix + "self_attn.k_proj.weight"] = linear(kv_size, hidden)
        tensors[prefix + "self_attn.v_proj.weight"] = linear(kv_size, hidden)
        tensors[prefix + "self_attn.o_proj.weight"] = linear(hidden, q_size)
        tensors[prefix + "post_attention_layernorm.weight"] = norm()
        tensors[prefix + "mlp.gate_proj.weight"] = linear(inner, hidden)
        tensors[prefix + "mlp.up_proj.weight"] = linear(inner, hidden)
        tensors[prefix + "mlp.down_proj.weight"] = linear(hidden, inner)
    tensors["model.norm.weight"] = norm()
    if not tie:
        tensors["lm_head.weight"] = linear(int(config["vocab_size"]), hidden)
    _add_details(tensors, config, rng)
    arrange_for_family(tensors, config, rng)
    return tensors


def _add_details(tensors: dict[str, NDArray[np.float32]], config: Mapping[str, Any], rng: np.random.Generator) -> None:
    """The biases and norms of the family, drawn last: what all families have does not depend on them."""
    model_type = config.get("model_type")
    biased = []
    if config.get("attention_bias") or model_type == "qwen2":
        biased += ["q", "k", "v"]
    if config.get("attention_bias"):
        biased += ["o"]
    if config.get("mlp_bias"):
        biased += ["gate", "up", "down"]
    for name in list(tensors):
        if any(f".{part}_proj." in name for part in biased):
            bias = rng.standard_normal(tensors[name].shape[0]).astype(np.float32)
            tensors[name.replace("weight", "bias")] = bias
    if model_type in ("qwen3", "qwen3_moe"):
        for layer in range(int(config["num_hidden_layers"])):
            for part in ("q", "k"):
                norm = 1.0 + 0.3 * rng.standard_normal(int(config["head_dim"]))
                tensors[f"model.layers.{layer}.self_attn.{part}_norm.weight"] = norm.astype(np.float32)


def write_safetensors(path: Path, tensors: Mapping[str, NDArray[np.float32]], *, dtype: str = "float32") -> None:
    """Writes `tensors`, converted to `dtype`, as one safetensors file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = bytearray()
    for name, tensor in tensors.items():
        raw = _encode(tensor, dtype)
        header[name] = {
            "dtype": _SAFETENSORS_DTYPES[dtype],
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(data))


def write_tiny_tokenizer(folder: Path, vocab_size: int = 320, chat_template: str = CHAT_TEMPLATE) -> None:
    """Writes tokenizer.json and tokenizer_config.json of a byte-level BPE with exactly `vocab_size` tokens."""
    tiny_tokenizer(vocab_size).save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": SPECIAL_TOKENS[BOS_TOKEN_ID],
            "eos_token": SPECIAL_TOKENS[EOS_TOKEN_ID],
            "unk_token": SPECIAL_TOKENS[0],
            "clean_up_tokenization_spaces": False,
            "model_max_length": 512,
            "chat_template": chat_template,
        },
    )


def tiny_tokenizer(vocab_size: int = 320) -> Tokenizer:
    """Byte-level BPE: special tokens first, then the 256 bytes, merges of letter pairs, and reserved fillers."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    base = [*SPECIAL_TOKENS, *alphabet]
    if vocab_size < len(base):
        raise ValueError(f"vocab_size {vocab_size} is below {len(base)}")
    letters = "etaoinshrdlcumwfgypbvkxjqz"
    pairs = [("Ġ", letter) for letter in letters] + [(a, b) for a in letters for b in letters]
    pairs = pairs[: vocab_size - len(base)]
    tokens = base + [a + b for a, b in pairs]
    tokens += [f"<|reserved_{number}|>" for number in range(vocab_size - len(tokens))]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def _write_shards(folder: Path, tensors: Mapping[str, NDArray[np.float32]], dtype: str) -> None:
    names = list(tensors)
    half = len(names) // 2
    parts = {
        "model-00001-of-00002.safetensors": names[:half],
        "model-00002-of-00002.safetensors": names[half:],
    }
    for file_name, part in parts.items():
        write_safetensors(folder / file_name, {name: tensors[name] for name in part}, dtype=dtype)
    total_size = sum(len(_encode(tensor, dtype)) for tensor in tensors.values())
    weight_map = {name: file_name for file_name, part in parts.items() for name in part}
    _write_json(
        folder / "model.safetensors.index.json", {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    )


def _encode(tensor: NDArray[np.float32], dtype: str) -> bytes:
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(tensor, dtype=np.float32).view(np.uint32)
        rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        return (rounded >> np.uint32(16)).astype(np.uint16).tobytes()
    return tensor.astype(dtype).tobytes()


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
