"""The runner with grammars: what they allow, resumed and beside other sequences, and what fails alone."""

import json
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.support.grammars import VOCAB_SIZE, allowed_after, lark, prepare, schema, tiny_grammar_tokenizer, tiny_store
from tests.support.tiny_checkpoint import EOS_TOKEN_ID
from tests.support.tiny_runner import Driver, make_runner
from worker_service.models.decoder import Decoder
from worker_service.runtime.grammars import GrammarStore
from worker_service.runtime.runner import ModelRunner
from worker_service.runtime.step import Sampling

TOKENIZER = tiny_grammar_tokenizer()
PROMPT = [5, 6, 7]
RECORD = schema(
    {
        "type": "object",
        "properties": {"id": {"type": "integer", "minimum": 1, "maximum": 999}, "tag": {"enum": ["red", "blue"]}},
        "required": ["id", "tag"],
        "additionalProperties": False,
    }
)


def sampling(**changes: Any) -> Sampling:
    return Sampling(**{"temperature": 1.0, "stop_token_ids": (EOS_TOKEN_ID,), **changes})


@pytest.fixture
def store() -> GrammarStore:
    return tiny_store()


@pytest.fixture
def grammar_driver(tiny_model: Decoder, store: GrammarStore) -> Driver:
    return Driver(*make_runner(tiny_model, grammars=store))


def run_to_end(
    driver: Driver, *, preempts: random.Random | None = None, most: int = 120, reasons: dict[int, str] | None = None
) -> dict[int, str]:
    """Steps all sequences until each has ended; answers errors, and puts down in `reasons` which are the requests'."""
    live, errors = set(driver.sequences), {}
    for _ in range(most):
        if not live:
            return errors
        if preempts is not None:
            victims = [i for i in live if driver.sequences[i].known and preempts.random() < 0.3]
            for victim in victims:
                driver.preempt(victim)
        output = driver.step({sequence_id: 1000 for sequence_id in live})
        errors.update(output.errors)
        (reasons if reasons is not None else {}).update(output.error_reasons)
        live -= {*output.stopped_sequence_ids, *output.errors}
    raise AssertionError(f"{live} did not end")


def text(output: Sequence[int]) -> str:
    assert output[-1] == EOS_TOKEN_ID
    return TOKENIZER.decode_str(list(output[:-1]))


def test_every_token_is_allowed_and_the_output_ends_when_it_is_whole(
    grammar_driver: Driver, store: GrammarStore
) -> None:
    key = prepare(store, RECORD)
    for i in range(12):
        grammar_driver.add(
            i, PROMPT[: 1 + i % 3], sampling(seed=i, temperature=(0.0, 0.7, 1.5)[i % 3]), grammar_key=key
        )
    assert not run_to_end(grammar_driver)
    for driven in grammar_driver.sequences.values():
        for place, token_id in enumerate(driven.output):
            assert token_id in allowed_after(TOKENIZER, RECORD, driven.output[:place])
        record = json.loads(text(driven.output))
        assert 1 <= record["id"] <= 999 and record["tag"] in ("red", "blue")


def test_a_batch_holds_sequences_with_and_without_and_none_changes_another(
    tiny_model: Decoder, store: GrammarStore
) -> None:
    keys = [b"", prepare(store, RECORD), prepare(store, lark('start: ("x" | "y"){3,9}'), revision=2)]

    def outputs(which: Sequence[int]) -> dict[int, list[int]]:
        driver = Driver(*make_runner(tiny_model, grammars=store))
        for i in which:
            end = () if i % 3 == 0 else (EOS_TOKEN_ID,)
            driver.add(i, PROMPT, sampling(seed=i, stop_token_ids=end), grammar_key=keys[i % 3])
        live = set(which)
        for _ in range(12):
            live -= set(driver.step({i: 1000 for i in live}).stopped_sequence_ids) if live else set()
        return {i: driven.output for i, driven in driver.sequences.items()}

    together = outputs(range(9))
    for i in range(9):
        assert outputs([i])[i] == together[i]


