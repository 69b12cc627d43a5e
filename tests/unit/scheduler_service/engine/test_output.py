"""Streams to clients: order, merging, ends; and the thread that makes text."""

import asyncio
from typing import Any

import pytest

from scheduler_service.core.plan import PromptLogprobs, TokenEvent
from scheduler_service.core.prefix import KeyChain
from scheduler_service.core.request import FinishReason, Request, Sequence
from scheduler_service.engine.detokenize import Detokenizer
from scheduler_service.engine.output import Delivery, OutputStream, SequenceText, TextPipeline
from scheduler_service.engine.stop import StopFinder, StopStrings
from scheduler_service.engine.values import Output
from stepwire.rpc.errors import StepwireError
from tests.support.tiny_checkpoint import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
DETOKENIZER = Detokenizer(TOKENIZER, 320)


def output(index: int, position: int, reason: FinishReason | None = None) -> Output:
    return Output(index, position, [position], f"{position};", [position], reason)


async def test_messages_that_are_taken_at_once_stay_apart() -> None:
    stream = OutputStream()
    for position in range(3):
        stream.put(output(0, position))
        taken = await stream.get()
        assert taken is not None and taken.token_ids == [position]


async def test_messages_that_wait_are_merged_for_each_sequence() -> None:
    stream = OutputStream()
    for position in range(3):
        stream.put(output(0, position))
        stream.put(output(1, position, FinishReason.LENGTH if position == 2 else None))
    stream.end()
    first, second = await stream.get(), await stream.get()
    assert first == Output(0, 0, [0, 1, 2], "0;1;2;", [0, 1, 2])
    assert second == Output(1, 0, [0, 1, 2], "0;1;2;", [0, 1, 2], FinishReason.LENGTH)
    assert await stream.get() is None


async def test_merged_messages_do_not_grow_without_end() -> None:
    stream = OutputStream()
    for position in range(2000):
        stream.put(output(0, position))
    stream.end()
    sizes, next_position = [], 0
    while (taken := await stream.get()) is not None:
        assert taken.position == next_position
        next_position += len(taken.token_ids)
        sizes.append(len(taken.token_ids))
    assert sum(sizes) == 2000 and max(sizes) <= 512


async def test_messages_wait_for_each_other_as_the_interval_says() -> None:
    stream = OutputStream(interval=3)
    first = asyncio.create_task(stream.get())
    await asyncio.sleep(0)
    stream.put(output(0, 0))
    assert await first == output(0, 0)  # the first token of a sequence waits for none
    second = asyncio.create_task(stream.get())
    for position in (1, 2):
        stream.put(output(0, position))
        stream.put(output(1, position - 1))
        await asyncio.sleep(0)
    assert await second == output(1, 0)  # nor does that of another one
    third = asyncio.create_task(stream.get())
    await asyncio.sleep(0)
    assert not third.done()
    stream.put(output(0, 3))
    assert await third == Output(0, 1, [1, 2, 3], "1;2;3;", [1, 2, 3])
    stream.put(output(1, 2, FinishReason.LENGTH))  # and no end waits
    assert await stream.get() == Output(1, 1, [1, 2], "1;2;", [1, 2], FinishReason.LENGTH)


async def test_what_waits_for_more_comes_before_the_end_of_a_stream() -> None:
    stream = OutputStream(interval=100)
    for index in range(2):
        stream.put(output(index, 0))
        await stream.get()
    for position in range(1, 4):
        stream.put(output(0, position))
        stream.put(output(1, position))
    stream.end(StepwireError("WORKER_FAILED", "lost"))
    taken: list[Any] = [await stream.get() for _ in range(2)]
    assert [(each.sequence_index, each.token_ids) for each in taken] == [(0, [1, 2, 3]), (1, [1, 2, 3])]
    with pytest.raises(StepwireError, match="lost"):
        await stream.get()


async def test_what_waits_for_more_is_no_backlog_of_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler_service.engine.output.MAX_BACKLOG", 100)
    stream = OutputStream(interval=5)
    stream.put(output(0, 0))
    await stream.get()
    for position in range(1, 5):
        stream.put(output(0, position))
        assert not stream.is_overfull
    stream.put(output(0, 5))
    assert stream.is_overfull
    await stream.get()
    assert not stream.is_overfull and stream._backlog == 0


async def test_outputs_that_wait_for_more_follow_the_whole_prompt() -> None:
    stream = OutputStream(2, interval=2)
    first, second = PromptLogprobs(1, 1, "a"), PromptLogprobs(2, 1, "b")
    stream.put_prompt_logprobs(first)
    for position in range(3):
        stream.put(output(1, position))
    stream.put_prompt_logprobs(second)
    taken = [await stream.get() for _ in range(3)]
    assert taken == [first, second, Output(1, 0, [0, 1, 2], "0;1;2;", [0, 1, 2])]


