"""What the command line needs to know of a settings field, read from its pydantic declaration."""

import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo

Kind = Literal["text", "integer", "number", "switch", "bytes", "list", "entries"]

_UNITS: Mapping[str, int] = {
    "": 1,
    "b": 1,
    **{letter: 1024**power for power, letter in enumerate("kmgt", start=1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", start=1)},
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", start=1)},
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)
_NOUNS: Mapping[Kind, str] = {
    "text": "text",
    "integer": "an integer",
    "number": "a number",
    "switch": "true or false",
    "bytes": "a size in bytes, such as 4GiB",
    "list": "a list of texts",
    "entries": "a list of tables",
}


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """One setting. `allowed` says in words which values it takes; `secret` values are never shown."""

    name: str
    description: str
    kind: Kind
    choices: tuple[str, ...]
    allowed: str
    default: object
    required: bool
    secret: bool

    @property
    def flag(self) -> str:
        """The option on the command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """The environment variable."""
        return "STEPWIRE_" + self.name.upper()


def field_specs(model: type[BaseModel]) -> dict[str, FieldSpec]:
    """The settings of a model by name, in the order of its declaration."""
    return {name: _spec(name, info) for name, info in model.model_fields.items()}


def parse_bytes(text: str) -> int:
    """Reads a size: k, M, G, T and KiB, MiB, … are powers of 1024; kB, MB, … of 1000. Raises ValueError."""
    match = _SIZE.fullmatch(text)
    factor = _UNITS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ValueError(f"{text!r} is not a size")
    return int(float(match[1]) * factor) if "." in match[1] else int(match[1]) * factor


def _spec(name: str, info: FieldInfo) -> FieldSpec:
    annotation = _without_none(info.annotation)
    choices = tuple(map(str, typing.get_args(annotation))) if typing.get_origin(annotation) is Literal else ()
    kind = _kind(name, annotation)
    return FieldSpec(
        name=name,
        description=info.description or "",
        kind=kind,
        choices=choices,
        allowed=f"one of {', '.join(choices)}" if choices else _allowed(kind, _constraints(info)),
        default=None if info.is_required() else info.get_default(call_default_factory=True, validated_data={}),
        required=info.is_required(),
        secret=not info.repr,
    )


def _without_none(annotation: Any) -> Any:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        (annotation,) = (argument for argument in typing.get_args(annotation) if argument is not types.NoneType)
    return annotation


def _kind(name: str, annotation: Any) -> Kind:
    if typing.get_origin(annotation) in (list, tuple):
        (item, *_) = typing.get_args(annotation)
        return "entries" if isinstance(item, type) and issubclass(item, BaseModel) else "list"
    if annotation is bool:
        return "switch"
    if annotation is int:
        return "bytes" if name.endswith("_bytes") else "integer"
    return "number" if annotation is float else "text"


def _constraints(info: FieldInfo) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for item in info.metadata:
        for key in ("ge", "gt", "le", "lt", "min_length", "max_length", "pattern"):
            if (value := getattr(item, key, None)) is not None:
                found[key] = value
    return found


def _allowed(kind: Kind, constraints: Mapping[str, Any]) -> str:
    bounds = []
    if kind in ("text", "list", "entries"):
        unit = "characters" if kind == "text" else "entries"
        if "min_length" in constraints:
            bounds.append(f"at least {constraints['min_length']} {unit}")
        if "max_length" in constraints:
            bounds.append(f"at most {constraints['max_length']} {unit}")
        if "pattern" in constraints:
            bounds.append(f"matching {constraints['pattern']}")
    elif "ge" in constraints and "le" in constraints:
        bounds.append(f"from {constraints['ge']} to {constraints['le']}")
    else:
        words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
        bounds.extend(f"{word} {constraints[key]}" for key, word in words.items() if key in constraints)
    if not bounds:
        return _NOUNS[kind]
    separator = " " if kind in ("integer", "number") else ", "
    return _NOUNS[kind] + separator + ", ".join(bounds)
