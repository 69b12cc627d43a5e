import itertools
import re
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoTokenizer

from loader.errors import CheckpointError
from loader.gguf_format import read_gguf_file
from loader.gguf_tokenizer import build_gguf_tokenizer, merges_from_scores
from tests.support.sample_texts import TEXTS
from tests.support.tiny_gguf import make_tiny_gguf

PATH = Path("model.gguf")
SPM_TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
SPM_WORDS = [
    "▁",
    "h",
    "e",
    "l",
    "o",
    "he",
    "ll",
    "▁he",
    "llo",
    "▁hello",
    "w",
    "r",
    "d",
    "▁w",
    "or",
    "▁wor",
    "ld",
    "wor",
]


def build(**changes: Any) -> Tokenizer:
    metadata: dict[str, Any] = {f"tokenizer.ggml.{key}": value for key, value in changes.items() if value is not None}
    return build_gguf_tokenizer(PATH, metadata)


def bytes_vocabulary(**changes: Any) -> Tokenizer:
    tokens = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġa", "th"]
    values = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "merges": ["Ġ a", "t h"],
        "token_type": [3, 3] + [1] * (len(tokens) - 2),
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    return build(**{**values, **changes})


def sentencepiece(**changes: Any) -> Tokenizer:
    tokens = [*SPM_TOKENS, *SPM_WORDS]
    values = {
        "model": "llama",
        "tokens": tokens,
        "scores": [0.0] * len(SPM_TOKENS) + [-float(number) for number in range(len(SPM_WORDS))],
        "token_type": [2, 3, 3] + [6] * 256 + [1] * len(SPM_WORDS),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return build(**{**values, **changes})


def refused(**changes: Any) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        bytes_vocabulary(**changes)
    return caught.value


def cut_at_digits_matters(text: str) -> bool:
    """The vocabulary has no token that joins an ASCII digit with another character, or one space with a digit."""
    other_numbers = any(letter.isnumeric() and not letter.isascii() for letter in text)
    return other_numbers or re.search(r"\s\s\d", text) is not None


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> Tokenizer:
    return build_gguf_tokenizer(demo_model, read_gguf_file(demo_model).metadata)


@pytest.fixture
def reference(demo_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(demo_model.parent, gguf_file=demo_model.name)


def test_demo_model_as_transformers(tokenizer: Tokenizer, reference: Any) -> None:
    """transformers ignores "smollm"; the model's own tokenizer.json cuts out each digit before all else."""
    source = Path(__file__).read_text(encoding="utf-8")
    for text in (*TEXTS, source):
        if not cut_at_digits_matters(text):
            assert tokenizer.encode(text).ids == reference(text).input_ids, text
    reference.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for text in (*TEXTS, "a  12   345\n\n6", source):
        found = tokenizer.encode(text).ids
        assert found == reference(text).input_ids, text
        assert tokenizer.decode(found, skip_special_tokens=False) == text


def test_demo_model_builds_fast(demo_model: Path) -> None:
    started = time.thread_time()
    build_gguf_tokenizer(demo_model, read_gguf_file(demo_model).metadata)
    assert time.thread_time() - started < 0.5


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "tekken", "gpt-2"])
def test_cuts_text_as_transformers(tmp_path: Path, pre: str) -> None:
    path = make_tiny_gguf(tmp_path / "m.gguf", metadata={"tokenizer.ggml.pre": pre})
    ours = build_gguf_tokenizer(path, read_gguf_file(path).metadata).pre_tokenizer
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name).backend_tokenizer.pre_tokenizer
    for text in (*TEXTS, "a  12   345\n\n6 HelloWorld camelCase"):
        assert ours.pre_tokenize_str(text) == theirs.pre_tokenize_str(text), text


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("smollm", "a 123", ["a", "Ġ", "1", "2", "3"]),
        ("llama-bpe", "a 12345", ["a", "Ġ", "123", "45"]),
        ("qwen2", "a 12", ["a", "Ġ", "1", "2"]),
        ("deepseek-coder", "def f1():\n", ["def", "Ġf", "1", "():", "Ċ"]),
        ("gpt-2", "a 123", ["a", "Ġ123"]),
    ],
)
def test_pieces(pre: str, text: str, pieces: list[str]) -> None:
    found = bytes_vocabulary(pre=pre).pre_tokenizer.pre_tokenize_str(text)
    assert [piece for piece, _ in found] == pieces


