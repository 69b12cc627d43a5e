"""Places in a JSON schema: where it says what cannot be promised, and which part of it fails.

Standard library alone: it runs beside llguidance in a process that may be killed.
"""

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Path = tuple[str, ...]

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE = (
    *("items", "additionalProperties", "additionalItems", "contains", "propertyNames"),
    *("not", "if", "then", "else", "unevaluatedItems", "unevaluatedProperties"),
)
_MAX_SEARCH_S = 0.5
# Only short escapes are written: of such a text the character would be left out.
_UNWRITABLE = re.compile(r"\\u00([01][0-9a-f]|7f)")


def pointer(path: Path) -> str:
    """A path as a JSON pointer in a fragment (RFC 6901)."""
    return "#" + "".join("/" + part.replace("~", "~0").replace("/", "~1") for part in path)


def parse_schema(text: str) -> Any:
    """The schema that a text is. Raises ValueError naming line and column."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is no JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def subschemas(schema: Any) -> Iterator[tuple[Path, Any]]:
    """The schemas right inside one, with their paths from it."""
    if not isinstance(schema, Mapping):
        return
    for keyword in _MAPS:
        parts = schema.get(keyword)
        if isinstance(parts, Mapping):
            yield from (((keyword, str(name)), part) for name, part in parts.items())
    for keyword in (*_LISTS, "items"):
        parts = schema.get(keyword)
        if isinstance(parts, list):
            yield from (((keyword, str(i)), part) for i, part in enumerate(parts))
    yield from (((keyword,), schema[keyword]) for keyword in _SINGLE if isinstance(schema.get(keyword), Mapping | bool))


def all_subschemas(schema: Any) -> Iterator[tuple[Path, Any]]:
    """A schema and all inside it, at whatever depth."""
    waiting: list[tuple[Path, Any]] = [((), schema)]
    while waiting:
        path, part = waiting.pop()
        yield path, part
        waiting += [((*path, *inner), child) for inner, child in subschemas(part)]


def find_unsound(schema: Any) -> tuple[Path, str] | None:
    """Where a schema asks for what a grammar cannot hold, and what that is; None when it asks for nothing such.

    A grammar does not tell whether a free property was there before, so one that is written twice would count twice.
    """
    for path, part in all_subschemas(schema):
        if isinstance(part, Mapping):
            fixed = [part.get("const"), part.get("enum"), part.get("required"), list(part.get("properties") or ())]
            if _UNWRITABLE.search(json.dumps(fixed)):
                return path, "it fixes a text with a control character that has no short escape in JSON"
        least = part.get("minProperties") if isinstance(part, Mapping) else None
        if not isinstance(least, int | float):
            continue
        required = part.get("required")
        if least > 1 + (len(set(map(str, required))) if isinstance(required, list) else 0):
            return path, f"minProperties {least} asks for more than one property beyond those required"
    return None


def deepest_failure(schema: Any, error_of: Callable[[Any], str | None]) -> Path:
    """The innermost part of a schema that fails as the whole does; `error_of` compiles one by itself.

    A part is tried with the definitions of the whole. What refers to other places of the whole may not be found.
    """
    if not isinstance(schema, Mapping):
        return ()
    definitions = {key: schema[key] for key in ("$schema", "$defs", "definitions") if key in schema}
    path: Path = ()
    part, error, until = schema, error_of(schema), time.monotonic() + _MAX_SEARCH_S
    while error is not None:
        for inner, child in subschemas(part):
            if time.monotonic() > until:
                return path
            # `false` fails by itself wherever it stands, and may be meant.
            if isinstance(child, Mapping) and error_of({**definitions, **child}) == error:
                path, part = (*path, *inner), child
                break
        else:
            return path
    return path


def _refuse_constant(name: str) -> None:
    raise ValueError(f"it is no JSON: {name}")
