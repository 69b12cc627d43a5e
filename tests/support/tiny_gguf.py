"""Tiny GGUF files, written by the `gguf` package so that our reader is not tested against itself."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from tests.support.gguf_blocks import random_blocks
from tests.support.tiny_checkpoint import CHAT_TEMPLATE, SPECIAL_TOKENS, tiny_tensors, tiny_tokenizer

TINY_CONFIG = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
    "input_layernorm": "attn_norm",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def make_tiny_gguf(
    path: Path,
    *,
    quantisation: str = "F32",
    types: Mapping[str, str] | None = None,
    sizes: Mapping[str, int] | None = None,
    tie: bool = False,
    seed: int = 0,
    architecture: str = "llama",
    metadata: Mapping[str, Any] | None = None,
    extra_tensors: Mapping[str, NDArray[np.float32]] | None = None,
    without: Sequence[str] = (),
    split_max_tensors: int = 0,
) -> Path:
    """Writes one GGUF and returns its path; with `split_max_tensors`, parts of at most as many tensors beside it.

    `metadata` is laid over the defaults, keys as in the file, None removes one; `without` names GGUF tensors to
    leave out. Matrices are stored as `quantisation`, or as what `types` says of a part of their names, vectors as F32.
    In the types K values are random: nothing here quantises to them. `sizes` are laid over TINY_CONFIG.
    """
    known = {**TINY_CONFIG, **(sizes or {})}
    config = {**known, "model_type": architecture}
    tensors = tiny_tensors(config, seed=seed, tie=tie)
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=split_max_tensors)
    tokenizer = _tokenizer_metadata(known["vocab_size"])
    values = {**_model_metadata(known, architecture), **tokenizer, **(metadata or {})}
    for key, value in values.items():
        add_metadata(writer, key, value)
    for name, tensor in tensors.items():
        stored = gguf_name(name)
        if stored not in without:
            ordered = to_gguf_order(name, tensor, known) if architecture == "llama" else tensor
            special = [kind for part, kind in (types or {}).items() if part in stored]
            _add_tensor(writer, stored, ordered, special[0] if special else quantisation)
    for stored, tensor in (extra_tensors or {}).items():
        writer.add_tensor(stored, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str) -> str:
    """The GGUF name of a tensor with a Hugging Face name."""
    name = name.replace("model.layers.", "blk.")
    for ours, theirs in _NAMES.items():
        name = name.replace(ours, theirs)
    return name


def to_gguf_order(name: str, tensor: NDArray[np.float32], config: Mapping[str, int]) -> NDArray[np.float32]:
    """A tensor of a llama as GGUF stores it: the two halves of each head's rotary rows alternately."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for part, count in heads.items():
        if part in name:
            halves = tensor.reshape(count, 2, tensor.shape[0] // count // 2, *tensor.shape[1:])
            return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(tensor.shape))
    return tensor


def _add_tensor(writer: gguf.GGUFWriter, name: str, tensor: NDArray[np.float32], quantisation: str) -> None:
    kind = gguf.GGMLQuantizationType[quantisation]
    if tensor.ndim == 1 or quantisation == "F32":
        writer.add_tensor(name, tensor)
        return
    quantised = _random(name, tensor, quantisation) if "_K" in quantisation else gguf.quants.quantize(tensor, kind)
    writer.add_tensor(name, quantised, raw_dtype=kind)


def _random(name: str, tensor: NDArray[np.float32], quantisation: str) -> NDArray[np.uint8]:
    """Blocks for a tensor of this shape, of values about as large."""
    count, seed = tensor.size // 256, sum(name.encode())
    drawn = gguf.quants.dequantize(random_blocks(quantisation, count), gguf.GGMLQuantizationType[quantisation])
    size = float(tensor.std() / drawn.std())
    return random_blocks(quantisation, count, seed=seed, size=size).reshape(tensor.shape[0], -1)


def _model_metadata(config: Mapping[str, int], architecture: str) -> dict[str, Any]:
    return {
        f"{architecture}.block_count": config["num_hidden_layers"],
        f"{architecture}.context_length": 512,
        f"{architecture}.embedding_length": config["hidden_size"],
        f"{architecture}.feed_forward_length": config["intermediate_size"],
        f"{architecture}.attention.head_count": config["num_attention_heads"],
        f"{architecture}.attention.head_count_kv": config["num_key_value_heads"],
        f"{architecture}.rope.freq_base": 10000.0,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{architecture}.rope.dimension_count": config["head_dim"],
    }


def _tokenizer_metadata(vocab_size: int) -> dict[str, Any]:
    tokenizer = tiny_tokenizer(vocab_size)
    tokens = [tokenizer.id_to_token(number) for number in range(vocab_size)]
    ordinary = [token for token in tokens[len(SPECIAL_TOKENS) :] if len(token) == 2]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIAL_TOKENS else 1 for token in tokens],
        "tokenizer.ggml.merges": [f"{token[0]} {token[1]}" for token in ordinary],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def add_metadata(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Adds one key with a value of whatever type it is."""
    if value is None or key == "general.architecture":
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
