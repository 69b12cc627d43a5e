"""Whether a checkpoint's tokenizer and chat template are there. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass

from loader.chat_template import choose_template, folder_templates, gguf_templates
from loader.checkpoint import Checkpoint
from loader.errors import CheckpointError, unreadable
from loader.files import foreign_file_error, read_head, read_json_object

_REMEDY = "download the model's tokenizer too"


@dataclass(frozen=True, slots=True)
class TextSide:
    """What a look at the files tells; `errors` say what is missing or damaged."""

    has_tokenizer: bool
    has_chat_template: bool
    errors: tuple[CheckpointError, ...]


def look_at_text_side(checkpoint: Checkpoint) -> TextSide:
    """Looks at the ends of the tokenizer's file. Building the tokenizer would take longer than all else of a check."""
    errors = []
    tokenizer = _tokenizer_error(checkpoint)
    if tokenizer is not None:
        errors.append(tokenizer)
    templates: Mapping[str, str] = {}
    try:
        templates = _templates(checkpoint)
    except CheckpointError as error:
        errors.append(error)
    return TextSide(tokenizer is None, choose_template(templates) is not None, tuple(errors))


def _tokenizer_error(checkpoint: Checkpoint) -> CheckpointError | None:
    path = checkpoint.path
    if checkpoint.format == "gguf":
        if "tokenizer.ggml.tokens" in checkpoint.gguf_metadata:
            return None
        return CheckpointError("not_found", f"{path} holds no tokenizer", _REMEDY, file=path)
    file = path / "tokenizer.json"
    if not file.is_file():
        return CheckpointError("not_found", f"{path} has no tokenizer.json", _REMEDY, file=file)
    try:
        foreign = foreign_file_error(file, read_head(file), "a tokenizer")
        if foreign is not None:
            return foreign
        with file.open("rb") as stream:
            stream.seek(max(0, file.stat().st_size - 64))
            is_whole = stream.read().rstrip().endswith(b"}")
    except CheckpointError as error:
        return error
    except OSError as error:
        return unreadable(file, error)
    if is_whole:
        return None
    return CheckpointError("invalid", f"{file} is cut off or damaged", "download the file again", file=file)


def _templates(checkpoint: Checkpoint) -> Mapping[str, str]:
    if checkpoint.format == "gguf":
        return gguf_templates(checkpoint.path, checkpoint.gguf_metadata)
    path = checkpoint.path / "tokenizer_config.json"
    return folder_templates(checkpoint.path, read_json_object(path) if path.exists() else {})
