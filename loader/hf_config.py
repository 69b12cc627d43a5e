"""config.json and generation_config.json -> ModelConfig. Imports no torch."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from loader import fields
from loader.config import ExpertsConfig, ModelConfig
from loader.errors import CheckpointError
from loader.families import FAMILIES, Family
from loader.fields import Fields
from loader.files import read_json_object
from loader.hf_other import OTHER, common_content, is_other_causal_lm, other_model, refuse_without_sizes
from loader.hf_rope import read_ropes, read_rotary_dim

SUPPORTED_ARCHITECTURES = tuple(FAMILIES)
DTYPES = ("float32", "float16", "bfloat16")
_LAYER_KINDS = ("full_attention", "sliding_attention")
_ACTIVATIONS = {"swish": "silu", "gelu_new": "gelu_pytorch_tanh"}
_EXPERT_BOUNDS = (1, 1 << 14)
_MAX_EXPERTS = 1 << 17
_QUANTISED = ("quantization_config", "compression_config")


def read_hf_config(folder: Path, stored_dtype: str, content: Mapping[str, Any] | None = None) -> ModelConfig:
    """The config of the checkpoint in `folder`.

    `stored_dtype` is what its tensors are stored in, used where config.json does not say. `content` is what config.json
    would say, where the folder's says it in words of its own. Raises CheckpointError:
    "unsupported" for an architecture or a rotary embedding we do not have, "invalid" for values
    that are missing, of the wrong type, out of bounds or at odds with each other.
    """
    path = folder / "config.json"
    content = read_json_object(path) if content is None else content
    values = Fields(path, content)
    architecture, other = _architecture(path, content), None
    family = FAMILIES.get(architecture, OTHER)
    if family is OTHER:
        other = other_model(content)
        values = Fields(path, common_content(content))
        refuse_without_sizes(path, architecture, values.values)
    _refuse_unsupported(values, family)
    hidden_size = values.integer("hidden_size", fields.HIDDEN_BOUNDS)
    num_heads = values.integer("num_attention_heads", fields.HEAD_BOUNDS)
    vocab_size = values.integer("vocab_size", fields.VOCAB_BOUNDS)
    num_layers = values.integer("num_hidden_layers", fields.LAYER_BOUNDS)
    size = head_dim(values, "head_dim", hidden_size, num_heads, family.head_dim)
    rotary_dim = read_rotary_dim(values, family, size)
    rope, local_rope = read_ropes(values, family, rotary_dim)
    bos, eos = (_token_ids(folder, values, name, vocab_size) for name in ("bos_token_id", "eos_token_id"))
    config = ModelConfig(
        architecture=architecture,
        family=family.name,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=check_heads(values, num_heads, _num_kv_heads(values, family, num_heads)),
        head_dim=size,
        intermediate_size=values.integer("intermediate_size", fields.INTERMEDIATE_BOUNDS),
        max_position_count=values.integer("max_position_embeddings", fields.POSITION_BOUNDS, family.max_position_count),
        rms_norm_eps=values.number("rms_norm_eps", fields.EPSILON_BOUNDS, family.rms_norm_eps),
        rope=rope,
        tie_word_embeddings=values.boolean("tie_word_embeddings", default=family.tie_word_embeddings),
        qkv_bias=_bias(values, "attention_bias", family.qkv_bias),
        output_bias=_bias(values, "attention_bias", family.output_bias),
        mlp_bias=_bias(values, "mlp_bias", family.mlp_bias),
        hidden_act=_hidden_act(values, family),
        dtype=_dtype(values, stored_dtype),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=eos,
        qk_norm=family.qk_norm,
        local_rope=local_rope,
        rotary_dim=None if rotary_dim == size else rotary_dim,
        experts=_experts(values, family, num_layers),
        other=other,
    )
    return _with_details(config, values, family)


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
    if is_other_causal_lm(content, names[0]):
        return str(names[0])
    raise unsupported_architecture(path, ", ".join(names)[:200], SUPPORTED_ARCHITECTURES)


def _refuse_unsupported(values: Fields, family: Family) -> None:
    if any(values.values.get(name) for name in _QUANTISED) and family is OTHER:
        raise CheckpointError(
            "unsupported",
            f"{values.file}: the weights are quantised, and the model is none of {', '.join(FAMILIES)}",
            "use the unquantised model",
            file=values.file,
            expected="no quantization_config",
        )
    if values.boolean("use_bidirectional_attention", default=False):
        raise CheckpointError(
            "unsupported",
            f"{values.file}: use_bidirectional_attention is set: the model is no causal decoder",
            "use a model that generates text",
            file=values.file,
            expected="false",
            found="true",
        )


def _hidden_act(values: Fields, family: Family) -> str:
    name = values.text(family.activation_field) or family.hidden_act
    return _ACTIVATIONS.get(name, name)


def _with_details(config: ModelConfig, values: Fields, family: Family) -> ModelConfig:
    """The config with what only some families have."""
    layers = _sliding_layers(values, family, config.num_layers)
    return replace(
        config,
        sliding_window=values.integer("sliding_window", fields.POSITION_BOUNDS, family.sliding_window)
        if layers
        else None,
        sliding_layers=layers,
        norms=family.norms,
        norm_offset=family.norm_offset,
        qk_norm_whole=family.qk_norm_whole,
        embedding_scale=math.sqrt(config.hidden_size) if family.scales_embedding else 1.0,
        attention_scale=_attention_scale(values, family),
        attention_softcap=_softcap(values, "attn_logit_softcapping", family.attention_softcap),
        logit_softcap=_softcap(values, "final_logit_softcapping", family.logit_softcap),
        num_unused_layers=values.integer("num_nextn_predict_layers", (0, 64), 0),
    )


def _attention_scale(values: Fields, family: Family) -> float | None:
    if family.query_pre_attn_scalar is None:
        return None
    return 1 / math.sqrt(values.number("query_pre_attn_scalar", (1e-3, 1e6), family.query_pre_attn_scalar))


def _softcap(values: Fields, name: str, default: float | None) -> float | None:
    """A null stands for none, whatever the family takes where the field is absent."""
    if default is None or (name in values.values and not values.has(name)):
        return None
    return values.number(name, (0.0, 1e6), default) or None


def _experts(values: Fields, family: Family, num_layers: int) -> ExpertsConfig | None:
    kind = family.experts
    if kind is None:
        return None
    # transformers writes the second name for families that were published with the first.
    name = "num_experts" if values.has("num_experts") else "num_local_experts"
    num_experts = values.integer(name, _EXPERT_BOUNDS, kind.num_experts)
    step, dense = 1, frozenset[int]()
    if kind.may_skip_layers:
        step = values.integer("decoder_sparse_step", fields.LAYER_BOUNDS, 1)
        dense = frozenset(_layer_numbers(values, "mlp_only_layers", num_layers))
    experts = ExpertsConfig(
        num_experts,
        values.integer("num_experts_per_tok", (1, num_experts), kind.num_chosen),
        values.integer(kind.size_field, fields.INTERMEDIATE_BOUNDS, kind.intermediate_size),
        values.boolean("norm_topk_prob", default=False) if kind.normalised is None else kind.normalised,
        tuple(n for n in range(num_layers) if n not in dense and (n + 1) % step == 0),
    )
    return check_experts(values, name, experts)


def check_experts(values: Fields, name: str, experts: ExpertsConfig) -> ExpertsConfig:
    """`experts`, when all layers together have no more of them than can be looked for; `name` is the field's of their
    number."""
    most = _MAX_EXPERTS // max(1, len(experts.layers))
    if experts.num_experts > most:
        found = str(experts.num_experts)
        raise values.error(name, f"is {found} in each of {len(experts.layers)} layers", f"at most {most}", found)
    return experts


def _layer_numbers(values: Fields, name: str, num_layers: int) -> list[int]:
    numbers = values.values.get(name)
    if numbers is None:
        return []
    if not isinstance(numbers, list) or not all(type(n) is int and 0 <= n < num_layers for n in numbers):
        raise values.error(name, "does not name layers", f"layers below {num_layers}", repr(numbers))
    return numbers


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
    if family.window != "by_pattern" and not values.boolean("use_sliding_window", default=False):
        return ()
    if family.window == "all_layers_if_asked":
        return tuple(range(num_layers))
    if values.has("layer_types"):
        kinds = values.values["layer_types"]
        if not isinstance(kinds, list) or len(kinds) != num_layers or not all(kind in _LAYER_KINDS for kind in kinds):
            expected = f"{num_layers} of {' or '.join(_LAYER_KINDS)}"
            raise values.error("layer_types", "does not tell the kind of each layer", expected, repr(kinds)[:200])
        return tuple(number for number, kind in enumerate(kinds) if kind == "sliding_attention")
    if family.window == "by_pattern":
        period = values.integer("sliding_window_pattern", fields.LAYER_BOUNDS, family.window_period)
        return tuple(number for number in range(num_layers) if (number + 1) % period)
    return tuple(range(values.integer("max_window_layers", (0, 1 << 20), 28), num_layers))


def _token_ids(folder: Path, values: Fields, name: str, vocab_size: int) -> tuple[int, ...]:
    path = folder / "generation_config.json"
    generation = Fields(path, read_json_object(path)) if path.exists() else Fields(values.file, {})
    return generation.token_ids(name, vocab_size) or values.token_ids(name, vocab_size)


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
