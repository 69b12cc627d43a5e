"""Which modules of a base model an adapter's config means, as PEFT reads it. Imports no torch."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from loader.adapters.config import ALL_LINEAR, LoraConfig
from loader.adapters.patterns import full_matches
from loader.config import ModelConfig
from loader.layout import Embedding, Linear, Parameter, parameters
from loader.shares import RankPlace, whole_share

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
Number = TypeVar("Number", int, float)
_PLAIN = re.compile(r"[\w.-]*")


@dataclass(frozen=True, slots=True)
class Target:
    """A module to which a product is added: `scaling` times two factors of `rank`."""

    name: str
    rank: int
    scaling: float


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


def is_saved_by(entry: str, name: str) -> bool:
    """Whether an entry of modules_to_save means a module, or one that it lies in."""
    return any(outer.endswith(entry) for outer in _outer_names(name))


def find_targets(config: LoraConfig, modules: Mapping[str, Parameter]) -> dict[str, Target]:
    """The modules among those of the base that the config adapts, each with its rank and scaling.

    Raises CheckpointError for an expression that is none, or takes too long to match.
    """
    candidates = [
        name
        for name, module in modules.items()
        if isinstance(module, Linear | Embedding) and not any(is_saved_by(e, name) for e in config.modules_to_save)
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


def _chosen(config: LoraConfig, modules: Mapping[str, Parameter], candidates: list[str]) -> list[str]:
    if config.target_modules == ALL_LINEAR:
        targets = frozenset(name for name in candidates if isinstance(modules[name], Linear) and name != HEAD)
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
