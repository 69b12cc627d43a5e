"""The tensors of a GGUF under Hugging Face names, as the `gguf` package's tables pair them. Imports no torch."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from loader.config import ModelConfig, Norms
from loader.errors import CheckpointError
from loader.families import FAMILIES
from loader.gguf_format import GgufFile
from loader.gguf_rope import ROPE_FREQS, ROPE_LONG, ROPE_SHORT
from loader.stored_names import split_fused
from loader.tensors import TensorInfo

UNQUANTISED = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# Rotary pairs lie side by side in these; in the others, as in Hugging Face's form, half a head apart.
_PAIRWISE_ROTARY = ("llama",)
_READ_AS_CONFIG = (ROPE_FREQS, ROPE_LONG, ROPE_SHORT)
_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_FUSED_NAMES = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_NORM_NAMES: Mapping[Norms, Mapping[str, str]] = {
    "before": {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"},
    "after": {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"},
    "around": {
        "attn_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}
_BLOCK = re.compile(r"blk\.(\d{1,5})\.(\w+)\.(weight|bias)")
# All experts of a layer in one tensor; and, before 2024, each in one of its own.
_EXPERTS = re.compile(r"blk\.(\d{1,5})\.ffn_(gate|up|down)_exps\.weight")
_EXPERT = re.compile(r"blk\.(\d{1,5})\.ffn_(gate|up|down)\.(\d{1,5})\.weight")


def gguf_tensors(file: GgufFile, config: ModelConfig) -> dict[str, TensorInfo]:
    """The tensors of a parsed GGUF under Hugging Face names; those we cannot name keep their own."""
    family = FAMILIES[config.architecture]
    names = {**_BLOCK_NAMES, **_NORM_NAMES[config.norms], **(_FUSED_NAMES if family.fused else {})}
    pairwise = file.metadata.get("general.architecture") in _PAIRWISE_ROTARY
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads} if pairwise else {}
    tensors: dict[str, TensorInfo] = {}
    for tensor in file.tensors:
        if tensor.name in _READ_AS_CONFIG:
            continue
        if len(tensor.shape) < 2 and tensor.dtype not in UNQUANTISED:
            raise quantised_vector(file.path, tensor.name, tensor.dtype)
        name, rotary_heads = _GLOBAL_NAMES.get(tensor.name, tensor.name), None
        block = _BLOCK.fullmatch(tensor.name)
        if block is not None and block[2] in names:
            name = f"model.layers.{int(block[1])}.{names[block[2]]}.{block[3]}"
            rotary_heads = heads.get(block[2])
        stored = TensorInfo(
            name, tensor.dtype, tensor.shape, file.path, tensor.offset, tensor.num_bytes, tensor.name, rotary_heads
        )
        parts = split_fused(config, stored) if family.fused else _experts(config, stored)
        tensors.update((part.name, part) for part in parts)
    return tensors


def _experts(config: ModelConfig, stored: TensorInfo) -> Iterator[TensorInfo]:
    """The experts in a tensor that holds all of a layer's; any other tensor as it is, under an expert's name if it is
    one's."""
    joined, single = _EXPERTS.fullmatch(stored.name), _EXPERT.fullmatch(stored.name)
    if single is not None:
        name = f"model.layers.{int(single[1])}.mlp.experts.{int(single[3])}.{single[2]}_proj.weight"
        yield replace(stored, name=name)
        return
    count = config.experts.num_experts if config.experts is not None else 0
    if joined is None or len(stored.shape) != 3 or stored.shape[0] != count:
        yield stored
        return
    num_bytes = stored.num_bytes // count
    for number in range(count):
        yield replace(
            stored,
            name=f"model.layers.{int(joined[1])}.mlp.experts.{number}.{joined[2]}_proj.weight",
            shape=stored.shape[1:],
            offset=stored.offset + number * num_bytes,
            num_bytes=num_bytes,
        )


def quantised_vector(file: Path, name: str, dtype: str) -> CheckpointError:
    """The error for a tensor of one dimension in a type of blocks, which no converter writes."""
    return CheckpointError(
        "unsupported",
        f"{file}: tensor {name!r} is a quantised vector ({dtype})",
        "convert the model again with a current llama.cpp",
        file=file,
        tensor=name,
        expected=", ".join(UNQUANTISED),
        found=dtype,
    )
