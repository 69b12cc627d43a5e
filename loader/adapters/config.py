"""adapter_config.json of a PEFT LoRA adapter -> LoraConfig. Imports no torch."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from loader.errors import CheckpointError
from loader.fields import Fields
from loader.files import parse_json_object, read_small

CONFIG_NAME = "adapter_config.json"
ALL_LINEAR = "all-linear"
_RANK_BOUNDS = (1, 1 << 16)
_ALPHA_BOUNDS = (-1e6, 1e6)
_MOST_ENTRIES = 1 << 14
_MOST_SAVED = 256
_MOST_TEXT = 10_000
_PLAIN_NAME = re.compile(r"[\w.-]+")
_SET_UP_OF_THE_BASE = ("pissa", "corda", "olora", "lora_ga", "loftq")
MERGE_WITH_PEFT = "merge the adapter into its base model with PEFT (merge_and_unload) and serve the result"

# What changes the product, or what it applies to, in ways that the factors alone do not tell.
_REFUSED: Mapping[str, str] = {
    "use_dora": "DoRA scales each row of the sum of weight and product",
    "target_parameters": "its factors belong to parameters and not to modules",
    "layer_replication": "it was trained on a model with repeated layers",
    "trainable_token_indices": "it replaces rows of the embedding",
    "lora_bias": "its second factor has a bias",
    "use_qalora": "its first factor takes averages of the input",
    "use_bdlora": "its factors are block-diagonal",
    "alora_invocation_tokens": "it applies only after its invocation tokens",
    "arrow_config": "it is a router over other adapters",
    "kasa_config": "it was trained on a changed base model",
    "monteclora_config": "its factors are drawn at random",
    "megatron_config": "it was trained on Megatron's modules",
}
# How it was trained; no part of what it computes. Factors for a transposed weight (fan_in_fan_out) have the same
# shapes, and all linear modules here store theirs in one way.
_WITHOUT_EFFECT = frozenset(
    (
        *("auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "fan_in_fan_out"),
        *("inference_mode", "loftq_config", "lora_dropout", "lora_ga_config", "megatron_core", "modules_to_tie"),
        *("peft_version", "qalora_group_size", "revision", "runtime_config", "target_modules_to_tie", "task_type"),
        *("use_gpu_offload", "velora_config"),
    )
)
_READ = frozenset(
    (
        *("alpha_pattern", "bias", "ensure_weight_tying", "exclude_modules", "init_lora_weights", "layers_pattern"),
        *("layers_to_transform", "lora_alpha", "modules_to_save", "peft_type", "r", "rank_pattern"),
        *("target_modules", "use_rslora"),
    )
)


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """What an adapter changes, and by how much.

    `target_modules` and `exclude_modules` are names, or one regular expression; "all-linear" stands for every linear
    module but the head. Keys of the patterns are regular expressions for the ends of module names. `layers` None
    stands for all layers. `content` is the file as it is.
    """

    file: Path
    rank: int
    alpha: float
    use_rslora: bool
    target_modules: tuple[str, ...] | str
    exclude_modules: tuple[str, ...] | str
    layers: frozenset[int] | None
    layers_pattern: tuple[str, ...]
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    modules_to_save: tuple[str, ...]
    has_trained_biases: bool
    ties_weights: bool
    content: bytes

    def scaling(self, rank: int, alpha: float) -> float:
        """The factor of a product of `rank`: alpha over rank or, rank-stabilised, over its root."""
        return alpha / rank**0.5 if self.use_rslora else alpha / rank


def read_lora_config(folder: Path) -> LoraConfig:
    """The config of the adapter in `folder`.

    Raises CheckpointError: "not_found" where there is none, "invalid" for values that are missing, of a wrong type,
    or out of bounds, "unsupported" for kinds of adapters that compute something else.
    """
    path = folder / CONFIG_NAME
    content = read_small(path)
    values = Fields(path, parse_json_object(path, content), "restore the file that the adapter was saved with")
    _refuse_other_kinds(values)
    alpha = values.number("lora_alpha", _ALPHA_BOUNDS)
    if alpha == 0:
        raise values.error("lora_alpha", "is 0: the adapter would change nothing", "another number", "0")
    return LoraConfig(
        file=path,
        rank=values.integer("r", _RANK_BOUNDS),
        alpha=alpha,
        use_rslora=values.boolean("use_rslora", default=False),
        target_modules=_targets(values),
        exclude_modules=_names_or_expression(values, "exclude_modules"),
        layers=_layers(values),
        layers_pattern=_layers_pattern(values),
        rank_pattern={key: rule.integer(key, _RANK_BOUNDS) for key, rule in _pattern(values, "rank_pattern")},
        alpha_pattern={key: rule.number(key, _ALPHA_BOUNDS) for key, rule in _pattern(values, "alpha_pattern")},
        modules_to_save=_names(values, "modules_to_save", _MOST_SAVED),
        has_trained_biases=_has_trained_biases(values),
        ties_weights=values.boolean("ensure_weight_tying", default=False),
        content=content,
    )


def _refuse_other_kinds(values: Fields) -> None:
    kind = values.text("peft_type")
    if kind != "LORA":
        raise unsupported(values.file, f"is of the kind {kind!r}, not LORA", "use a LoRA adapter", str(kind))
    for name, reason in _REFUSED.items():
        if values.values.get(name):
            raise unsupported(values.file, f"has {name}: {reason}", MERGE_WITH_PEFT, name)
    how = values.values.get("init_lora_weights", True)
    if not isinstance(how, bool | str | None):
        raise values.error("init_lora_weights", f"is {how!r}", "true, false or a name", repr(how))
    if isinstance(how, str) and how.lower().startswith(_SET_UP_OF_THE_BASE):
        remedy = "save it with PEFT's path_initial_model_for_weight_conversion, which makes it an adapter of the base"
        raise unsupported(
            values.file, f"has init_lora_weights {how!r}: it was trained on a changed base model", remedy, how
        )
    for name, value in values.values.items():
        if value and name not in _READ and name not in _WITHOUT_EFFECT and name not in _REFUSED:
            raise unsupported(values.file, f"has {name!r}, which is not known here", MERGE_WITH_PEFT, name)


def unsupported(file: Path, what: str, remedy: str, found: str) -> CheckpointError:
    """The error for an adapter that computes something we do not."""
    return CheckpointError(
        "unsupported", f"{file} {what}, which is not supported", remedy, file=file, expected="LoRA", found=found
    )


def _targets(values: Fields) -> tuple[str, ...] | str:
    targets = _names_or_expression(values, "target_modules")
    if not targets:
        raise values.error("target_modules", "names no module", "names or an expression", repr(targets))
    for name in ("layers_to_transform", "layers_pattern"):
        if isinstance(targets, str) and values.values.get(name) not in (None, []):
            raise values.error(name, "stands beside an expression in target_modules", "nothing", "a value")
    return ALL_LINEAR if isinstance(targets, str) and targets.lower() == ALL_LINEAR else targets


def _names_or_expression(values: Fields, name: str) -> tuple[str, ...] | str:
    value = values.values.get(name)
    if isinstance(value, str):
        if len(value) > _MOST_TEXT:
            raise values.error(
                name, f"has {len(value)} characters", f"at most {_MOST_TEXT}", f"{len(value)} characters"
            )
        return value
    return _names(values, name)


def _names(values: Fields, name: str, most: int = _MOST_ENTRIES) -> tuple[str, ...]:
    value = values.values.get(name)
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > most:
        raise values.error(name, f"is {value!r}", f"a list of at most {most} names", type(value).__name__)
    for entry in value:
        if not isinstance(entry, str) or not _PLAIN_NAME.fullmatch(entry):
            raise values.error(name, f"holds {entry!r}", "names of modules", repr(entry))
    return tuple(value)


def _layers(values: Fields) -> frozenset[int] | None:
    value = values.values.get("layers_to_transform")
    layers = [value] if isinstance(value, int) else value
    if layers is None or layers == []:
        return None
    if not isinstance(layers, list) or not all(isinstance(layer, int) and layer >= 0 for layer in layers):
        raise values.error("layers_to_transform", f"is {value!r}", "numbers of layers", repr(value))
    return frozenset(layers)


def _layers_pattern(values: Fields) -> tuple[str, ...]:
    value = values.values.get("layers_pattern")
    if isinstance(value, str):
        value = [value] if value else []
    return _names(Fields(values.file, {"layers_pattern": value}, values.remedy), "layers_pattern")


def _pattern(values: Fields, name: str) -> Iterator[tuple[str, Fields]]:
    """The keys of a table, each with what reads and names its value."""
    value = values.values.get(name)
    if value is None:
        return
    if not isinstance(value, dict) or len(value) > _MOST_ENTRIES:
        raise values.error(name, f"is {value!r}", "numbers by expressions for modules", type(value).__name__)
    if sum(map(len, value)) > _MOST_TEXT * 100:
        raise values.error(name, "has too long expressions", f"at most {_MOST_TEXT * 100} characters", "more")
    for key in value:
        yield key, Fields(values.file, value, values.remedy)


def _has_trained_biases(values: Fields) -> bool:
    kind = values.text("bias", "none")
    if kind not in ("none", "all", "lora_only"):
        raise values.error("bias", f"is {kind!r}", "none, all or lora_only", repr(kind))
    return kind != "none"
