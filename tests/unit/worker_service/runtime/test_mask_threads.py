"""Threads that compute masks, with matchers that take as long as a test wants."""

import threading
import time
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from stepwire import grammars
from tests.support.grammars import allowed_after, lark, prepare, tiny_grammar_tokenizer, tiny_store
from worker_service.runtime.mask_threads import GrammarState, MaskJob, MaskThreads
from worker_service.runtime.step import Failure

NO_ENDS = np.zeros(10, np.uint32)


class Matcher:
    """Stands for llguidance's."""

    def __init__(self, *, busy_s: float = 0.0, gate: threading.Event | None = None, panics: bool = False) -> None:
        self.busy_s = busy_s
        self.gate = gate
        self.panics = panics
        self.consumed: list[int] = []

    def deep_copy(self) -> "Matcher":
        return self

    def consume_tokens(self, token_ids: list[int]) -> bool:
        self.consumed += token_ids
        return 99 not in token_ids

    def unsafe_compute_mask_ptr(self, _pointer: int, _num_bytes: int) -> None:
        until = time.thread_time() + self.busy_s
        while time.thread_time() < until or (self.gate is not None and not self.gate.is_set()):
            pass
        if self.panics:
            raise BaseException("out of order")

    def is_error(self) -> bool:
        return False

    def get_error(self) -> str:
        return "why"


def job(matcher: Any, *token_ids: int) -> MaskJob:
    return MaskJob(GrammarState(matcher), list(token_ids), np.zeros(10, np.uint32), NO_ENDS)


def bits(words: NDArray[np.uint32]) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


def test_masks_are_those_of_a_matcher_that_begins_anew() -> None:
    grammar, tokenizer, store = lark('start: ("ab" | "c")*'), tiny_grammar_tokenizer(), tiny_store()
    prototype = store.matcher(prepare(store, grammar))
    assert prototype is not None
    outputs = [tokenizer.tokenize_str("abc" * n) for n in range(8)]
    jobs = [MaskJob(GrammarState(prototype), list(output), np.zeros(10, np.uint32), NO_ENDS) for output in outputs]
    store.threads.begin(jobs).wait()
    for output, done in zip(outputs, jobs, strict=True):
        assert done.error is None
        expected = allowed_after(tokenizer, grammar, output)
        assert bits(done.words) == expected and done.few is not None and done.few.tolist() == sorted(expected)
    store.close()


def test_what_goes_wrong_concerns_one_job_alone() -> None:
    threads = MaskThreads(2)
    jobs = [job(Matcher(), 1, 2), job(Matcher(), 99), job(Matcher(panics=True)), job(Matcher())]
    threads.begin(jobs).wait()
    assert [done.error for done in jobs] == [
        None,
        Failure("the grammar does not go on after its last token: why", "GRAMMAR_INVALID"),
        Failure("the grammar library failed: out of order"),
        None,
    ]
    again = [job(Matcher()) for _ in range(5)]
    threads.begin(again).wait()
    assert not any(done.error for done in again)
    threads.close()


def test_a_mask_that_costs_too_much_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "MASK_BURST_S", 0.02)
    gate, threads = threading.Event(), MaskThreads(1)
    stuck, behind = job(Matcher(gate=gate)), job(Matcher())
    try:
        threads.begin([stuck, behind]).wait()
        assert stuck.is_abandoned and stuck.error is not None
        assert "too long" in stuck.error.message and stuck.error.reason == "GRAMMAR_TOO_COMPLEX"
        assert behind.error is None
        # The thread was replaced.
        more = [job(Matcher()) for _ in range(3)]
        threads.begin(more).wait()
        assert not any(done.error for done in more)
    finally:
        gate.set()
        threads.close()


def test_a_sequence_fails_when_its_masks_cost_too_much_on_average(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "MASK_BURST_S", 0.02)
    monkeypatch.setattr(grammars, "MASK_MEAN_S", 0.0)
    threads, state = MaskThreads(1), GrammarState(Matcher(busy_s=0.004))  # type: ignore[arg-type]
    errors = []
    for _ in range(12):
        done = MaskJob(state, [], np.zeros(10, np.uint32), NO_ENDS)
        threads.begin([done]).wait()
        errors.append(done.error)
    assert errors[0] is None and errors[-1] is not None
    threads.close()
