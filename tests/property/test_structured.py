"""Random small schemas: what is sampled at random from their masks validates, and what does not validate is refused."""

import json
import os
import random
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llguidance import LLTokenizer

from benchmarks.schemas.judge import problem_of
from scheduler_service.engine.grammar_process import answer
from stepwire.grammars import compile_grammar
from tests.support.grammars import tiny_grammar_tokenizer
from tests.support.tiny_checkpoint import EOS_TOKEN_ID

TOKENIZER: LLTokenizer = tiny_grammar_tokenizer()
NUM_EXAMPLES = 600 if os.environ.get("STEPWIRE_TEST_FULL") else 60
MOST_TOKENS = 250

NAMES = st.sampled_from(["a", "b", "aa", 'q"', "x/y", "é", "n\n"])
SMALL = st.integers(-20, 20)
LEAVES = st.one_of(
    st.builds(lambda low, more: {"type": "integer", "minimum": low, "maximum": low + more}, SMALL, st.integers(0, 30)),
    st.builds(
        lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more}, *[st.integers(0, 4)] * 2
    ),
    st.builds(lambda values: {"enum": values}, st.lists(st.one_of(SMALL, NAMES, st.none()), min_size=1, max_size=4)),
    st.sampled_from(
        [{"type": "boolean"}, {"type": "null"}, {"const": {"k": [1, "v"]}}, {"pattern": "^[a-c]+$", "type": "string"}]
    ),
)


def _record(properties: dict[str, Any], required: list[str], additional: Any, most: int | None) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": additional}
    schema["required"] = sorted({*required} & properties.keys()) if most is None else sorted(properties)
    return schema if most is None else {**schema, "minProperties": most}


def _larger(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    records = st.builds(
        _record,
        st.dictionaries(NAMES, inner, max_size=3),
        st.lists(NAMES, max_size=3),
        st.one_of(st.booleans(), inner),
        st.one_of(st.none(), st.integers(0, 3)),
    )
    arrays = st.builds(
        lambda items, least, more: {"type": "array", "items": items, "minItems": least, "maxItems": least + more},
        inner,
        st.integers(0, 2),
        st.integers(0, 2),
    )
    unions = st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3))
    both = st.builds(lambda first, second: {"allOf": [first, second]}, inner, inner)
    return st.one_of(records, arrays, unions, both)


SCHEMAS = st.recursive(LEAVES, _larger, max_leaves=6)


@settings(max_examples=NUM_EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(SCHEMAS, st.integers(0, 2**32))
def test_what_is_sampled_from_a_schemas_masks_validates(schema: Any, seed: int) -> None:
    made = answer({"kind": "json_schema", "text": json.dumps(schema), "choices": []}, TOKENIZER)
    if "grammar" not in made:
        assert made["error"] and not made["is_complex"]
        return
    draws, prototype = random.Random(seed), compile_grammar(TOKENIZER, made["grammar"])
    for _ in range(4):
        output = sample(prototype.deep_copy(), draws)
        if output is not None:
            assert problem_of(output, schema) is None, output


def sample(matcher: Any, draws: random.Random) -> str | None:
    """A text drawn token by token; None for one that came to no end."""
    token_ids: list[int] = []
    while len(token_ids) < MOST_TOKENS:
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        assert not matcher.is_error(), matcher.get_error()
        allowed = [token_id for token_id in range(TOKENIZER.vocab_size) if mask >> token_id & 1]
        # Ends of whatever is open are taken often, so that most come to one.
        ends = [i for i in allowed if i == EOS_TOKEN_ID or TOKENIZER.decode_bytes([i]) in (b'"', b"]", b"}")]
        token_id = draws.choice(ends if ends and draws.random() < 0.4 else allowed)
        if token_id == EOS_TOKEN_ID:
            return TOKENIZER.decode_bytes(token_ids).decode()
        assert matcher.consume_token(token_id)
        token_ids.append(token_id)
    return None
