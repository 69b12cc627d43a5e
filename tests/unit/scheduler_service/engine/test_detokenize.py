"""Streamed text equals the decoding of all tokens at once."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from scheduler_service.engine.detokenize import Detokenizer
from tests.support.tiny_checkpoint import tiny_tokenizer

BYTE_LEVEL = tiny_tokenizer()
BYTE_LEVEL.add_tokens([AddedToken("plain added", normalized=False), AddedToken("é漢", normalized=False)])
BYTE_LEVEL_SIZE = BYTE_LEVEL.get_vocab_size()


def sentence_piece(*, strip: bool) -> Tokenizer:
    """Llama-2's kind: pieces with a mark for the space, a token for each byte, special tokens."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁a", "a", "b", "▁▁", "é", "漢", "<0xZZ>", "a▁b"]
    tokenizer = Tokenizer(
        models.BPE({p: i for i, p in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


STRIPPING, PLAIN = sentence_piece(strip=True), sentence_piece(strip=False)
PIECES_SIZE = PLAIN.get_vocab_size()


def streamed(detokenizer: Detokenizer, token_ids: Sequence[int], prompt: Sequence[int] = (1,)) -> str:
    decoder = detokenizer.sequence(prompt)
    return "".join(decoder.feed(token_id) for token_id in token_ids) + decoder.flush()


BYTE_LEVEL_STREAM = Detokenizer(BYTE_LEVEL, BYTE_LEVEL_SIZE + 10)
STRIPPING_STREAM, PLAIN_STREAM = Detokenizer(STRIPPING, PIECES_SIZE), Detokenizer(PLAIN, PIECES_SIZE)


@given(st.lists(st.integers(0, BYTE_LEVEL_SIZE + 9), max_size=40))
def test_byte_level_streams_are_exact(token_ids: list[int]) -> None:
    assert streamed(BYTE_LEVEL_STREAM, token_ids) == BYTE_LEVEL.decode(token_ids)


@given(st.text(max_size=40))
def test_byte_level_streams_give_whole_characters(text: str) -> None:
    decoder = BYTE_LEVEL_STREAM.sequence([1])
    parts = [decoder.feed(token_id) for token_id in BYTE_LEVEL.encode(text, add_special_tokens=False).ids]
    assert "".join(parts) == text
    assert decoder.flush() == ""


@given(
    st.lists(st.integers(0, PIECES_SIZE - 1) | st.integers(255, PIECES_SIZE - 1), max_size=30),
    st.lists(st.sampled_from([1, 2, PIECES_SIZE - 9, PIECES_SIZE - 8, PIECES_SIZE - 7]), min_size=1, max_size=3),
)
def test_piece_streams_are_what_the_output_adds_to_the_prompt(token_ids: list[int], prompt: list[int]) -> None:
    for tokenizer, stream in ((STRIPPING, STRIPPING_STREAM), (PLAIN, PLAIN_STREAM)):
        whole = tokenizer.decode([*prompt, *token_ids])
        assert tokenizer.decode(prompt) + streamed(stream, token_ids, prompt) == whole


@pytest.mark.parametrize("text", ["hello world", "añ😀é 漢字", "a\n\nb\tc"])
def test_other_decoders_are_streamed_by_windows(text: str) -> None:
    tokenizer = tiny_tokenizer()
    # A decoder that no fast way knows, with the same result here.
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("\x00", "")])
    token_ids = tokenizer.encode(text).ids
    assert streamed(Detokenizer(tokenizer, 320), token_ids, [5, 6, 7]) == text
    assert "Window" in type(Detokenizer(tokenizer, 320).sequence([1])).__name__


def test_only_tables_count_as_quick() -> None:
    assert Detokenizer(tiny_tokenizer(), 320).is_quick
    assert Detokenizer(sentence_piece(strip=True), 10).is_quick
    other = tiny_tokenizer()
    other.decoder = decoders.WordPiece()
    assert not Detokenizer(other, 320).is_quick


def test_a_long_window_stream_stays_short() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("\x00", "")])
    rng = random.Random(0)
    text = "".join(rng.choice("abcé😀 ") for _ in range(2000))
    assert streamed(Detokenizer(tokenizer, 320), tokenizer.encode(text).ids) == text


def test_a_tokenizer_without_a_decoder_still_streams() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    assert streamed(Detokenizer(tokenizer, 3), [0, 1, 0], [2]).replace(" ", "") == "aba"
