"""The tokenizer, off the event loop."""

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from tokenizers import Tokenizer

from scheduler_service.engine.detokenize import Detokenizer
from stepwire.rpc.errors import StepwireError

_NUM_THREADS = 2


class Tokens:
    """Text to token ids and back, in a few threads of its own.

    `vocab_size` is the model's: ids from 0 to `vocab_size` - 1 are valid.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.detokenizer = Detokenizer(tokenizer, vocab_size)
        self._tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="tokenizer")

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The token ids of a text.

        Raises FIELD_INVALID when the text is not Unicode, or has tokens that the model does not know.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._encode, text, add_special_tokens)

    async def decode(self, token_ids: Sequence[int], *, keep_special_tokens: bool) -> str:
        """The text of token ids. Raises TOKEN_ID_OUT_OF_VOCABULARY."""
        self.check_ids(token_ids, "token_ids")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._decode, list(token_ids), keep_special_tokens)

    def check_ids(self, token_ids: Sequence[int], field: str) -> None:
        """Raises TOKEN_ID_OUT_OF_VOCABULARY naming the field and the first bad id."""
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self.vocab_size):
            bad = next(i for i in token_ids if not 0 <= i < self.vocab_size)
            raise StepwireError(
                "TOKEN_ID_OUT_OF_VOCABULARY",
                f"{field} holds {bad}; token ids go from 0 to {self.vocab_size - 1}",
                {"field": field, "token_id": str(bad), "vocab_size": str(self.vocab_size)},
            )

    def close(self) -> None:
        """Lets the threads end; waits for none."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:  # called with positions by the executor
        if not text.isascii():
            _check_unicode(text)
        with _panics_as_errors():
            # A batch of one: `encode` keeps the interpreter to itself, and a long text would hold up everybody.
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            ids: list[int] = encoding.ids
        self.check_ids(ids, "text")
        return ids

    def _decode(self, token_ids: list[int], keep_special_tokens: bool) -> str:
        with _panics_as_errors():
            (text,) = self._tokenizer.decode_batch([token_ids], skip_special_tokens=not keep_special_tokens)
        return str(text)


@contextmanager
def _panics_as_errors() -> Iterator[None]:
    """A panic of the tokenizers library is no Exception, and would pass every handler on its way."""
    try:
        yield
    except Exception:
        raise
    except BaseException as panic:
        raise RuntimeError(f"the tokenizer panicked: {panic}") from panic


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise StepwireError(
            "FIELD_INVALID",
            f"the text is not Unicode: character {error.start} is a lone surrogate",
            {"field": "text", "position": str(error.start)},
        ) from None
