"""The rotary embeddings that config.json describes. Imports no torch."""

import math
from collections.abc import Mapping
from pathlib import Path

from loader import fields
from loader.config import RopeConfig
from loader.errors import CheckpointError
from loader.families import Family
from loader.fields import Fields

ROPE_SCALING_TYPES = ("linear", "dynamic", "yarn", "llama3", "longrope")
_LAYER_KINDS = frozenset(("full_attention", "sliding_attention"))
# What older files of the families that have longrope alone call it.
_OLD_LONGROPE = ("su", "yarn")
_NO_NUMBERS = ("rope_type", "type", "rope_theta", "partial_rotary_factor")


def read_ropes(values: Fields, family: Family, rotary_dim: int) -> tuple[RopeConfig, RopeConfig | None]:
    """The rotary embedding of a model, and that of its sliding layers where the family has another for them.

    Old files have rope_theta and rope_scaling, those of transformers 5 one rope_parameters, which some families
    divide by kinds of layers. Raises CheckpointError.
    """
    name = "rope_parameters" if values.has("rope_parameters") else "rope_scaling"
    raw = values.values.get(name)
    if family.local_rope_theta is None:
        return _read_rope(values, name, raw, family, rotary_dim), None
    kinds = raw if isinstance(raw, dict) and raw and raw.keys() <= _LAYER_KINDS else {"full_attention": raw}
    local_theta = values.number("rope_local_base_freq", fields.THETA_BOUNDS, family.local_rope_theta)
    local = Fields(values.file, {"rope_theta": local_theta})
    return (
        _read_rope(values, name, kinds.get("full_attention"), family, rotary_dim),
        _read_rope(local, name, kinds.get("sliding_attention"), family, rotary_dim),
    )


def read_rotary_dim(values: Fields, family: Family, head_dim: int) -> int:
    """How many of a head's values are rotated. Raises CheckpointError for a part, unless the family knows parts."""
    raw = values.values.get("rope_parameters" if values.has("rope_parameters") else "rope_scaling")
    inner = Fields(values.file, raw if isinstance(raw, dict) else {})
    holder = inner if inner.has("partial_rotary_factor") else values
    factor = holder.number("partial_rotary_factor", (0.0, 1.0), 1.0)
    if factor == 1.0:
        return head_dim
    size = int(head_dim * factor)
    if family.partial_rotary and size >= 2 and size % 2 == 0:
        return size
    raise CheckpointError(
        "unsupported",
        f"{values.file}: partial_rotary_factor {factor} is not supported for {family.name} with heads of {head_dim}",
        "use a model that rotates whole heads",
        file=values.file,
        expected="1.0",
        found=str(factor),
    )


def rope_config(file: Path, theta: float, scaling_type: str, parameters: Mapping[str, object]) -> RopeConfig:
    """A checked scaled rotary embedding; `parameters` under the names config.json uses."""
    if scaling_type not in ROPE_SCALING_TYPES:
        raise CheckpointError(
            "unsupported",
            f"{file}: rotary scaling {scaling_type[:100]!r} is not supported",
            f"use a model with one of {', '.join(ROPE_SCALING_TYPES)}",
            file=file,
            expected=", ".join(ROPE_SCALING_TYPES),
            found=scaling_type[:100],
        )
    numbers = Fields(file, parameters)
    # longrope derives its factor from the two lengths where the file has none.
    numbers.number("factor", (1e-3, 1e6), 1.0 if scaling_type == "longrope" else None)
    numbers.integer("original_max_position_embeddings", fields.POSITION_BOUNDS, 1)
    if scaling_type == "llama3":
        numbers.integer("original_max_position_embeddings", fields.POSITION_BOUNDS)
        low = numbers.number("low_freq_factor", (1e-3, 1e6))
        high = numbers.number("high_freq_factor", (1e-3, 1e6))
        if high <= low:
            raise numbers.error("high_freq_factor", f"is {high:g}", f"more than low_freq_factor {low:g}", f"{high:g}")
    kept = {key: value for key, value in parameters.items() if value is not None}
    lists = {key: tuple(value) for key, value in kept.items() if isinstance(value, list)}
    return RopeConfig(theta, scaling_type, {**kept, **lists})


def check_longrope(file: Path, parameters: Mapping[str, object], rotary_dim: int) -> None:
    """Raises CheckpointError unless both lists of longrope hold a divisor for each rotary pair."""
    numbers = Fields(file, parameters)
    numbers.integer("original_max_position_embeddings", (2, fields.POSITION_BOUNDS[1]))
    for name in ("short_factor", "long_factor"):
        factors = parameters.get(name)
        if not isinstance(factors, list | tuple) or len(factors) != rotary_dim // 2 or not all(map(_divides, factors)):
            expected = f"{rotary_dim // 2} numbers above 0"
            raise numbers.error(name, "does not hold a divisor for each rotary pair", expected, repr(factors))


def _divides(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _read_rope(values: Fields, name: str, raw: object, family: Family, rotary_dim: int) -> RopeConfig:
    if raw is None:
        return RopeConfig(values.number("rope_theta", fields.THETA_BOUNDS, family.rope_theta), None, {})
    if not isinstance(raw, dict) or any(isinstance(value, dict) for value in raw.values()):
        raise CheckpointError(
            "unsupported",
            f"{values.file}: {name} is not one set of numbers",
            "use a model with one rotary embedding for all layers",
            file=values.file,
            expected="numbers by name",
        )
    inner = Fields(values.file, raw)
    theta = inner if inner.has("rope_theta") else values
    scaling_type = inner.text("rope_type") or inner.text("type") or "default"
    numbers = {key: value for key, value in raw.items() if key not in _NO_NUMBERS}
    base = theta.number("rope_theta", fields.THETA_BOUNDS, family.rope_theta)
    if scaling_type in ("default", "none"):
        return RopeConfig(base, None, {})
    if family.original_max_position_count is not None and scaling_type in _OLD_LONGROPE:
        scaling_type = "longrope"
    original = values.values.get("original_max_position_embeddings", family.original_max_position_count)
    if original is not None:
        numbers = {"original_max_position_embeddings": original, **numbers}
    if scaling_type == "longrope":
        check_longrope(values.file, numbers, rotary_dim)
    return rope_config(values.file, base, scaling_type, numbers)