def test_a_resumed_run_equals_an_undisturbed_one(tiny_model: Decoder, store: GrammarStore) -> None:
    key, runs = prepare(store, RECORD), []
    for preempts in (None, random.Random(1), random.Random(2)):
        driver = Driver(*make_runner(tiny_model, grammars=store))
        for i in range(8):
            driver.add(i, PROMPT, sampling(seed=i, frequency_penalty=0.3), grammar_key=key)
        assert not run_to_end(driver, preempts=preempts)
        runs.append([driven.output for driven in driver.sequences.values()])
    assert runs[0] == runs[1] == runs[2]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"banned_token_ids": tuple(TOKENIZER.tokenize_str('{"i'))}, "leave no token"),
        ({"allowed_token_ids": (200,)}, "leave no token"),
        ({"min_tokens": 100}, "leave no token"),
    ],
)
def test_contradictions_end_the_sequence_alone(
    grammar_driver: Driver, store: GrammarStore, changes: dict[str, Any], problem: str
) -> None:
    key = prepare(store, lark('start: "{" "i"'))
    grammar_driver.add(1, PROMPT, sampling(seed=1), grammar_key=key)
    grammar_driver.add(2, PROMPT, sampling(seed=2, **changes), grammar_key=key)
    reasons: dict[int, str] = {}
    errors = run_to_end(grammar_driver, reasons=reasons)
    assert list(errors) == [2] and problem in errors[2]
    assert reasons == {2: "GRAMMAR_INVALID"}
    assert text(grammar_driver.sequences[1].output) == "{i"


def test_what_combines_with_a_grammar(grammar_driver: Driver, store: GrammarStore) -> None:
    key = prepare(store, lark('start: ("a" | "b" | "c"){4}'))
    (a,), (b,), (c,) = (TOKENIZER.tokenize_str(letter) for letter in "abc")
    grammar_driver.add(1, PROMPT, sampling(banned_token_ids=(a, b)), grammar_key=key)
    grammar_driver.add(2, PROMPT, sampling(biased_token_ids=(b,), biases=(100.0,), logprobs=2), grammar_key=key)
    grammar_driver.add(3, PROMPT, sampling(top_k=1, temperature=2.0), grammar_key=key)
    grammar_driver.add(4, PROMPT, sampling(stop_token_ids=(EOS_TOKEN_ID, c), allowed_token_ids=(c,)), grammar_key=key)
    assert not run_to_end(grammar_driver)
    outputs = {i: driven.output for i, driven in grammar_driver.sequences.items()}
    assert outputs[1] == [c] * 4 + [EOS_TOKEN_ID] and outputs[2] == [b] * 4 + [EOS_TOKEN_ID]
    assert outputs[3][-1] == EOS_TOKEN_ID and outputs[4] == [c]
    # Log-probabilities are the model's own.
    logprobs = grammar_driver.sequences[2].logprobs
    assert len(logprobs) == 5 and all(len(entry.top) == 2 and entry.logprob < -1 for entry in logprobs)


def test_an_unknown_grammar_ends_its_sequence_and_not_the_step(grammar_driver: Driver, store: GrammarStore) -> None:
    key = prepare(store, lark('start: "a"'))
    grammar_driver.add(1, PROMPT, sampling(), grammar_key=key)
    grammar_driver.add(2, PROMPT, sampling(), grammar_key=bytes(32))
    errors = run_to_end(grammar_driver)
    assert list(errors) == [2] and "not known here" in errors[2]
    assert text(grammar_driver.sequences[1].output) == "a"


def test_output_that_its_grammar_does_not_allow_ends_its_sequence(tiny_model: Decoder, store: GrammarStore) -> None:
    driver = Driver(*make_runner(tiny_model, grammars=store))
    driven = driver.add(1, PROMPT, sampling(), grammar_key=prepare(store, lark('start: "a" "b"')))
    driven.token_ids += TOKENIZER.tokenize_str("xyz")
    errors = run_to_end(driver)
    assert "does not go on" in errors[1]


def test_nothing_of_a_grammar_stays_when_its_sequence_has_ended(grammar_driver: Driver, store: GrammarStore) -> None:
    key = prepare(store, lark('start: "a"'))
    for round_ in range(3):
        grammar_driver.add(round_, PROMPT, sampling(), grammar_key=key)
        run_to_end(grammar_driver)
        grammar_driver.finish(round_)
    grammar_driver.add(9, PROMPT, Sampling())
    grammar_driver.step({9: 10})
    runner: ModelRunner = grammar_driver.runner
    assert not runner._masks.are_used and np.isin(grammar_driver.sequences[9].output, range(VOCAB_SIZE)).all()
