"""The rotary embeddings that a GGUF describes: by numbers, or by the divisors of its frequencies. Imports no torch."""

import struct
from collections.abc import Mapping
from pathlib import Path

from loader import fields
from loader.config import RopeConfig
from loader.errors import CheckpointError
from loader.families import Family
from loader.fields import Fields
from loader.files import open_regular, read_exactly
from loader.gguf_format import GgufFile, GgufTensor
from loader.hf_rope import check_longrope, rope_config

ROPE_FREQS, ROPE_LONG, ROPE_SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
# The one set of numbers that Llama 3.1 to 3.3 were published with, but for the factor.
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def read_rope(file: GgufFile, values: Fields, family: Family, rotary_dim: int) -> RopeConfig:
    """The rotary embedding of a parsed GGUF; `values` are the model's metadata. Raises CheckpointError."""
    theta = shortest(values.number("rope.freq_base", fields.THETA_BOUNDS, family.rope_theta))
    tensors = {tensor.name: tensor for tensor in file.tensors}
    if ROPE_FREQS in tensors:
        parameters = _llama3_parameters(file.path, tensors[ROPE_FREQS], theta, rotary_dim)
        return rope_config(file.path, theta, "llama3", parameters)
    original = "rope.scaling.original_context_length"
    if ROPE_LONG in tensors and ROPE_SHORT in tensors:
        lists = {
            "short_factor": _read_floats(file.path, tensors[ROPE_SHORT], rotary_dim // 2),
            "long_factor": _read_floats(file.path, tensors[ROPE_LONG], rotary_dim // 2),
            "original_max_position_embeddings": values.integer(original, fields.POSITION_BOUNDS),
            "attention_factor": shortest(values.number("rope.scaling.attn_factor", (1e-3, 1e3), 1.0)),
        }
        check_longrope(file.path, lists, rotary_dim)
        return rope_config(file.path, theta, "longrope", lists)
    scaling_type = values.text("rope.scaling.type") or "none"
    if scaling_type == "none":
        return RopeConfig(theta, None, {})
    parameters = {"factor": values.number("rope.scaling.factor", (1e-3, 1e6))}
    if values.has(original):
        parameters["original_max_position_embeddings"] = values.integer(original, fields.POSITION_BOUNDS)
    return rope_config(file.path, theta, scaling_type, parameters)


def read_local_rope(values: Fields, family: Family) -> RopeConfig | None:
    """The rotary embedding of the sliding layers, where the family has another for them."""
    if family.local_rope_theta is None:
        return None
    theta = values.number("rope.freq_base_swa", fields.THETA_BOUNDS, family.local_rope_theta)
    return RopeConfig(shortest(theta), None, {})


def _llama3_parameters(path: Path, freqs: GgufTensor, theta: float, size: int) -> Mapping[str, object]:
    """GGUF keeps the divisors that llama3 scaling gives, not its parameters: find them, and prove them right."""
    stored = _read_floats(path, freqs, size // 2)
    parameters = {"factor": shortest(max(stored)), **_LLAMA3_ROPE}
    plausible = all(0.0 < value < 1e6 for value in stored)
    computed = llama3_divisors(theta, size, parameters) if plausible else []
    if not plausible or any(abs(a - b) > 1e-3 * b for a, b in zip(stored, computed, strict=True)):
        raise CheckpointError(
            "unsupported",
            f"{path}: the numbers in tensor {freqs.name!r} are not those of llama3 scaling",
            "use the safetensors form of this model",
            file=path,
            tensor=freqs.name,
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


def _read_floats(path: Path, tensor: GgufTensor, count: int) -> tuple[float, ...]:
    if tensor.dtype != "F32" or tensor.shape != (count,):
        raise CheckpointError(
            "invalid",
            f"{path}: tensor {tensor.name!r} is {tensor.dtype} {list(tensor.shape)}",
            "convert the model again with a current llama.cpp",
            file=path,
            tensor=tensor.name,
            expected=f"F32 {[count]}",
            found=f"{tensor.dtype} {list(tensor.shape)}",
        )
    with open_regular(path) as (descriptor, _):
        data = read_exactly(descriptor, tensor.num_bytes, tensor.offset)
    if len(data) != tensor.num_bytes:
        raise CheckpointError("invalid", f"{path} became shorter while it was read", "load it again", file=path)
    return struct.unpack(f"<{count}f", data)


def shortest(value: float) -> float:
    """The shortest number with the same float32 value: GGUF stores 1e-5 as 9.999999747378752e-06."""
    for digits in range(1, 10):
        candidate = float(f"{value:.{digits}g}")
        if struct.pack("<f", candidate) == struct.pack("<f", value):
            return candidate
    return value
