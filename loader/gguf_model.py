"""What a GGUF says of its model, in Hugging Face terms. Imports no torch."""

import re
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

from loader import fields
from loader.config import ModelConfig, RopeConfig
from loader.errors import CheckpointError
from loader.families import FAMILIES
from loader.fields import Fields
from loader.files import open_regular, read_exactly
from loader.gguf_format import GgufFile, GgufTensor
from loader.hf_config import check_heads, head_dim, unsupported_architecture
from loader.hf_rope import rope_config
from loader.tensors import TensorInfo

# GGUF calls Mistral a llama, and tells neither from the other.
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
SUPPORTED_GGUF_ARCHITECTURES = tuple(_ARCHITECTURES)
# Rotary pairs lie side by side in these; in the others, as in Hugging Face's form, half a head apart.
_PAIRWISE_ROTARY = ("llama",)
_ROPE_FREQS = "rope_freqs.weight"
_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK = re.compile(r"blk\.(\d{1,5})\.(\w+)\.(weight|bias)")
_UNQUANTISED = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# Turn-ending tokens which GGUF files often hold without naming them as such.
_TURN_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>")
_CONTROL_TOKEN = 3
# The one set of numbers that Llama 3.1 to 3.3 were published with, but for the factor.
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def gguf_config(file: GgufFile) -> ModelConfig:
    """The config of a parsed GGUF. Raises CheckpointError like `read_hf_config`."""
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in _ARCHITECTURES:
        raise unsupported_architecture(file.path, str(architecture)[:100], SUPPORTED_GGUF_ARCHITECTURES)
    family = FAMILIES[_ARCHITECTURES[architecture]]
    prefix = f"{architecture}."
    model = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    values = Fields(file.path, model, "convert the model again with a current llama.cpp")
    _refuse_unsupported(file, values)
    hidden_size = values.integer("embedding_length", fields.HIDDEN_BOUNDS)
    num_heads = values.integer("attention.head_count", fields.HEAD_BOUNDS)
    num_kv_heads = values.integer("attention.head_count_kv", fields.HEAD_BOUNDS, num_heads)
    size = _head_dim(values, hidden_size, num_heads)
    vocab_size = _vocab_size(file, values)
    names = {tensor.name for tensor in file.tensors}
    tokens = Fields(file.path, file.metadata)
    bos = tokens.token_ids("tokenizer.ggml.bos_token_id", vocab_size)
    return ModelConfig(
        architecture=_ARCHITECTURES[architecture],
        family=family.name,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=values.integer("block_count", fields.LAYER_BOUNDS),
        num_heads=num_heads,
        num_kv_heads=check_heads(values, num_heads, num_kv_heads),
        head_dim=size,
        intermediate_size=values.integer("feed_forward_length", fields.INTERMEDIATE_BOUNDS),
        max_position_count=values.integer("context_length", fields.POSITION_BOUNDS),
        rms_norm_eps=_shortest(values.number("attention.layer_norm_rms_epsilon", fields.EPSILON_BOUNDS)),
        rope=_rope(file, values, size),
        tie_word_embeddings="output.weight" not in names,
        qkv_bias="blk.0.attn_q.bias" in names if family.qkv_bias is None else family.qkv_bias,
        output_bias="blk.0.attn_output.bias" in names if family.output_bias is None else family.output_bias,
        mlp_bias="blk.0.ffn_gate.bias" in names if family.mlp_bias is None else family.mlp_bias,
        hidden_act="silu",
        dtype=_dtype(file),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=_eos_token_ids(tokens, vocab_size),
        qk_norm=family.qk_norm,
    )


def gguf_tensors(file: GgufFile, config: ModelConfig) -> dict[str, TensorInfo]:
    """The tensors of a parsed GGUF under Hugging Face names; those we cannot name keep their own."""
    pairwise = file.metadata.get("general.architecture") in _PAIRWISE_ROTARY
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads} if pairwise else {}
    tensors: dict[str, TensorInfo] = {}
    for stored in file.tensors:
        if stored.name == _ROPE_FREQS:
            continue
        if len(stored.shape) < 2 and stored.dtype not in _UNQUANTISED:
            raise quantised_vector(file.path, stored.name, stored.dtype)
        name, rotary_heads = _GLOBAL_NAMES.get(stored.name, stored.name), None
        block = _BLOCK.fullmatch(stored.name)
        if block is not None and block[2] in _BLOCK_NAMES:
            name = f"model.layers.{int(block[1])}.{_BLOCK_NAMES[block[2]]}.{block[3]}"
            rotary_heads = heads.get(block[2])
        tensors[name] = TensorInfo(
            name, stored.dtype, stored.shape, file.path, stored.offset, stored.num_bytes, stored.name, rotary_heads
        )
    return tensors


def quantised_vector(file: Path, name: str, dtype: str) -> CheckpointError:
    """The error for a tensor of one dimension in a type of blocks, which no converter writes."""
    return CheckpointError(
        "unsupported",
        f"{file}: tensor {name!r} is a quantised vector ({dtype})",
        "convert the model again with a current llama.cpp",
        file=file,
        tensor=name,
        expected=", ".join(_UNQUANTISED),
        found=dtype,
    )


