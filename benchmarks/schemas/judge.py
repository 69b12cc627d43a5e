"""Whether an answer is JSON that is valid under a schema: by jsonschema, and not by the library that held it to it.

Numbers are decimal, as JSON has them. Patterns are those of ECMA 262 as far as this matters: digits and word
characters are ASCII. Formats are annotations in draft 2020-12, and not judged.
"""

import json
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import regex
from jsonschema import Draft202012Validator, ValidationError
from jsonschema.validators import extend, validator_for

_CLASSES = {"d": "[0-9]", "D": "[^0-9]", "w": "[A-Za-z0-9_]", "W": "[^A-Za-z0-9_]"}


def problem_of(answer: str, schema: Any) -> str | None:
    """What is wrong with an answer; None when nothing is."""
    try:
        value = _parsed(answer)
    except ValueError as error:
        return f"no JSON: {error}"
    exact = _parsed(json.dumps(schema))
    kind = validator_for(schema, default=Draft202012Validator)
    validator = extend(kind, _OWN)(exact)
    error = next(validator.iter_errors(value), None)
    return None if error is None else error.message


def _parsed(text: str) -> Any:
    return json.loads(text, parse_float=Decimal)


def _search(pattern: str, text: str) -> bool:
    ascii_only = re.sub(r"\\([dDwW])", lambda match: _CLASSES[match[1]], pattern)
    return regex.search(ascii_only, text) is not None


def _pattern(_validator: Any, pattern: str, value: Any, _schema: Any) -> Iterator[ValidationError]:
    if isinstance(value, str) and not _search(pattern, value):
        yield ValidationError(f"{value!r} does not match {pattern!r}")


def _pattern_properties(validator: Any, patterns: Any, value: Any, _schema: Any) -> Iterator[ValidationError]:
    if not isinstance(value, dict):
        return
    for pattern, schema in patterns.items():
        for name, inner in value.items():
            if _search(pattern, name):
                yield from validator.descend(inner, schema, path=name, schema_path=pattern)


def _additional_properties(validator: Any, rule: Any, value: Any, schema: Any) -> Iterator[ValidationError]:
    if not isinstance(value, dict):
        return
    patterns = schema.get("patternProperties", {})
    for name, inner in value.items():
        if name not in schema.get("properties", {}) and not any(_search(pattern, name) for pattern in patterns):
            yield from validator.descend(inner, rule, path=name)


_OWN = {
    "pattern": _pattern,
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional_properties,
}
