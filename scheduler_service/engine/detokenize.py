"""Text of token ids as they come, equal to the decoding of all of them at once.

`tokenizers` decodes whole lists only, so a stream needs one of two things: the tokenizer's decoder
done again, one token at a time (byte-level BPE, and SentencePiece with byte fallback: a table look-up
a token), or windows of a few tokens decoded again and again, for every other kind of decoder.
"""

import codecs
import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tokenizers import Tokenizer

_REPLACEMENT = "\ufffd"
_WINDOW = 6


class SequenceDecoder(Protocol):
    """The text of one sequence, token by token."""

    def feed(self, token_id: int) -> str:
        """The text that is certain once this token is there; may be empty."""

    def flush(self) -> str:
        """The rest, now that no more tokens will come."""


class Detokenizer:
    """Makes a decoder for each sequence of one tokenizer. Special tokens have no text.

    Token ids from 0 to `num_ids` - 1 may be fed; those that the tokenizer does not know have no text.
    """

    def __init__(self, tokenizer: Tokenizer, num_ids: int) -> None:
        self._tokenizer = tokenizer
        num_known = max(num_ids, tokenizer.get_vocab_size(with_added_tokens=True))
        table = _decoder_table(tokenizer, num_known)
        self._make: _MakeDecoder = table or (lambda prompt: _WindowDecoder(tokenizer, prompt))
        self.is_quick = table is not None
        """Whether its decoders take about a microsecond for a token."""

    def sequence(self, prompt_token_ids: Sequence[int]) -> SequenceDecoder:
        """A decoder for the output that follows a prompt: its text is what the output adds to the prompt's."""
        return self._make(prompt_token_ids)


_MakeDecoder = Callable[[Sequence[int]], SequenceDecoder]


def _decoder_table(tokenizer: Tokenizer, num_ids: int) -> _MakeDecoder | None:
    """Decoders that look tokens up in a table; None for a tokenizer whose decoder is not done again here."""
    steps = _decoder_steps(tokenizer)
    kinds = [step["type"] for step in steps]
    if kinds in (["ByteLevel"], ["ByteLevel", "Fuse"]):
        return _ByteLevelTable(_visible_tokens(tokenizer, num_ids)).sequence
    strip = steps.pop() if kinds and kinds[-1] == "Strip" else {"content": " ", "start": 0, "stop": 0}
    replaces = [step for step in steps if step["type"] == "Replace" and "String" in step["pattern"]]
    kinds = [step["type"] for step in steps]
    if kinds == ["Replace"] * len(replaces) + ["ByteFallback", "Fuse"] and strip["stop"] == 0:
        table = _PieceTable(_visible_tokens(tokenizer, num_ids), replaces, strip)
        return table.sequence
    return None


def _decoder_steps(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The tokenizer's decoder as its parts; empty when it has none."""
    if tokenizer.decoder is None:
        return []
    description = json.loads(tokenizer.decoder.__getstate__())
    return list(description["decoders"]) if description["type"] == "Sequence" else [description]


def _visible_tokens(tokenizer: Tokenizer, num_ids: int) -> list[str | None]:
    """The token of each id; None for special tokens and for ids without a token."""
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    tokens = [tokenizer.id_to_token(token_id) for token_id in range(num_ids)]
    return [None if token in special else token for token in tokens]


class _ByteOfCharacter(dict[int, int]):
    """The printable characters that byte-level BPE writes bytes with (GPT-2's table), for str.translate."""

    def __init__(self) -> None:
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(256) if byte not in printable]
        super().__init__({byte: byte for byte in printable})
        self.update({0x100 + i: byte for i, byte in enumerate(others)})

    def __missing__(self, key: int) -> int:
        return 0x10FFFF  # cannot be encoded as latin-1, which marks the token as plain text


class _ByteLevelTable:
    """Bytes of every token of a byte-level BPE, and its text where the bytes are whole characters."""

    def __init__(self, tokens: Sequence[str | None]) -> None:
        table = _ByteOfCharacter()
        self.bytes = [_token_bytes(token, table) for token in tokens]
        self.texts = [_decode_whole(data) for data in self.bytes]

    def sequence(self, prompt_token_ids: Sequence[int]) -> SequenceDecoder:
        del prompt_token_ids  # bytes need no context
        return _ByteLevelDecoder(self.bytes, self.texts)


