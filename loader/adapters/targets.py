"""Which modules of a base model an adapter's config means, as PEFT reads it. Imports no torch."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from loader.adapters.config import ALL_LINEAR, LoraConfig
from loader.config import ModelConfig
from loader.families import FAMILIES
from loader.layout import Embedding, Linear, Parameter, parameters
from loader.patterns import full_matches
from loader.shares import RankPlace, whole_share

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
Number = TypeVar("Number", int, float)
_LAYER = re.compile(r"model\.layers\.\d{1,5}\.")
# Where products of one input are one module: its name by ours.
_FUSED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
}
_PLAIN = re.compile(r"[\w.-]*")


@dataclass(frozen=True, slots=True)
class Target:
    """A module to which a product is added: `scaling` times two factors of `rank`."""

    name: str
    rank: int
    scaling: float


@dataclass(frozen=True, slots=True)
class TrainedModule:
    """A module that an adapter may change: one of ours or, where its family joins products of one input, several, the
    rows of each below those of the one before."""

    parts: tuple[Parameter, ...]

    @property
    def num_rows(self) -> tuple[int, ...]:
        """Rows of each part's weight, or values where it is a vector."""
        return tuple(_num_rows(part) for part in self.parts)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """Of all parts together."""
        first, rows = self.parts[0], sum(self.num_rows)
        if isinstance(first, Linear):
            return (rows, first.inputs.size)
        return (rows, first.columns) if isinstance(first, Embedding) else (rows,)

    @property
    def is_linear(self) -> bool:
        """Whether it is a product."""
        return isinstance(self.parts[0], Linear)

    @property
    def is_embedding(self) -> bool:
        """Whether it is looked up by token id."""
        return isinstance(self.parts[0], Embedding)

    @property
    def has_bias(self) -> bool:
        """Whether it is a product with a bias."""
        return isinstance(self.parts[0], Linear) and self.parts[0].bias


def _num_rows(part: Parameter) -> int:
    if isinstance(part, Linear):
        return part.outputs.size
    return part.rows.size if isinstance(part, Embedding) else part.size


def base_modules(config: ModelConfig, place: RankPlace) -> dict[str, Parameter]:
    """The modules of the base model that a rank holds, by name.

    A head that shares the embedding's weight is among them: an adapter can change the head alone.
    """
    modules = {parameter.name: parameter for parameter in parameters(config, place)}
    embedding = modules.get(EMBEDDING)
    if config.tie_word_embeddings and isinstance(embedding, Embedding):
        if place.is_last_stage:
            modules[HEAD] = Linear(HEAD, embedding.rows, whole_share(embedding.columns))
        if not place.is_first_stage:
            del modules[EMBEDDING]
    return modules


def trained_modules(config: ModelConfig) -> dict[str, TrainedModule]:
    """The modules of the whole base model as transformers, and so an adapter, names and joins them."""
    family = FAMILIES.get(config.architecture)
    is_fused = family is not None and family.fused
    stored_names = {ours: stored for stored, ours in family.experts.stored_names} if family and family.experts else {}
    trained: dict[str, TrainedModule] = {}
    for name, module in base_modules(config, RankPlace()).items():
        outer, _, last = name.rpartition(".")
        whole = f"{outer}.{_FUSED[last]}" if is_fused and last in _FUSED else name
        if _LAYER.match(name) is not None:
            whole = ".".join(stored_names.get(part, part) for part in whole.split("."))
        before = trained.get(whole)
        trained[whole] = TrainedModule((*(before.parts if before is not None else ()), module))
    return trained


def is_saved_by(entry: str, name: str) -> bool:
    """Whether an entry of modules_to_save means a module, or one that it lies in."""
    return any(outer.endswith(entry) for outer in _outer_names(name))


def find_targets(config: LoraConfig, modules: Mapping[str, TrainedModule]) -> dict[str, Target]:
    """The modules among those of the base that the config adapts, each with its rank and scaling.

    Raises CheckpointError for an expression that is none, or takes too long to match.
    """
    candidates = [
        name
        for name, module in modules.items()
        if (module.is_linear or module.is_embedding) and not any(is_saved_by(e, name) for e in config.modules_to_save)
    ]
    chosen = _chosen(config, modules, candidates)
    ranks = _by_pattern(config, config.rank_pattern, chosen)
    alphas = _by_pattern(config, config.alpha_pattern, chosen)
    targets = {}
    for name in chosen:
        rank = ranks.get(name, config.rank)
        targets[name] = Target(name, rank, config.scaling(rank, alphas.get(name, config.alpha)))
    return targets


def _outer_names(name: str) -> Iterator[str]:
    """The name of a module and of all that it lies in."""
    parts = name.split(".")
    for stop in range(len(parts), 0, -1):
        yield ".".join(parts[:stop])


def _ends(name: str) -> Iterator[str]:
    """A name, and what is left of it after each dot."""
    parts = name.split(".")
    for start in range(len(parts)):
        yield ".".join(parts[start:])


def _chosen(config: LoraConfig, modules: Mapping[str, TrainedModule], candidates: list[str]) -> list[str]:
    if config.target_modules == ALL_LINEAR:
        targets = frozenset(name for name in candidates if modules[name].is_linear and name != HEAD)
    else:
        targets = _matching(config, config.target_modules, candidates)
    excluded = _matching(config, config.exclude_modules, candidates)
    return [name for name in candidates if name in targets - excluded and _is_in_layers(config, name)]


def _matching(config: LoraConfig, rule: tuple[str, ...] | str, names: list[str]) -> frozenset[str]:
    """The names that end in one of the rule's names, or match its expression as a whole."""
    if not rule:
        return frozenset()
    if isinstance(rule, str):
        return full_matches(config.file, [rule], names)[0]
    wanted = frozenset(rule)
    return frozenset(name for name in names if not wanted.isdisjoint(_ends(name)))


def _is_in_layers(config: LoraConfig, name: str) -> bool:
    """Whether a module lies in one of the layers to transform: its layer is the first number in its name, or the
    first that follows one of `layers_pattern`."""
    if config.layers is None:
        return True
    parts = name.split(".")
    for number, part in enumerate(parts[:-1]):
        before = ".".join(parts[:number])
        if not part.isdecimal() or number < (1 if config.layers_pattern else 2):
            continue
        if config.layers_pattern and not any(pattern in _ends(before) for pattern in config.layers_pattern):
            continue
        return int(part) in config.layers
    return False


def _by_pattern(config: LoraConfig, pattern: Mapping[str, Number], names: list[str]) -> dict[str, Number]:
    """The value for each name whose end matches a key of the pattern; where several do, the first decides."""
    keys = list(pattern)
    expressions = [key for key in keys if not _PLAIN.fullmatch(key)]
    wrapped = [rf"(?:.*\.)?(?:{expression})" for expression in expressions]
    matched = dict(zip(expressions, full_matches(config.file, wrapped, names), strict=True))
    places = {key: place for place, key in enumerate(keys)}
    values = {}
    for name in names:
        fitting = [places[end] for end in _ends(name) if end in places]
        fitting += [places[expression] for expression in expressions if name in matched[expression]]
        if fitting:
            values[name] = pattern[keys[min(fitting)]]
    return values
