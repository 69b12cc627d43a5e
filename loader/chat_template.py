"""Where checkpoints keep chat templates. The text only: rendering, in a sandbox, is the caller's. Imports no torch."""

from collections.abc import Mapping
from pathlib import Path

from loader.errors import CheckpointError
from loader.files import decode_text, read_json_object, read_small

DEFAULT = "default"
_MAX_TEMPLATE_BYTES = 4 << 20
_GGUF_KEY = "tokenizer.chat_template"


def folder_templates(folder: Path, tokenizer_config: Mapping[str, object]) -> dict[str, str]:
    """Chat templates by name, of a directory: files of their own go before tokenizer_config.json."""
    config_path = folder / "tokenizer_config.json"
    templates = _named(config_path, tokenizer_config.get("chat_template"))
    json_path = folder / "chat_template.json"
    if json_path.exists():
        templates.update(_named(json_path, read_json_object(json_path).get("chat_template")))
    files = {DEFAULT: folder / "chat_template.jinja"}
    files.update((path.stem, path) for path in sorted((folder / "additional_chat_templates").glob("*.jinja")))
    for name, path in files.items():
        if path.exists():
            templates[name] = decode_text(path, read_small(path, _MAX_TEMPLATE_BYTES))
    return templates


def gguf_templates(path: Path, metadata: Mapping[str, object]) -> dict[str, str]:
    """Chat templates by name, of a GGUF."""
    templates = _named(path, metadata.get(_GGUF_KEY))
    prefix = _GGUF_KEY + "."
    for key, value in metadata.items():
        if key.startswith(prefix):
            templates.update(_named(path, value, key.removeprefix(prefix)))
    return templates


def choose_template(templates: Mapping[str, str]) -> str | None:
    """The template to use when none is asked for by name."""
    if DEFAULT in templates or not templates:
        return templates.get(DEFAULT)
    return next(iter(templates.values())) if len(templates) == 1 else None


def _named(path: Path, value: object, name: str = DEFAULT) -> dict[str, str]:
    """A template stands alone, or in a list of {name, template}, or in an object by name."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {name: value}
    if isinstance(value, list) and all(isinstance(item, dict) and isinstance(item.get("name"), str) for item in value):
        value = {item["name"]: item.get("template") for item in value}
    if isinstance(value, dict) and all(isinstance(text, str) for pair in value.items() for text in pair):
        return dict(value)
    raise CheckpointError(
        "invalid",
        f"{path} has a chat template that is no text, and no list of named texts",
        "download the file again",
        file=path,
        expected="a text",
        found=type(value).__name__,
    )
