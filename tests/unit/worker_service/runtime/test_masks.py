"""Masks of a step's sequences, against sets of tokens told one by one."""

import numpy as np
import pytest
import torch

from tests.support.grammars import (
    VOCAB_SIZE,
    allowed_after,
    lark,
    prepare,
    schema,
    tiny_grammar_tokenizer,
    tiny_store,
)
from tests.support.tiny_checkpoint import EOS_TOKEN_ID
from worker_service.runtime.draws import RUN
from worker_service.runtime.mask_scores import forbid, narrow, unset_bits, unset_on_cpu
from worker_service.runtime.masks import GrammarMasks, GrammarMissing, Masks
from worker_service.runtime.sequences import SequenceTable
from worker_service.runtime.step import NewSequence, Sampling

PROMPT = [5, 6, 7]


def table_of(*outputs: list[int]) -> SequenceTable:
    """A table whose rows hold these outputs, in order."""
    table = SequenceTable(vocab_size=VOCAB_SIZE, max_model_len=64, num_blocks=64, block_size=16)
    for i, output in enumerate(outputs):
        new = NewSequence(i, f"r{i}", [*PROMPT, *output], len(PROMPT), Sampling(), [i])
        assert table.add(new, 0, failed=False) == i
    return table


def allowed(masks: Masks, place: int, num_rows: int) -> set[int]:
    scores = torch.zeros(num_rows, -(-VOCAB_SIZE // RUN) * RUN)
    forbid(masks, scores, np.arange(num_rows))
    return set(torch.isfinite(scores[place, :VOCAB_SIZE]).nonzero()[:, 0].tolist())


def test_each_row_gets_its_own_grammars_tokens_and_others_all() -> None:
    tokenizer, store = tiny_grammar_tokenizer(), tiny_store()
    texts = {0: lark('start: "ab"*'), 2: schema({"type": "integer"}), 3: lark('start: "x"')}
    outputs = {0: tokenizer.tokenize_str("abab"), 2: tokenizer.tokenize_str("-1"), 3: tokenizer.tokenize_str("x")}
    masks = GrammarMasks(VOCAB_SIZE, store)
    for row, text in texts.items():
        masks.take(row, prepare(store, text))
    table, rows = table_of(outputs[0], [], outputs[2], outputs[3]), np.array([3, 0, 1, 2])
    pending = masks.begin(rows, table)
    assert pending is not None
    found = pending.wait(rows)
    for place, row in enumerate(rows.tolist()):
        expected = allowed_after(tokenizer, texts[row], outputs[row]) if row in texts else set(range(VOCAB_SIZE))
        assert allowed(found, place, len(rows)) == expected
    # At its end a grammar allows the end token and nothing else.
    assert allowed(found, 0, len(rows)) == {EOS_TOKEN_ID}
    assert found.num_allowed(0) == 1
    # A row that failed meanwhile is not sampled.
    fewer = masks.begin(rows, table)
    assert fewer is not None
    assert allowed(fewer.wait(rows[1:]), 0, 3) == allowed_after(tokenizer, texts[0], outputs[0])


def test_what_was_consumed_is_not_consumed_again() -> None:
    tokenizer, store, grammar = tiny_grammar_tokenizer(), tiny_store(), lark('start: "a" "b" "c" "d"')
    masks, table, rows = GrammarMasks(VOCAB_SIZE, store), table_of([]), np.array([0])
    masks.take(0, prepare(store, grammar))
    output: list[int] = []
    for letter in "abcd":
        pending = masks.begin(rows, table)
        assert pending is not None
        assert allowed(pending.wait(rows), 0, 1) == allowed_after(tokenizer, grammar, output)
        (token_id,) = tokenizer.tokenize_str(letter)
        output.append(token_id)
        table.append_tokens(rows, np.array([token_id]))


def test_all_end_tokens_end_a_grammar() -> None:
    store = tiny_store((EOS_TOKEN_ID, 0, 319))
    masks, table, rows = GrammarMasks(VOCAB_SIZE, store), table_of([]), np.array([0])
    masks.take(0, prepare(store, lark('start: ""')))
    pending = masks.begin(rows, table)
    assert pending is not None
    assert allowed(pending.wait(rows), 0, 1) == {EOS_TOKEN_ID, 0, 319}


def test_tokens_that_the_grammar_does_not_allow_are_that_rows_error() -> None:
    tokenizer, store = tiny_grammar_tokenizer(), tiny_store()
    masks, rows = GrammarMasks(VOCAB_SIZE, store), np.array([0, 1])
    table = table_of(tokenizer.tokenize_str("b"), tokenizer.tokenize_str("a"))
    for row in (0, 1):
        masks.take(row, prepare(store, lark('start: "a" "c"')))
    pending = masks.begin(rows, table)
    assert pending is not None
    found = pending.wait(rows)
    assert list(found.errors) == [0] and "does not go on" in found.errors[0].message
    assert found.errors[0].reason == "GRAMMAR_INVALID"
    assert allowed(found, 1, 2) == set(tokenizer.tokenize_str("c"))


def test_a_grammar_that_is_not_held_is_missing() -> None:
    for masks in (GrammarMasks(VOCAB_SIZE, None), GrammarMasks(VOCAB_SIZE, tiny_store())):
        with pytest.raises(GrammarMissing, match="not known here"):
            masks.take(0, bytes(32))


def test_without_grammars_there_is_nothing_to_compute() -> None:
    for masks in (GrammarMasks(VOCAB_SIZE, None), GrammarMasks(VOCAB_SIZE, tiny_store())):
        assert not masks.are_used and masks.begin(np.array([0]), table_of([])) is None


@pytest.mark.parametrize("num_words", [1, 2, 10])
def test_bits_become_booleans_alike_on_every_device(num_words: int) -> None:
    words = np.random.default_rng(0).integers(0, 2**32, (3, num_words), np.uint32)
    expected = [[not words[row, i // 32] >> np.uint32(i % 32) & 1 for i in range(32 * num_words)] for row in range(3)]
    assert unset_on_cpu(words.view(np.uint8)).tolist() == expected
    assert unset_bits(torch.from_numpy(words.view(np.uint8))).tolist() == expected


def test_few_tokens_are_scored_by_themselves() -> None:
    store = tiny_store()
    masks, rows = GrammarMasks(VOCAB_SIZE, store), np.array([0, 1, 2])
    masks.take(0, prepare(store, lark('start: "a" | "b"')))
    masks.take(2, prepare(store, lark("start: /(.|\\n){3}/"), revision=2))
    pending = masks.begin(rows, table_of([], [], []))
    assert pending is not None
    found = pending.wait(rows)
    logits = torch.randn(3, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    scores, token_ids = narrow(found, logits, [0])
    (a,), (b,) = (tiny_grammar_tokenizer().tokenize_str(letter) for letter in "ab")
    assert token_ids[0, :2].tolist() == sorted([a, b])
    assert scores[0, :2].tolist() == logits[0, sorted([a, b])].tolist()
    assert torch.isinf(scores[0, 2:]).all()
    assert (0 in found.few, 1 in found.few) == (True, False)
    # The others of a step are left as they are.
    changed = torch.zeros(2, -(-VOCAB_SIZE // RUN) * RUN)
    forbid(found, changed, np.array([1, 2]))
    assert not changed[0].any() and torch.isinf(changed[1]).any()
