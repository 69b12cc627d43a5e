"""The grammars that a worker holds."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from loader.checkpoint import open_checkpoint
from stepwire.grammars import MAX_LIVE_GRAMMARS, grammar_key
from tests.support.grammars import lark, prepare, tiny_store
from worker_service.runtime import grammars
from worker_service.runtime.errors import RuntimeFailure
from worker_service.runtime.grammars import GrammarStore


def text(number: int) -> str:
    return lark(f'start: "{number}"')


def key(number: int) -> bytes:
    return grammar_key(text(number))


def test_a_grammar_is_compiled_once() -> None:
    store = tiny_store()
    first = store.prepare(key(1), text(1), [key(1)], 1)
    again = store.prepare(key(1), text(1), [key(1)], 2)
    assert (first.already_held, again.already_held, len(store)) == (False, True, 1)
    assert store.matcher(key(1)) is not None and store.matcher(key(2)) is None


def test_what_does_not_compile_is_the_callers_error_and_nothing_is_kept() -> None:
    store = tiny_store()
    with pytest.raises(RuntimeFailure, match="unknown name") as caught:
        prepare(store, lark("start: nothing"))
    assert (caught.value.code, len(store)) == ("grammar_invalid", 0)


def test_live_grammars_stay_and_of_others_the_oldest_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "MAX_IDLE", 2)
    store = tiny_store()
    for number in range(6):
        store.prepare(key(number), text(number), [key(0), key(number)], number + 1)
    assert [number for number in range(6) if store.matcher(key(number))] == [0, 3, 4, 5]
    store.prepare(key(3), text(3), [key(0), key(3)], 7)
    store.prepare(key(6), text(6), [key(0), key(6)], 8)
    assert [number for number in range(7) if store.matcher(key(number))] == [0, 3, 5, 6]


def test_of_two_calls_the_later_says_what_is_live(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "MAX_IDLE", 0)
    store = tiny_store()
    store.prepare(key(1), text(1), [key(1), key(2)], 5)
    # Sent before the other one, and taken after it: it does not know of grammar 1.
    store.prepare(key(2), text(2), [key(2)], 4)
    assert store.matcher(key(1)) is not None
    store.begin_epoch()
    store.prepare(key(3), text(3), [key(3)], 1)
    assert store.matcher(key(1)) is None


def test_no_more_are_held_than_there_may_be_live(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "MAX_LIVE_GRAMMARS", 3)
    store = tiny_store()
    live = [key(number) for number in range(4)]
    for number in range(3):
        store.prepare(key(number), text(number), live, number + 1)
    with pytest.raises(RuntimeFailure) as caught:
        store.prepare(key(3), text(3), live, 9)
    assert (caught.value.code, len(store)) == ("grammars_full", 3)
    store.prepare(key(3), text(3), [key(3)], 10)
    assert store.matcher(key(0)) is None and MAX_LIVE_GRAMMARS == 1024


def test_many_threads_may_prepare_at_once() -> None:
    store = tiny_store()
    with ThreadPoolExecutor(4) as pool:
        done = list(
            pool.map(lambda n: store.prepare(key(n % 5), text(n % 5), [key(i) for i in range(5)], 1), range(40))
        )
    assert len(store) == 5 and len(done) == 40


def test_the_tokenizer_is_the_checkpoints(tiny_path: Path) -> None:
    store = GrammarStore.of_checkpoint(open_checkpoint(tiny_path), num_threads=1)
    assert store.matcher(prepare(store, text(7))) is not None
    assert store.eos_token_ids == (2,)
