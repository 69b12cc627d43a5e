"""Rotary position embedding: frequencies of every supported kind, and their table of cosines and sines."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from loader.config import ModelConfig, RopeConfig
from loader.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class RopeShape:
    """What the frequencies depend on. `rotary_dim` values of a head are rotated; `trained_length` is the context the
    checkpoint was made for; `served_length` the longest context that will be used."""

    rope: RopeConfig
    rotary_dim: int
    trained_length: int
    served_length: int


def rope_shape(config: ModelConfig, rope: RopeConfig, served_length: int) -> RopeShape:
    """The shape of one of a model's rotary embeddings, for contexts of up to `served_length` tokens."""
    return RopeShape(rope, config.rotary_dim or config.head_dim, config.max_position_count, served_length)


def rope_frequencies(shape: RopeShape) -> tuple[torch.Tensor, float]:
    """Inverse frequencies [rotary_dim / 2] in float32, and the factor on cosines and sines.

    Raises CheckpointError for a kind that is not supported, or a parameter that is missing or senseless.
    """
    kind = shape.rope.scaling_type or "default"
    compute = _KINDS.get(kind)
    if compute is None:
        raise CheckpointError(
            "unsupported",
            f"rope scaling {kind!r} is not supported",
            f"use a checkpoint with one of: {', '.join(_KINDS)}",
            expected=", ".join(_KINDS),
            found=kind,
        )
    return compute(shape)