def _token_bytes(token: str | None, table: _ByteOfCharacter) -> bytes:
    if token is None:
        return b""
    try:
        return token.translate(table).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()


def _decode_whole(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


class _ByteLevelDecoder:
    """Joins bytes to characters; bytes of a character that is not whole yet are kept."""

    __slots__ = ("_bytes", "_is_partial", "_texts", "_utf8")

    def __init__(self, token_bytes: Sequence[bytes], texts: Sequence[str | None]) -> None:
        self._bytes = token_bytes
        self._texts = texts
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_partial = False

    def feed(self, token_id: int) -> str:
        if not self._is_partial:
            text = self._texts[token_id]
            if text is not None:
                return text
        text = self._utf8.decode(self._bytes[token_id])
        self._is_partial = bool(self._utf8.getstate()[0])
        return text

    def flush(self) -> str:
        self._is_partial = False
        return self._utf8.decode(b"", final=True)


class _PieceTable:
    """Text of every SentencePiece token, or the byte that it stands for."""

    def __init__(self, tokens: Sequence[str | None], replaces: Sequence[dict[str, Any]], strip: dict[str, Any]) -> None:
        self.texts: list[str] = []
        self.bytes: list[int | None] = []
        for token in tokens:
            text = token or ""
            for replace in replaces:
                text = text.replace(replace["pattern"]["String"], replace["content"])
            byte = _fallback_byte(text)
            self.bytes.append(byte)
            self.texts.append(text if byte is None else "")
        self._strip_character: str = strip["content"]
        self._num_stripped: int = strip["start"]

    def sequence(self, prompt_token_ids: Sequence[int]) -> SequenceDecoder:
        starts_text = not any(self.texts[i] or self.bytes[i] is not None for i in prompt_token_ids)
        return _PieceDecoder(self.texts, self.bytes, self._strip_character, self._num_stripped if starts_text else 0)


def _fallback_byte(token: str) -> int | None:
    if len(token.encode()) != 6 or not (token.startswith("<0x") and token.endswith(">")):
        return None
    try:
        return int(token[3:5], 16)
    except ValueError:
        return None


class _PieceDecoder:
    """Joins pieces. A run of byte tokens is text only as a whole, so it is kept until another token ends it."""

    __slots__ = ("_bytes", "_num_to_strip", "_run", "_strip_character", "_texts")

    def __init__(
        self, texts: Sequence[str], token_bytes: Sequence[int | None], strip_character: str, num_to_strip: int
    ) -> None:
        self._texts = texts
        self._bytes = token_bytes
        self._strip_character = strip_character
        self._num_to_strip = num_to_strip
        self._run = bytearray()

    def feed(self, token_id: int) -> str:
        byte = self._bytes[token_id]
        if byte is not None:
            self._run.append(byte)
            return ""
        text = self._texts[token_id]
        if self._run and text:
            text = self._end_run() + text
        return self._strip(text) if self._num_to_strip else text

    def flush(self) -> str:
        return self._strip(self._end_run())

    def _end_run(self) -> str:
        run = bytes(self._run)
        self._run.clear()
        whole = _decode_whole(run)
        return whole if whole is not None else _REPLACEMENT * len(run)

    def _strip(self, text: str) -> str:
        while self._num_to_strip and text:
            if not text.startswith(self._strip_character):
                self._num_to_strip = 0
                return text
            text = text[1:]
            self._num_to_strip -= 1
        return text


class _WindowDecoder:
    """Decodes the last few tokens with and without the new one; what is more is the new one's text."""

    __slots__ = ("_ids", "_num_read", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt_token_ids[-_WINDOW:])
        self._num_read = len(self._ids)

    def feed(self, token_id: int) -> str:
        self._ids.append(token_id)
        new = self._new_text()
        if not new or new.endswith(_REPLACEMENT):
            return ""
        del self._ids[: max(0, self._num_read - _WINDOW)]
        self._num_read = len(self._ids)
        return new

    def flush(self) -> str:
        new = self._new_text()
        self._num_read = len(self._ids)
        return new

    def _new_text(self) -> str:
        known = self._tokenizer.decode(self._ids[: self._num_read])
        return self._tokenizer.decode(self._ids)[len(known) :]
