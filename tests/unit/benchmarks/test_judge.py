"""What judges the answers of the benchmark of structured output."""

from typing import Any

import pytest
from jsonschema import Draft202012Validator

from benchmarks.schemas.judge import problem_of
from benchmarks.schemas.realistic import REALISTIC


@pytest.mark.parametrize(
    ("answer", "schema", "is_valid"),
    [
        ("{", {}, False),
        ("577.5980", {"multipleOf": 0.0001}, True),
        ("577.59805", {"multipleOf": 0.0001}, False),
        ('"é"', {"pattern": "^\\W$"}, True),
        ('"\u0661"', {"pattern": "^\\d$"}, False),
        ('"e"', {"pattern": "^\\p{Letter}$"}, True),
        ('{"x": 1}', {"patternProperties": {"^\\p{Letter}$": {"type": "string"}}}, False),
        ('{"x2": 1}', {"patternProperties": {"^\\p{Letter}$": True}, "additionalProperties": False}, False),
        ('{"x": 1}', {"patternProperties": {"^\\p{Letter}$": True}, "additionalProperties": False}, True),
        ('{"x": 1}', {"properties": {"x": {}}, "additionalProperties": False}, True),
        ("1", True, True),
        ("1", False, False),
    ],
)
def test_answers_are_judged(answer: str, schema: Any, is_valid: bool) -> None:
    assert (problem_of(answer, schema) is None) == is_valid


def test_there_are_fifty_realistic_schemas_that_are_schemas() -> None:
    assert len(REALISTIC) == 50
    for _, schema in REALISTIC.values():
        Draft202012Validator.check_schema(schema)
