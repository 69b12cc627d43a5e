"""The owner of live grammars, on ports that a test watches; and the processes that check them."""

import asyncio
import json

import pytest

from scheduler_service.engine.grammars import GrammarChecker, Grammars, PreparedGrammar
from scheduler_service.engine.values import StructuredOutput
from stepwire.grammars import MAX_LIVE_GRAMMARS, grammar_key
from stepwire.rpc.errors import StepwireError
from tests.support.tiny_checkpoint import EOS_TOKEN_ID, tiny_tokenizer


class Port:
    """A worker that waits for its gate."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, PreparedGrammar]] = []
        self.called = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()
        self.failure: StepwireError | None = None

    async def prepare_grammar(self, epoch: int, prepared: PreparedGrammar) -> None:
        self.calls.append((epoch, prepared))
        self.called.set()
        await self.gate.wait()
        if self.failure is not None:
            raise self.failure


class Checker(GrammarChecker):
    """Finds every text good, and itself the grammar."""

    def __init__(self) -> None:
        super().__init__("", 1, ())
        self.num_asked = 0

    async def _ask(self, wanted: StructuredOutput, question: dict[str, object]) -> str | StepwireError:
        self.num_asked += 1
        if wanted.text == "bad":
            return StepwireError("GRAMMAR_INVALID", "it is bad")
        if wanted.text == "slow":
            return StepwireError("GRAMMAR_TOO_COMPLEX", "it is slow")
        return wanted.text


def regex(text: str) -> StructuredOutput:
    return StructuredOutput("regex", text)


async def grammars_on(ports: list[Port], *, epoch: int) -> Grammars:
    grammars = Grammars()
    await grammars.begin_epoch(ports, epoch)
    return grammars


async def test_a_key_is_given_out_when_all_workers_have_the_grammar() -> None:
    ports = [Port(), Port()]
    ports[1].gate.clear()
    grammars = await grammars_on(ports, epoch=7)
    waiting = asyncio.create_task(grammars.acquire("x"))
    await ports[1].called.wait()
    assert not waiting.done()
    ports[1].gate.set()
    assert (await waiting).grammar == "x"
    key = grammar_key("x")
    for port in ports:
        assert port.calls == [(7, PreparedGrammar(key, "x", (key,), 1))]


async def test_who_shares_a_grammar_shares_its_preparation_and_its_end() -> None:
    port = Port()
    grammars = await grammars_on([port], epoch=1)
    first, other, same = [await grammars.acquire(text) for text in "xyx"]
    assert len(port.calls) == 2
    assert set(port.calls[1][1].live_keys) == {grammar_key("x"), grammar_key("y")}
    first.release()
    assert grammars.num_live == 2
    same.release()
    other.release()
    assert grammars.num_live == 0
    # Nobody lives with it, so a worker may have forgotten it.
    await grammars.acquire("x")
    assert len(port.calls) == 3
    assert port.calls[2][1].live_keys == (grammar_key("x"),)
    assert [prepared.revision for _, prepared in port.calls] == [1, 2, 3]


async def test_one_that_gives_up_leaves_the_others_theirs() -> None:
    port = Port()
    port.gate.clear()
    grammars = await grammars_on([port], epoch=1)
    first, second = (asyncio.create_task(grammars.acquire("x")) for _ in range(2))
    await port.called.wait()
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert grammars.num_live == 1
    port.gate.set()
    (await second).release()
    assert grammars.num_live == 0


async def test_a_worker_that_fails_fails_the_request_and_the_next_one_tries_again() -> None:
    port = Port()
    port.failure = StepwireError("GRAMMAR_INVALID", "no")
    grammars = await grammars_on([port], epoch=1)
    with pytest.raises(StepwireError, match="no"):
        await grammars.acquire("x")
    assert grammars.num_live == 0
    port.failure = None
    await grammars.acquire("x")
    assert len(port.calls) == 2


async def test_refusals_are_remembered_and_raised_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    checker = Checker()
    errors = []
    for _ in range(2):
        assert await checker.check(regex("good")) == "good"
        with pytest.raises(StepwireError) as caught:
            await checker.check(regex("bad"))
        errors.append(caught.value)
    assert checker.num_asked == 2
    assert errors[0] is not errors[1]
    # A machine that is short of something makes a grammar slow, too.
    monkeypatch.setattr("scheduler_service.engine.grammars._DOUBT_S", -1.0)
    for _ in range(2):
        with pytest.raises(StepwireError):
            await checker.check(regex("slow"))
    assert checker.num_asked == 4


async def test_what_was_checked_is_forgotten_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler_service.engine.grammars._MAX_CHECKED_BYTES", 250)
    checker = Checker()
    for text in ("a" * 100, "b" * 100, "a" * 100, "c" * 100, "a" * 100, "b" * 100):
        assert await checker.check(regex(text)) == text
    assert checker.num_asked == 4


async def test_there_are_no_more_live_grammars_than_workers_hold() -> None:
    grammars = await grammars_on([Port()], epoch=1)
    for number in range(MAX_LIVE_GRAMMARS):
        await grammars.acquire(f"x{number}")
    await grammars.acquire("x0")
    with pytest.raises(StepwireError) as caught:
        await grammars.acquire("one more")
    assert caught.value.reason == "GRAMMARS_FULL" and caught.value.retry_after_s


async def test_workers_of_a_new_epoch_get_what_is_live() -> None:
    old, new = Port(), Port()
    grammars = await grammars_on([old], epoch=1)
    holds = [await grammars.acquire(text) for text in "xyz"]
    holds[1].release()
    await grammars.begin_epoch([new], epoch=2)
    assert [(epoch, prepared.grammar) for epoch, prepared in new.calls] == [(2, "x"), (2, "z")]
    await grammars.acquire("w")
    assert len(new.calls) == 3 and len(old.calls) == 3
    new.failure = StepwireError("GRAMMARS_FULL", "no room")
    await grammars.begin_epoch([new], epoch=3)
    new.failure = StepwireError("WORKER_FAILED", "gone")
    with pytest.raises(StepwireError, match="gone"):
        await grammars.begin_epoch([new], epoch=3)


async def test_real_processes_check_and_are_killed_when_they_take_too_long() -> None:
    checker = GrammarChecker(tiny_tokenizer().to_str(), 320, [EOS_TOKEN_ID], time_limit_s=0.4)
    try:
        grammar = await checker.check(StructuredOutput("choices", choices=["a", "b"]))
        assert "start" in json.loads(grammar)["grammars"][0]["lark_grammar"]
        with pytest.raises(StepwireError) as invalid:
            await checker.check(StructuredOutput("json_schema", '{"items": {"not": {}}}'))
        assert (invalid.value.reason, invalid.value.metadata["place"]) == ("GRAMMAR_INVALID", "#/items")
        nested = {"type": "string"}
        for _ in range(7):
            nested = {"type": "object", "properties": {key: nested for key in "abcd"}}  # type: ignore[dict-item]
        with pytest.raises(StepwireError) as slow:
            await checker.check(StructuredOutput("json_schema", json.dumps(nested)))
        assert slow.value.reason == "GRAMMAR_TOO_COMPLEX"
        assert await checker.check(StructuredOutput("regex", "a+"))
    finally:
        await checker.close()