@pytest.mark.parametrize(
    ("changes", "before", "after"),
    [
        ({}, [], []),
        ({"pre": "llama-bpe"}, [0], []),
        ({"pre": "llama-bpe", "add_bos_token": False}, [], []),
        ({"add_bos_token": True, "add_eos_token": True}, [0], [1]),
        ({"add_bos_token": True, "bos_token_id": None}, [], []),
    ],
)
def test_what_is_put_around_a_text(changes: dict[str, Any], before: list[int], after: list[int]) -> None:
    tokenizer = bytes_vocabulary(**changes)
    inner = tokenizer.encode("this", add_special_tokens=False).ids
    assert tokenizer.encode("this").ids == [*before, *inner, *after]


def test_user_defined_tokens_are_whole_and_are_text() -> None:
    tokens = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "<think>"]
    tokenizer = build(
        model="gpt2", pre="gpt-2", tokens=[*tokens, "th"], merges=["t h"], token_type=[3, 3] + [1] * 256 + [4, 1]
    )
    found = tokenizer.encode("a<think>th").ids
    assert found[1:] == [258, 259]
    assert tokenizer.decode(found, skip_special_tokens=True) == "a<think>th"


def test_unknown_pre_tokenizer_is_named() -> None:
    error = refused(pre="kimi-k2")
    assert (error.code, error.found) == ("unsupported", "kimi-k2")
    assert "llama-bpe" in (error.expected or "")


def test_missing_pre_tokenizer_is_not_guessed() -> None:
    assert refused(pre=None).code == "unsupported"


@pytest.mark.parametrize("model", ["t5", "bert", None])
def test_unknown_model_is_named(model: str | None) -> None:
    error = refused(model=model)
    assert (error.code, error.found) == ("unsupported", str(model))


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": None},
        {"tokens": []},
        {"tokens": [1, 2]},
        {"merges": None},
        {"merges": ["t"]},
        {"merges": ["zz yy"]},
        {"token_type": [1]},
        {"token_type": "x"},
        {"bos_token_id": 9999},
    ],
)
def test_parts_that_do_not_fit(changes: dict[str, Any]) -> None:
    assert refused(**changes).code == "invalid"


def naive_sentencepiece(text: str) -> list[str]:
    """Merges the adjacent pair that makes the best token, as long as there is one."""
    scores = {token: -float(number) for number, token in enumerate(SPM_WORDS)}
    pieces = list("▁" + text.replace(" ", "▁"))
    while True:
        candidates = [
            (scores[left + right], -place)
            for place, (left, right) in enumerate(itertools.pairwise(pieces))
            if left + right in scores
        ]
        if not candidates:
            return pieces
        place = -max(candidates)[1]
        pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]


@pytest.mark.parametrize("text", ["hello", "hello world", "hell or world", "lllo ello  hello", "wwor ▁hello", " hello"])
def test_sentencepiece_merges_by_score(text: str) -> None:
    tokenizer = sentencepiece()
    assert tokenizer.encode(text, add_special_tokens=False).tokens == naive_sentencepiece(text)


def test_sentencepiece_falls_back_to_bytes() -> None:
    tokenizer = sentencepiece()
    encoding = tokenizer.encode("hé\n")
    assert encoding.tokens == ["<s>", "▁", "h", "<0xC3>", "<0xA9>", "<0x0A>"]
    assert tokenizer.decode(encoding.ids) == "hé\n"


def test_sentencepiece_space_before_the_text() -> None:
    assert sentencepiece().encode("hello").tokens == ["<s>", "▁hello"]
    without = sentencepiece(add_space_prefix=False)
    assert without.encode("hello").tokens == ["<s>", "he", "llo"]
    assert without.decode(without.encode(" hello").ids) == " hello"
    assert sentencepiece().decode(sentencepiece().encode(" hello").ids) == " hello"


def test_sentencepiece_special_tokens() -> None:
    encoding = sentencepiece().encode("hello</s>hello")
    assert encoding.tokens == ["<s>", "▁hello", "</s>", "▁hello"]


@pytest.mark.parametrize("scores", [None, [0.0], "x"])
def test_sentencepiece_without_scores(scores: Any) -> None:
    with pytest.raises(CheckpointError) as caught:
        sentencepiece(scores=scores)
    assert caught.value.code == "invalid"


def test_merges_put_the_best_token_first() -> None:
    tokens, scores = ["a", "b", "ab", "abb", "bb"], [0.0, 0.0, -2.0, -1.0, -3.0]
    assert merges_from_scores(tokens, scores) == [("ab", "b"), ("a", "bb"), ("a", "b"), ("b", "b")]


def test_tokens_too_long_to_look_for_merges_in() -> None:
    with pytest.raises(ValueError, match="too long"):
        merges_from_scores(["a" * 100_000], [0.0])