def _refuse_unsupported(file: GgufFile, values: Fields) -> None:
    parts = file.metadata.get("split.count", 1)
    if isinstance(parts, int) and parts > 1:
        raise CheckpointError(
            "unsupported",
            f"{file.path} is one of {parts} parts of a GGUF",
            "join them with `llama-gguf-split --merge FIRST-PART OUTPUT.gguf`",
            file=file.path,
            expected="one file",
            found=f"{parts} parts",
        )
    if values.integer("expert_count", (0, 1 << 16), 0) > 0:
        name = file.metadata["general.architecture"]
        raise unsupported_architecture(file.path, f"{name} with experts", (f"{name} without experts",))


def _head_dim(values: Fields, hidden_size: int, num_heads: int) -> int:
    size = head_dim(values, "attention.key_length", hidden_size, num_heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        other = values.integer(name, fields.HEAD_DIM_BOUNDS, size)
        if other != size:
            raise CheckpointError(
                "unsupported",
                f"{values.file}: {name} {other} differs from the head size {size}",
                "use a model whose heads have one size and are rotated whole",
                file=values.file,
                expected=str(size),
                found=str(other),
            )
    return size


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


def _rope(file: GgufFile, values: Fields, size: int) -> RopeConfig:
    theta = _shortest(values.number("rope.freq_base", fields.THETA_BOUNDS, 10000.0))
    freqs = next((tensor for tensor in file.tensors if tensor.name == _ROPE_FREQS), None)
    if freqs is not None:
        return rope_config(file.path, theta, "llama3", _llama3_parameters(file.path, freqs, theta, size))
    scaling_type = values.text("rope.scaling.type") or "none"
    if scaling_type == "none":
        return RopeConfig(theta, None, {})
    parameters: dict[str, object] = {"factor": values.number("rope.scaling.factor", (1e-3, 1e6))}
    if values.has("rope.scaling.original_context_length"):
        name = "rope.scaling.original_context_length"
        parameters["original_max_position_embeddings"] = values.integer(name, fields.POSITION_BOUNDS)
    return rope_config(file.path, theta, scaling_type, parameters)


def _llama3_parameters(path: Path, freqs: GgufTensor, theta: float, size: int) -> Mapping[str, object]:
    """GGUF keeps the divisors that llama3 scaling gives, not its parameters: find them, and prove them right."""
    if freqs.dtype != "F32" or freqs.shape != (size // 2,):
        raise CheckpointError(
            "invalid",
            f"{path}: tensor {_ROPE_FREQS!r} is {freqs.dtype} {list(freqs.shape)}",
            "convert the model again with a current llama.cpp",
            file=path,
            tensor=_ROPE_FREQS,
            expected=f"F32 {[size // 2]}",
            found=f"{freqs.dtype} {list(freqs.shape)}",
        )
    stored = struct.unpack(f"<{size // 2}f", _read_tensor(path, freqs))
    parameters = {"factor": _shortest(max(stored)), **_LLAMA3_ROPE}
    plausible = all(0.0 < value < 1e6 for value in stored)
    computed = llama3_divisors(theta, size, parameters) if plausible else []
    if not plausible or any(abs(a - b) > 1e-3 * b for a, b in zip(stored, computed, strict=True)):
        raise CheckpointError(
            "unsupported",
            f"{path}: the numbers in tensor {_ROPE_FREQS!r} are not those of llama3 scaling",
            "use the safetensors form of this model",
            file=path,
            tensor=_ROPE_FREQS,
        )
    return parameters


def llama3_divisors(theta: float, size: int, parameters: Mapping[str, float]) -> list[float]:
    """By what llama3 scaling divides each of the size / 2 rotary frequencies."""
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    factor, original = parameters["factor"], parameters["original_max_position_embeddings"]
    result = []
    for pair in range(size // 2):
        wavelength = 2 * 3.141592653589793 * theta ** (2 * pair / size)
        smooth = min(max((original / wavelength - low) / (high - low), 0.0), 1.0)
        result.append(1.0 / ((1.0 - smooth) / factor + smooth))
    return result


def _read_tensor(path: Path, tensor: GgufTensor) -> bytes:
    with open_regular(path) as (descriptor, _):
        data = read_exactly(descriptor, tensor.num_bytes, tensor.offset)
    if len(data) != tensor.num_bytes:
        raise CheckpointError("invalid", f"{path} became shorter while it was read", "load it again", file=path)
    return data


def _dtype(file: GgufFile) -> str:
    weights = {tensor.dtype for tensor in file.tensors if len(tensor.shape) > 1}
    return _UNQUANTISED[weights.pop()] if len(weights) == 1 and weights <= _UNQUANTISED.keys() else "bfloat16"


def _shortest(value: float) -> float:
    """The shortest number with the same float32 value: GGUF stores 1e-5 as 9.999999747378752e-06."""
    for digits in range(1, 10):
        candidate = float(f"{value:.{digits}g}")
        if struct.pack("<f", candidate) == struct.pack("<f", value):
            return candidate
    return value
