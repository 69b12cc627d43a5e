"""What both services know of grammars."""

import hashlib

import pytest

from stepwire.grammars import (
    MASK_BURST_S,
    MASK_MEAN_S,
    GrammarRefused,
    MaskBudget,
    compile_grammar,
    grammar_key,
    make_tokenizer,
)
from tests.support.tiny_checkpoint import EOS_TOKEN_ID, tiny_tokenizer


def test_a_grammar_is_named_by_its_hash() -> None:
    assert grammar_key("é") == hashlib.sha256(b"\xc3\xa9").digest()


def test_masks_are_for_the_models_own_tokens() -> None:
    tokenizer = make_tokenizer(tiny_tokenizer().to_str(), 352, [EOS_TOKEN_ID, 0])
    matcher = compile_grammar(tokenizer, 'start: "a" | "ab"')
    mask = int.from_bytes(matcher.compute_bitmask(), "little")
    allowed = [token_id for token_id in range(352) if mask >> token_id & 1]
    assert {tokenizer.decode_str([token_id]) for token_id in allowed} <= {"a", "ab"}
    assert tokenizer.vocab_size == 352


def test_what_does_not_compile_is_refused() -> None:
    tokenizer = make_tokenizer(tiny_tokenizer().to_str(), 320, [EOS_TOKEN_ID])
    with pytest.raises(GrammarRefused, match="unknown name"):
        compile_grammar(tokenizer, "start: nothing")
    with pytest.raises(GrammarRefused, match="tokenizer"):
        make_tokenizer("{}", 320, [EOS_TOKEN_ID])


def test_a_budget_allows_a_burst_but_no_lasting_cost() -> None:
    budget = MaskBudget()
    assert budget.left_s == MASK_BURST_S + MASK_MEAN_S
    for _ in range(1000):
        budget.spend(MASK_MEAN_S)
    assert budget.left_s == pytest.approx(MASK_BURST_S + MASK_MEAN_S)
    budget.spend(MASK_BURST_S + 3 * MASK_MEAN_S)
    assert budget.left_s < 0
