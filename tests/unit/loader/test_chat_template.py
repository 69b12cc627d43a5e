import json
from pathlib import Path

import pytest

from loader.chat_template import choose_template, folder_templates, gguf_templates
from loader.errors import CheckpointError


def test_none(tmp_path: Path) -> None:
    assert folder_templates(tmp_path, {}) == {}
    assert choose_template({}) is None


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("a", {"default": "a"}),
        (
            [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}],
            {"default": "a", "tool_use": "b"},
        ),
        ({"rag": "c"}, {"rag": "c"}),
        (None, {}),
    ],
)
def test_in_the_tokenizer_config(tmp_path: Path, value: object, expected: dict[str, str]) -> None:
    assert folder_templates(tmp_path, {"chat_template": value}) == expected


def test_files_go_first(tmp_path: Path) -> None:
    config = {"chat_template": "from config"}
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "from json"}))
    assert folder_templates(tmp_path, config)["default"] == "from json"
    (tmp_path / "chat_template.jinja").write_text("from jinja")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")
    assert folder_templates(tmp_path, config) == {"default": "from jinja", "tool_use": "with tools"}


def test_in_a_gguf(tmp_path: Path) -> None:
    metadata = {
        "tokenizer.chat_template": "a",
        "tokenizer.chat_template.tool_use": "b",
        "tokenizer.chat_templates": ["tool_use"],
    }
    assert gguf_templates(tmp_path, metadata) == {"default": "a", "tool_use": "b"}


@pytest.mark.parametrize(
    ("templates", "expected"),
    [({"default": "a", "x": "b"}, "a"), ({"x": "b"}, "b"), ({"x": "b", "y": "c"}, None)],
)
def test_which_one_is_used(templates: dict[str, str], expected: str | None) -> None:
    assert choose_template(templates) == expected


@pytest.mark.parametrize("value", [5, ["a"], [{"name": "x"}], [{"name": 1, "template": "a"}], {"a": 1}])
def test_what_is_no_template(tmp_path: Path, value: object) -> None:
    with pytest.raises(CheckpointError) as caught:
        folder_templates(tmp_path, {"chat_template": value})
    assert caught.value.file == tmp_path / "tokenizer_config.json"


def test_template_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xff")
    with pytest.raises(CheckpointError, match="not UTF-8"):
        folder_templates(tmp_path, {})