class RotaryEmbedding:
    """Cosines and sines of all positions, computed once for the context that is served."""

    def __init__(self, shape: RopeShape, *, dtype: torch.dtype, device: torch.device) -> None:
        """Builds tables [served_length, 1, rotary_dim]. Raises CheckpointError as `rope_frequencies` does."""
        frequencies, factor = rope_frequencies(shape)
        angles = torch.arange(shape.served_length, dtype=torch.float32)[:, None] * frequencies
        cos, sin = angles.cos() * factor, angles.sin() * factor
        self._cos = torch.cat((cos, cos), -1)[:, None].to(device, dtype)
        # Rotating a half by minus the sine spares negating it in every layer.
        self._sin = torch.cat((-sin, sin), -1)[:, None].to(device, dtype)

    def select(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and signed sines, each [num_tokens, 1, rotary_dim], of positions [num_tokens]."""
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)


def apply_rope(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the first values of heads [num_tokens, num_heads, head_dim] by what `RotaryEmbedding.select` gave."""
    rotary_dim = cos.shape[-1]
    if rotary_dim < heads.shape[-1]:
        return torch.cat((apply_rope(heads[..., :rotary_dim], cos, sin), heads[..., rotary_dim:]), -1)
    half = rotary_dim // 2
    swapped = torch.cat((heads[..., half:], heads[..., :half]), -1)
    return torch.addcmul(heads * cos, swapped, sin)


def _default(shape: RopeShape, theta: float | None = None) -> tuple[torch.Tensor, float]:
    dim = shape.rotary_dim
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    return 1.0 / ((theta or shape.rope.theta) ** exponents), 1.0


def _linear(shape: RopeShape) -> tuple[torch.Tensor, float]:
    frequencies, factor = _default(shape)
    return frequencies / _factor(shape), factor


def _dynamic(shape: RopeShape) -> tuple[torch.Tensor, float]:
    # The base grows with the longest context served, not with each sequence's length: else the keys
    # of one position would differ between sequences, and between prefill and recomputation, and
    # blocks could not be shared. Up to the trained length all of these agree.
    factor, dim = _factor(shape), shape.rotary_dim
    stretch = max(shape.served_length, shape.trained_length) / shape.trained_length
    return _default(shape, shape.rope.theta * (factor * stretch - (factor - 1)) ** (dim / (dim - 2)))


def _llama3(shape: RopeShape) -> tuple[torch.Tensor, float]:
    frequencies, _ = _default(shape)
    parameters, factor = shape.rope.parameters, _factor(shape)
    low, high = _number(parameters, "low_freq_factor"), _number(parameters, "high_freq_factor")
    if not 0 < low < high:
        raise CheckpointError(
            "invalid", f"high_freq_factor {high} is not above low_freq_factor {low} > 0", "correct config.json"
        )
    original = _number(parameters, "original_max_position_embeddings", shape.trained_length)
    wavelengths = 2 * math.pi / frequencies
    blend = (original / wavelengths - low) / (high - low)
    blended = (1 - blend) * frequencies / factor + blend * frequencies
    scaled = torch.where(wavelengths > original / low, frequencies / factor, blended)
    return torch.where(wavelengths < original / high, frequencies, scaled), 1.0


def _yarn(shape: RopeShape) -> tuple[torch.Tensor, float]:
    parameters, dim, theta = shape.rope.parameters, shape.rotary_dim, shape.rope.theta
    original = _number(parameters, "original_max_position_embeddings", shape.trained_length)
    factor = _factor(shape, shape.trained_length / original)
    fast = _number(parameters, "beta_fast", 32.0) or 32.0
    slow = _number(parameters, "beta_slow", 1.0) or 1.0

    def turning_dim(num_turns: float) -> float:
        return dim * math.log(original / (num_turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = turning_dim(fast), turning_dim(slow)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / ((high - low) or 0.001)).clamp(0, 1)
    frequencies, _ = _default(shape)
    return frequencies / factor * ramp + frequencies * (1 - ramp), _yarn_attention(parameters, factor)


def _yarn_attention(parameters: Mapping[str, object], factor: float) -> float:
    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if parameters.get("attention_factor") is not None:
        return _number(parameters, "attention_factor")
    scale, scale_all = _number(parameters, "mscale", 0.0), _number(parameters, "mscale_all_dim", 0.0)
    return magnitude(scale) / magnitude(scale_all) if scale and scale_all else magnitude(1.0)


def _longrope(shape: RopeShape) -> tuple[torch.Tensor, float]:
    # One list for all contexts, by the longest one served and not by each sequence's length: else the keys of one
    # position would differ between sequences, as for "dynamic". Where no more is served than was trained at first,
    # all of these agree.
    parameters = shape.rope.parameters
    original = _number(parameters, "original_max_position_embeddings", shape.trained_length)
    divisors = _numbers(parameters, "long_factor" if shape.served_length > original else "short_factor")
    frequencies, _ = _default(shape)
    if len(divisors) != len(frequencies):
        raise CheckpointError(
            "invalid", f"longrope has {len(divisors)} divisors for {len(frequencies)} pairs", "correct config.json"
        )
    frequencies = frequencies / torch.tensor(divisors, dtype=torch.float32)
    if parameters.get("attention_factor") is not None:
        return frequencies, _number(parameters, "attention_factor")
    factor = _number(parameters, "factor", shape.trained_length / original)
    return frequencies, math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


_KINDS: Mapping[str, Callable[[RopeShape], tuple[torch.Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}


def _factor(shape: RopeShape, default: float | None = None) -> float:
    factor = _number(shape.rope.parameters, "factor", default)
    if factor < 1.0:
        raise CheckpointError("invalid", f"rope scaling factor {factor} is below 1", "correct config.json")
    return factor


def _numbers(parameters: Mapping[str, object], name: str) -> list[float]:
    values = parameters.get(name)
    if not isinstance(values, list | tuple):
        raise CheckpointError("invalid", f"rope parameter {name!r} is no list of numbers", "correct config.json")
    return [_number({name: value}, name) for value in values]


def _number(parameters: Mapping[str, object], name: str, default: float | None = None) -> float:
    value = parameters.get(name)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise CheckpointError(
            "invalid", f"rope parameter {name!r} is {value!r}, not a number", "correct config.json", found=repr(value)
        )
    return float(value)
