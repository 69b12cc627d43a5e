"""What becomes of the forms that clients ask for. The processes themselves are tested in test_grammars.py."""

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from scheduler_service.engine.grammar_process import answer
from stepwire.grammars import compile_grammar, make_tokenizer
from tests.support.tiny_checkpoint import EOS_TOKEN_ID, tiny_tokenizer

TOKENIZER: LLTokenizer = make_tokenizer(tiny_tokenizer().to_str(), 320, [EOS_TOKEN_ID])


def ask(kind: str, text: str = "", choices: tuple[str, ...] = ()) -> dict[str, Any]:
    return answer({"kind": kind, "text": text, "choices": list(choices)}, TOKENIZER)


def matcher(kind: str, text: str = "", choices: tuple[str, ...] = ()) -> LLMatcher:
    made = ask(kind, text, choices)
    assert "grammar" in made, made
    return compile_grammar(TOKENIZER, made["grammar"])


def accepts(start: LLMatcher, text: str) -> bool:
    """Whether a text is whole under a grammar."""
    walk = start.deep_copy()
    token_ids = TOKENIZER.tokenize_str(text)
    return walk.try_consume_tokens(token_ids) == len(token_ids) and walk.is_accepting()


def refusal(schema: Any) -> tuple[str, str]:
    """What is said of a schema, and of which place."""
    made = ask("json_schema", schema if isinstance(schema, str) else json.dumps(schema))
    assert not made["is_complex"], made
    return made["error"], made["place"]


def test_json_has_bounded_whitespace_and_one_spelling_of_a_character() -> None:
    start = matcher("json_schema", json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}}))
    for good in ('{"a":1}', '{"a": 1, "b": "\\n"}', '{\n  "a": 1\n}', "{ }"):
        assert accepts(start, good), good
    # A name with another spelling would pass for another name.
    for bad in ('{"a":  1}', '{\n\n"a": 1}', '{"a": "x"}', '{"\\u0061": "x"}', '{"a": 1, "a": 2}', ' {"a": 1}'):
        assert not accepts(start, bad), bad


def test_a_json_object_is_any_and_nothing_else() -> None:
    start = matcher("json_object")
    assert accepts(start, '{"x": [1, {"y": null}]}')
    assert not accepts(start, "[1]")


@pytest.mark.parametrize("text", ["true", "{}"])
def test_a_schema_without_demands_is_any_json(text: str) -> None:
    assert all(accepts(matcher("json_schema", text), json.dumps(value)) for value in (1, "x", None, [1.5], {"a": []}))


@pytest.mark.parametrize(
    ("schema", "problem", "place"),
    [
        ('{"a": 1,}', "line 1, column 9", ""),
        ("3", "a schema is an object", "#"),
        (False, "nothing satisfies it", "#"),
        ({"type": "integer", "minimum": 5, "maximum": 4}, "Unsatisfiable", "#"),
        ({"$ref": "#"}, "nothing satisfies it", ""),
        ({"x-guidance": {"lenient": True}, "not": {}}, "x-guidance", "#/x-guidance"),
        ({"properties": {"a": {"items": {"not": {}}}}}, 'Unimplemented keys: \\["not"\\]', "#/properties/a/items"),
        ({"properties": {"a": {"pattern": "(?=x)"}}}, "look-ahead", "#/properties/a"),
        ({"allOf": [{}, {"format": "regex"}]}, "Unknown format", "#/allOf/1"),
        ({"items": {"minProperties": 2}}, "minProperties 2", "#/items"),
        ({"items": {"$ref": "http://elsewhere/x"}}, "not present", "#/items"),
    ],
)
def test_what_cannot_be_held_to_is_refused_with_its_place(schema: Any, problem: str, place: str) -> None:
    error, where = refusal(schema)
    assert re.search(problem, error), error
    assert where == place


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(min_size=1, max_size=12), min_size=1, max_size=6, unique=True), st.text(max_size=12))
def test_choices_are_exactly_those(choices: list[str], other: str) -> None:
    start = matcher("choices", choices=tuple(choices))
    assert all(accepts(start, choice) for choice in choices)
    assert accepts(start, other) == (other in choices)


@pytest.mark.parametrize(
    ("regex", "good", "bad"),
    [
        (r"[0-9]{3}-[a-z]+", "123-ab", "123-"),
        (r"a/b\n\\", "a/b\n\\", "a/b"),
        (r"(x|y)*", "", "z"),
        (r"é+", "éé", "e"),
    ],
)
def test_an_expression_matches_as_a_whole(regex: str, good: str, bad: str) -> None:
    start = matcher("regex", regex)
    assert accepts(start, good) and not accepts(start, bad)


@pytest.mark.parametrize("grammar", ['start: "a" b\nb: /[0-9]+/', 'root ::= "a" b\nb ::= [0-9]+'])
def test_grammars_are_lark_or_gbnf(grammar: str) -> None:
    start = matcher("grammar", grammar)
    assert accepts(start, "a12") and not accepts(start, "a")


@pytest.mark.parametrize(
    ("kind", "text", "problem"),
    [
        ("regex", "[a-z", "unclosed character class"),
        ("grammar", 'start: "a" c', r'1\(8\): unknown name: "c"'),
        ("grammar", "start: <|nothing|>", "unknown special token"),
        ("grammar", 'start: "a" %json {"x-guidance": {"lenient": true}, "not": {}}', "not"),
    ],
)
def test_other_forms_are_refused_with_the_place_in_the_text(kind: str, text: str, problem: str) -> None:
    made = ask(kind, text)
    assert re.search(problem, made["error"]), made
    assert not made["is_complex"]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("grammar", 'start: "' + "a" * 200_000 + '"'),
        ("grammar", "root ::= " + "(" * 3000 + '"a"' + ")" * 3000),
    ],
)
def test_what_costs_too_much_is_told_apart(kind: str, text: str) -> None:
    made = ask(kind, text)
    assert made["is_complex"], made