async def test_a_stream_is_overfull_until_enough_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler_service.engine.output.MAX_BACKLOG", 75)
    stream = OutputStream()
    for position in range(3):
        stream.put(output(position, 0))
        assert not stream.is_overfull
    stream.put(output(0, 1))  # Each of the four counts 25: a token, and log-probabilities that weigh as much as 24.
    assert stream.is_overfull
    await stream.get()
    assert not stream.is_overfull


async def test_outputs_wait_until_the_whole_prompt_was_told_of() -> None:
    stream = OutputStream(3)
    ahead, first, second = output(1, 0), PromptLogprobs(1, 2, "a"), PromptLogprobs(3, 1, "b")
    stream.put_prompt_logprobs(first)
    stream.put(ahead)
    assert await stream.get() is first
    stream.put(output(1, 1))
    stream.put_prompt_logprobs(second)
    stream.put(output(0, 0))
    stream.end()
    taken = [await stream.get() for _ in range(4)]
    assert taken == [second, Output(1, 0, [0, 1], "0;1;", [0, 1]), output(0, 0), None]
    assert not stream.is_overfull and stream._backlog == 0


async def test_an_error_comes_after_what_is_there() -> None:
    stream = OutputStream()
    stream.put(output(0, 0))
    stream.end(StepwireError("WORKER_FAILED", "lost"))
    stream.end()
    assert await stream.get() is not None
    with pytest.raises(StepwireError, match="lost"):
        await stream.get()


async def test_a_waiting_client_is_woken() -> None:
    stream = OutputStream()
    task = asyncio.create_task(stream.get())
    await asyncio.sleep(0)
    stream.put(output(0, 0))
    assert (await task) == output(0, 0)


def text(*, stops: list[str] | None = None, decoder: Any = None) -> SequenceText:
    request = Request("r", [1], 10)
    keys = KeyChain(block_size=16, adapter="", salt="")
    sequence = Sequence(1, 0, request, 0.0, [1], 10, keys)
    finder = None if stops is None else StopFinder(StopStrings(stops), 0)
    return SequenceText(sequence, decoder or DETOKENIZER.sequence([1]), finder)


def events(text: SequenceText, letters: str, last: FinishReason = FinishReason.LENGTH) -> list[TokenEvent]:
    ids = [TOKENIZER.token_to_id(letter) for letter in letters]
    reasons = [None] * (len(ids) - 1) + [last]
    return [TokenEvent(text.sequence, i, p, None, r) for p, (i, r) in enumerate(zip(ids, reasons, strict=True))]


def test_tokens_after_a_stop_string_are_dropped() -> None:
    subject = text(stops=["bc"])
    taken = [subject.take(event) for event in events(subject, "abcde")]
    assert taken[3:] == [None, None]
    assert [(o.text, o.stop) for o in taken[:3] if o] == [("a", None), ("", None), ("", "bc")]


def test_the_token_that_ends_a_sequence_is_no_text() -> None:
    subject = text()
    taken = [subject.take(event) for event in events(subject, "abc", FinishReason.STOP)]
    assert [o.text for o in taken if o] == ["a", "b", ""]
    assert taken[2] is not None and taken[2].stop_token_id == TOKENIZER.token_to_id("c")


def test_a_stop_string_with_the_last_token_wins_over_length() -> None:
    subject = text(stops=["c"])
    last = [subject.take(event) for event in events(subject, "abc")][-1]
    assert last is not None and (last.finish_reason, last.stop) == (FinishReason.STOP, "c")


def test_an_incomplete_character_at_the_end_is_marked() -> None:
    subject = text()
    last = [subject.take(event) for event in events(subject, "aÃ")][-1]
    assert last is not None and last.text == "\ufffd"


class Panic(BaseException):
    """What the tokenizers library raises when it panics."""


@pytest.mark.parametrize("inline", [False, True])
async def test_a_text_that_fails_costs_its_own_request_alone(inline: bool) -> None:
    class Broken:
        def feed(self, token_id: int) -> str:
            raise Panic("broken")

        def flush(self) -> str:
            return ""

    delivered: asyncio.Future[list[Delivery]] = asyncio.get_running_loop().create_future()
    pipeline = TextPipeline(delivered.set_result, inline=inline)
    bad, good = text(decoder=Broken()), text()
    pipeline.submit([(bad, events(bad, "a")[0]), (good, events(good, "a")[0])])
    assert delivered.done() is inline
    (first, error), (second, message) = await asyncio.wait_for(delivered, 5)
    assert first is bad and isinstance(error, StepwireError) and error.reason == "INTERNAL"
    assert second is good and isinstance(message, Output) and message.text == "a"
    pipeline.close()
