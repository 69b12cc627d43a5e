"""The tokenizer off the event loop."""

import asyncio

import pytest

from scheduler_service.engine.tokens import Tokens
from stepwire.rpc.errors import StepwireError
from tests.support.tiny_checkpoint import tiny_tokenizer


@pytest.mark.parametrize("text", ["", "hello", "añ😀", "\x00\ufffe", "<|im_start|>x"])
async def test_text_comes_back(text: str) -> None:
    tokens = Tokens(tiny_tokenizer(), 320)
    ids = await tokens.encode(text, add_special_tokens=False)
    assert await tokens.decode(ids, keep_special_tokens=True) == text
    tokens.close()


async def test_lone_surrogates_are_refused() -> None:
    tokens = Tokens(tiny_tokenizer(), 320)
    with pytest.raises(StepwireError, match="character 2 is a lone surrogate") as caught:
        await tokens.encode("ab\ud800", add_special_tokens=False)
    assert caught.value.reason == "FIELD_INVALID"
    tokens.close()


async def test_tokens_beyond_the_models_vocabulary_are_refused() -> None:
    tokens = Tokens(tiny_tokenizer(), 100)
    with pytest.raises(StepwireError) as caught:
        await tokens.encode("é", add_special_tokens=False)
    assert caught.value.reason == "TOKEN_ID_OUT_OF_VOCABULARY"
    with pytest.raises(StepwireError, match="holds 100; token ids go from 0 to 99"):
        await tokens.decode([5, 100], keep_special_tokens=True)
    tokens.close()


class Panicking:
    """The tokenizers library panics on some inputs, which is no Exception."""

    def get_vocab_size(self, *, with_added_tokens: bool) -> int:
        return 0

    decoder = None

    def get_added_tokens_decoder(self) -> dict[int, object]:
        return {}

    def encode_batch_fast(self, texts: list[str], *, add_special_tokens: bool) -> None:
        raise Panic("index out of bounds")


class Panic(BaseException):
    pass


async def test_a_panic_is_an_exception() -> None:
    tokens = Tokens(Panicking(), 10)
    with pytest.raises(RuntimeError, match="index out of bounds"):
        await tokens.encode("x", add_special_tokens=False)
    tokens.close()


async def test_a_long_text_does_not_hold_up_the_event_loop() -> None:
    tokens = Tokens(tiny_tokenizer(), 320)
    encoding = asyncio.ensure_future(tokens.encode("hello world " * 80_000, add_special_tokens=False))
    num_turns = 0
    while not encoding.done():
        await asyncio.sleep(0.001)
        num_turns += 1
    assert len(await encoding) > 80_000
    assert num_turns > 20
    tokens.close()
