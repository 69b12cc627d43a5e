"""Where in a schema something is."""

import json
from typing import Any

import pytest

from scheduler_service.engine.schema_places import all_subschemas, deepest_failure, find_unsound, parse_schema, pointer


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"a":\n 1,}', "line 2, column 4"),
        ("[" * 100_000, "nested too deeply"),
        ('{"minimum": NaN}', "NaN"),
        ("", "line 1, column 1"),
    ],
)
def test_what_is_no_json_is_refused_with_its_place(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_schema(text)


def test_every_place_that_holds_a_schema_is_found() -> None:
    schema = {
        "properties": {"a/b": {"items": [{"const": {"properties": {"no": {}}}}]}, "c~": True},
        "allOf": [{"not": {"enum": [{"items": {}}]}}],
        "$defs": {"d": {"additionalProperties": False}},
        "unevaluatedItems": {"if": {}},
        "description": {"properties": {"no": {}}},
    }
    assert {pointer(path) for path, _ in all_subschemas(schema)} == {
        "#",
        "#/properties/a~1b",
        "#/properties/a~1b/items/0",
        "#/properties/c~0",
        "#/allOf/0",
        "#/allOf/0/not",
        "#/$defs/d",
        "#/$defs/d/additionalProperties",
        "#/unevaluatedItems",
        "#/unevaluatedItems/if",
    }


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"minProperties": 1}, None),
        ({"items": {"const": "a\x00"}}, "#/items"),
        ({"enum": ["a\n\t\u00e9"]}, None),
        ({"properties": {"\x01": {}}}, "#"),
        ({"minProperties": 2}, "#"),
        ({"minProperties": 3, "required": ["a", "b"]}, None),
        ({"minProperties": 4, "required": ["a", "b"]}, "#"),
        ({"items": {"minProperties": 2, "required": ["a"]}}, None),
        ({"properties": {"minProperties": {"minProperties": 9}}}, "#/properties/minProperties"),
        ({"enum": [{"minProperties": 2}]}, None),
        (True, None),
    ],
)
def test_more_free_properties_than_a_grammar_can_count_are_found(schema: Any, place: str | None) -> None:
    found = find_unsound(schema)
    assert (None if found is None else pointer(found[0])) == place


def test_the_innermost_part_that_fails_alike_is_named() -> None:
    def error_of(schema: Any) -> str | None:
        return "bad" if '"bad"' in json.dumps(schema) else None

    schema = {"properties": {"a": {"type": "string"}, "b": {"anyOf": [{}, {"items": {"bad": 1}}]}}}
    assert pointer(deepest_failure(schema, error_of)) == "#/properties/b/anyOf/1/items"
    assert pointer(deepest_failure({"bad": 1}, error_of)) == "#"
    assert pointer(deepest_failure(True, error_of)) == "#"


def test_a_part_is_tried_with_the_definitions_of_the_whole() -> None:
    seen: list[Any] = []

    def error_of(schema: Any) -> str | None:
        seen.append(schema)
        return "bad" if schema.get("$ref") or "properties" in schema else None

    schema = {"$defs": {"x": {}}, "properties": {"a": {"$ref": "#/$defs/x"}}}
    assert pointer(deepest_failure(schema, error_of)) == "#/properties/a"
    assert {"$defs": {"x": {}}, "$ref": "#/$defs/x"} in seen
