"""Grammars for the tiny tokenizer, and what a slow walk over one says."""

import json
from collections.abc import Sequence
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from stepwire.grammars import compile_grammar, grammar_key, make_tokenizer
from tests.support.tiny_checkpoint import EOS_TOKEN_ID, tiny_tokenizer
from worker_service.runtime.grammars import GrammarStore

VOCAB_SIZE = 320


def tiny_grammar_tokenizer(eos_token_ids: Sequence[int] = (EOS_TOKEN_ID,)) -> LLTokenizer:
    return make_tokenizer(tiny_tokenizer().to_str(), VOCAB_SIZE, eos_token_ids)


def tiny_store(eos_token_ids: Sequence[int] = (EOS_TOKEN_ID,), *, num_threads: int = 2) -> GrammarStore:
    return GrammarStore(lambda: tiny_grammar_tokenizer(eos_token_ids), eos_token_ids, num_threads=num_threads)


def lark(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def schema(value: Any) -> str:
    return LLMatcher.grammar_from_json_schema(json.dumps(value), overrides={"whitespace_flexible": False})


def prepare(store: GrammarStore, grammar: str, *, revision: int = 1) -> bytes:
    """The key of a grammar that a store has now."""
    key = grammar_key(grammar)
    store.prepare(key, grammar, [key], revision)
    return key


def allowed_after(tokenizer: LLTokenizer, grammar: str, output: Sequence[int]) -> set[int]:
    """The tokens that a grammar allows after some output, told by a matcher that begins anew."""
    matcher = compile_grammar(tokenizer, grammar)
    assert matcher.consume_tokens(list(output)), matcher.get_error()
    mask = int.from_bytes(matcher.compute_bitmask(), "little")
    return {token_id for token_id in range(VOCAB_SIZE) if mask >> token_id & 1}
