import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from loader.checkpoint import open_checkpoint
from loader.errors import CheckpointError
from loader.tokenizer import TokenizerBundle, load_tokenizer
from tests.support.sample_texts import TEXTS
from tests.support.tiny_checkpoint import CHAT_TEMPLATE, SPECIAL_TOKENS, make_tiny_llama
from tests.support.tiny_gguf import make_tiny_gguf


def load(folder: Path) -> TokenizerBundle:
    return load_tokenizer(open_checkpoint(folder))


def refused(folder: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    return caught.value


def change(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**content, **changes}))


def ids(bundle: TokenizerBundle, text: str) -> list[int]:
    found: list[int] = bundle.tokenizer.encode(text).ids
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_llama(tmp_path)


def test_folder(folder: Path) -> None:
    bundle = load(folder)
    assert (bundle.bos_token, bundle.eos_token) == SPECIAL_TOKENS[1:]
    assert bundle.special_token_ids == {0, 1, 2}
    assert bundle.vocab_size == 320
    assert bundle.chat_template == CHAT_TEMPLATE


# tokenizer.json alone says what is put around a text.
@pytest.mark.parametrize("changes", [{}, {"add_bos_token": True}, {"add_eos_token": False}])
def test_folder_as_transformers(folder: Path, changes: dict[str, Any]) -> None:
    change(folder / "tokenizer_config.json", **changes)
    bundle, reference = load(folder), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert ids(bundle, text) == reference(text).input_ids, text
    assert bundle.special_token_ids == set(reference.all_special_ids)


def test_what_tokenizer_json_puts_around_a_text(folder: Path) -> None:
    tokenizer = load(folder).tokenizer
    tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    found = ids(load(folder), "a")
    assert (found[0], found[-1]) == (1, 2)
    assert found == AutoTokenizer.from_pretrained(folder)("a").input_ids


def test_gguf_and_folder_agree(folder: Path, tmp_path: Path) -> None:
    from_gguf = load(make_tiny_gguf(tmp_path / "m.gguf"))
    from_folder = load(folder)
    for text in TEXTS:
        assert ids(from_gguf, text) == ids(from_folder, text)
        assert from_gguf.tokenizer.decode(ids(from_gguf, text)) == from_folder.tokenizer.decode(ids(from_folder, text))
    assert (from_gguf.bos_token, from_gguf.eos_token) == (from_folder.bos_token, from_folder.eos_token)
    assert from_gguf.special_token_ids == from_folder.special_token_ids
    assert from_gguf.chat_template == from_folder.chat_template


def test_text_survives(folder: Path) -> None:
    tokenizer = load(folder).tokenizer
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_neither_truncates_nor_pads(folder: Path) -> None:
    truncation = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    padding = {
        "strategy": {"Fixed": 16},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<|endoftext|>",
    }
    plain = load(folder)
    change(folder / "tokenizer.json", truncation=truncation, padding=padding)
    bundle = load(folder)
    for text in ("a", "a" * 100):
        assert ids(bundle, text) == ids(plain, text)


def test_token_with_a_role_is_special(folder: Path) -> None:
    change(folder / "tokenizer.json", added_tokens=[])
    bundle = load(folder)
    assert {1, 2} <= bundle.special_token_ids
    assert ids(bundle, "a<|im_end|>")[-1] == 2


def test_roles_as_objects_and_in_the_older_file(folder: Path) -> None:
    change(folder / "tokenizer_config.json", eos_token={"content": "<|endoftext|>", "special": True}, bos_token=None)
    content = json.loads((folder / "tokenizer_config.json").read_text())
    del content["bos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    change(folder / "special_tokens_map.json", bos_token={"content": "<|im_end|>"})
    bundle = load(folder)
    assert (bundle.bos_token, bundle.eos_token) == ("<|im_end|>", "<|endoftext|>")


def test_roles_from_config_when_nothing_names_them(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    bundle = load(folder)
    assert (bundle.bos_token, bundle.eos_token) == SPECIAL_TOKENS[1:]
    assert bundle.chat_template is None


def test_role_that_is_no_token_adds_none(folder: Path) -> None:
    change(folder / "tokenizer_config.json", pad_token="<|absent|>", bos_token="<|absent|>")
    bundle = load(folder)
    assert bundle.vocab_size == 320
    assert bundle.special_token_ids == {0, 1, 2}


def test_no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    error = refused(folder)
    assert (error.code, error.file) == ("not_found", folder / "tokenizer.json")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"{", "not a tokenizer"),
        (b"{}", "not a tokenizer"),
        (b"\xff\xfe", "not UTF-8"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git-LFS"),
    ],
)
def test_broken_tokenizer(folder: Path, content: bytes, text: str) -> None:
    (folder / "tokenizer.json").write_bytes(content)
    assert text in refused(folder).message


def test_broken_tokenizer_config(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text("[")
    assert refused(folder).file == folder / "tokenizer_config.json"


@pytest.mark.parametrize("charsmap", ["AAAA", "AQAAAAE="], ids=["when read", "when used"])
def test_tokenizer_that_panics(folder: Path, charsmap: str) -> None:
    """A panic of the library is no Exception, and would end more than the load."""
    content = json.loads((folder / "tokenizer.json").read_text())
    content["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": charsmap}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    error = refused(folder)
    assert (error.code, error.file) == ("invalid", folder / "tokenizer.json")
