"""config.json and generation_config.json -> ModelConfig. Imports no torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loader import fields
from loader.config import ModelConfig, RopeConfig
from loader.errors import CheckpointError
from loader.families import FAMILIES, Family
from loader.fields import Fields
from loader.files import read_json_object

SUPPORTED_ARCHITECTURES = tuple(FAMILIES)
ROPE_SCALING_TYPES = ("linear", "dynamic", "yarn", "llama3", "longrope")
DTYPES = ("float32", "float16", "bfloat16")
_LAYER_KINDS = ("full_attention", "sliding_attention")
_ACTIVATIONS = {"swish": "silu"}


def read_hf_config(folder: Path, stored_dtype: str) -> ModelConfig:
    """The config of the checkpoint in `folder`.

    `stored_dtype` is what its tensors are stored in, used where config.json does not say. Raises CheckpointError:
    "unsupported" for an architecture, a quantisation or a rotary embedding we do not have, "invalid" for values
    that are missing, of the wrong type, out of bounds or at odds with each other.
    """
    path = folder / "config.json"
    content = read_json_object(path)
    values = Fields(path, content)
    architecture = _architecture(path, content)
    family = FAMILIES[architecture]
    _refuse_unsupported(values)
    hidden_size = values.integer("hidden_size", fields.HIDDEN_BOUNDS)
    num_heads = values.integer("num_attention_heads", fields.HEAD_BOUNDS)
    vocab_size = values.integer("vocab_size", fields.VOCAB_BOUNDS)
    num_layers = values.integer("num_hidden_layers", fields.LAYER_BOUNDS)
    sliding_layers = _sliding_layers(values, family, num_layers)
    generation = _generation_fields(folder, values)
    bos = generation.token_ids("bos_token_id", vocab_size) or values.token_ids("bos_token_id", vocab_size)
    eos = generation.token_ids("eos_token_id", vocab_size) or values.token_ids("eos_token_id", vocab_size)
    return ModelConfig(
        architecture=architecture,
        family=family.name,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=check_heads(values, num_heads, _num_kv_heads(values, family, num_heads)),
        head_dim=head_dim(values, "head_dim", hidden_size, num_heads, family.head_dim),
        intermediate_size=values.integer("intermediate_size", fields.INTERMEDIATE_BOUNDS),
        max_position_count=values.integer("max_position_embeddings", fields.POSITION_BOUNDS, family.max_position_count),
        rms_norm_eps=values.number("rms_norm_eps", fields.EPSILON_BOUNDS, 1e-6),
        rope=_rope(values),
        tie_word_embeddings=values.boolean("tie_word_embeddings", default=False),
        qkv_bias=_bias(values, "attention_bias", family.qkv_bias),
        output_bias=_bias(values, "attention_bias", family.output_bias),
        mlp_bias=_bias(values, "mlp_bias", family.mlp_bias),
        hidden_act=_hidden_act(values),
        dtype=_dtype(values, stored_dtype),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=eos,
        qk_norm=family.qk_norm,
        sliding_window=(
            values.integer("sliding_window", fields.POSITION_BOUNDS, family.sliding_window) if sliding_layers else None
        ),
        sliding_layers=sliding_layers,
    )


def check_heads(values: Fields, num_heads: int, num_kv_heads: int) -> int:
    """`num_kv_heads`, when query heads divide over it."""
    if num_heads % num_kv_heads:
        raise values.error(
            "the number of key/value heads", f"is {num_kv_heads}", f"a divisor of {num_heads} heads", str(num_kv_heads)
        )
    return num_kv_heads


def head_dim(values: Fields, name: str, hidden_size: int, num_heads: int, default: int | None = None) -> int:
    """The field `name`, or `default`, or hidden size over heads; it must be even, for rotary pairs."""
    if not values.has(name) and default is None and hidden_size % num_heads:
        raise values.error(
            "hidden_size", f"is {hidden_size}", f"a multiple of {num_heads} attention heads", str(hidden_size)
        )
    size = values.integer(name, fields.HEAD_DIM_BOUNDS, default or hidden_size // num_heads)
    if size % 2:
        raise values.error(name, f"is {size}", "an even number", str(size))
    return size


def unsupported_architecture(file: Path, found: str, supported: tuple[str, ...]) -> CheckpointError:
    """The error for an architecture that is not among `supported`."""
    names = ", ".join(supported)
    return CheckpointError(
        "unsupported",
        f"{file}: the architecture {found} is not supported",
        f"use a model of one of these: {names}",
        file=file,
        expected=names,
        found=found,
    )


def _architecture(path: Path, content: Mapping[str, Any]) -> str:
    names = content.get("architectures")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        found = f"(none; model_type {str(content.get('model_type'))[:100]!r})" if names is None else repr(names)[:200]
        raise unsupported_architecture(path, found, SUPPORTED_ARCHITECTURES)
    for name in names:
        if name in SUPPORTED_ARCHITECTURES:
            return str(name)
    raise unsupported_architecture(path, ", ".join(names)[:200], SUPPORTED_ARCHITECTURES)


def _refuse_unsupported(values: Fields) -> None:
    for name in ("quantization_config", "compression_config"):
        quantisation = values.values.get(name)
        if quantisation:
            method = quantisation.get("quant_method", "unnamed") if isinstance(quantisation, dict) else quantisation
            raise CheckpointError(
                "unsupported",
                f"{values.file}: weights quantised by {str(method)[:100]!r} are not supported",
                "use the unquantised model, or a GGUF of it",
                file=values.file,
                expected="no quantization_config",
                found=str(method)[:100],
            )
    if values.number("partial_rotary_factor", (0.0, 1.0), 1.0) != 1.0:
        raise CheckpointError(
            "unsupported",
            f"{values.file}: partial_rotary_factor {values.values['partial_rotary_factor']} is not supported",
            "use a model that rotates whole heads",
            file=values.file,
            expected="1.0",
        )


def _hidden_act(values: Fields) -> str:
    name = values.text("hidden_act", "silu") or "silu"
    return _ACTIVATIONS.get(name, name)


def _num_kv_heads(values: Fields, family: Family, num_heads: int) -> int:
    # A null stands for as many as heads in every family, whatever it is where the field is absent.
    default = num_heads if "num_key_value_heads" in values.values else family.num_kv_heads or num_heads
    return values.integer("num_key_value_heads", fields.HEAD_BOUNDS, default)


def _bias(values: Fields, name: str, always: bool | None) -> bool:
    return values.boolean(name, default=False) if always is None else always


def _sliding_layers(values: Fields, family: Family, num_layers: int) -> tuple[int, ...]:
    """The layers in which a token sees a window of positions only."""
    if family.window == "none" or values.values.get("sliding_window", family.sliding_window) is None:
        return ()
    if family.window == "all_layers":
        return tuple(range(num_layers))
    if not values.boolean("use_sliding_window", default=False):
        return ()
    if values.has("layer_types"):
        kinds = values.values["layer_types"]
        if not isinstance(kinds, list) or len(kinds) != num_layers or not all(kind in _LAYER_KINDS for kind in kinds):
            expected = f"{num_layers} of {' or '.join(_LAYER_KINDS)}"
            raise values.error("layer_types", "does not tell the kind of each layer", expected, repr(kinds)[:200])
        return tuple(number for number, kind in enumerate(kinds) if kind == "sliding_attention")
    return tuple(range(values.integer("max_window_layers", (0, 1 << 20), 28), num_layers))


def _generation_fields(folder: Path, config: Fields) -> Fields:
    path = folder / "generation_config.json"
    return Fields(path, read_json_object(path)) if path.exists() else Fields(config.file, {})


def _dtype(values: Fields, stored_dtype: str) -> str:
    name = values.text("dtype") or values.text("torch_dtype") or stored_dtype
    name = name.removeprefix("torch.")
    if name == "auto":
        return stored_dtype
    if name not in DTYPES:
        raise CheckpointError(
            "unsupported",
            f"{values.file}: weights of type {name[:100]!r} are not supported",
            f"use one of {', '.join(DTYPES)}",
            file=values.file,
            expected=", ".join(DTYPES),
            found=name[:100],
        )
    return name


def _rope(values: Fields) -> RopeConfig:
    """Old files have rope_theta and rope_scaling, those of transformers 5 one rope_parameters."""
    name = "rope_parameters" if values.has("rope_parameters") else "rope_scaling"
    raw = values.values.get(name)
    if raw is None:
        return RopeConfig(values.number("rope_theta", fields.THETA_BOUNDS, 10000.0), None, {})
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
    numbers = {key: value for key, value in raw.items() if key not in ("rope_type", "type", "rope_theta")}
    base = theta.number("rope_theta", fields.THETA_BOUNDS, 10000.0)
    if inner.number("partial_rotary_factor", (0.0, 1.0), 1.0) != 1.0:
        raise inner.error("partial_rotary_factor", "is below 1", "1.0", str(raw["partial_rotary_factor"]))
    if scaling_type in ("default", "none"):
        return RopeConfig(base, None, {})
    if not values.has("original_max_position_embeddings"):
        return rope_config(values.file, base, scaling_type, numbers)
    original = values.values["original_max_position_embeddings"]
    return rope_config(values.file, base, scaling_type, {"original_max_position_embeddings": original, **numbers})


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
    return RopeConfig(theta, scaling_type, {key: value for key, value in parameters.items() if value is not None})
