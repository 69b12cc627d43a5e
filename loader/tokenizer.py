"""The tokenizer of a checkpoint, whatever its format. Imports no torch."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from loader.chat_template import choose_template, folder_templates, gguf_templates
from loader.checkpoint import Checkpoint
from loader.errors import CheckpointError
from loader.files import decode_text, read_json_object, read_small
from loader.gguf_tokenizer import build_gguf_tokenizer
from loader.guard import refuse_failures

_MAX_TOKENIZER_BYTES = 256 << 20
# Words, digits, spaces, line ends, and letters of one to four bytes: some damage shows only when text is cut.
_PROBE = "Hello, world 12!\n  \u00e9\u4e16 \U0001f600"
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class TokenizerBundle:
    """A tokenizer and what goes with it.

    `chat_template` is the one to use when none is asked for; `chat_templates` holds all by name. `bos_token` and
    `eos_token` are the texts that templates are given. `special_token_ids` are those left out of readable text.
    `vocab_size` counts the tokens the tokenizer knows, which may be fewer than the model's rows.
    """

    tokenizer: Tokenizer = field(repr=False)
    chat_template: str | None
    chat_templates: Mapping[str, str] = field(repr=False)
    bos_token: str | None
    eos_token: str | None
    special_token_ids: frozenset[int]
    vocab_size: int


def load_tokenizer(checkpoint: Checkpoint) -> TokenizerBundle:
    """Reads or builds the tokenizer. It neither pads nor truncates.

    Raises CheckpointError: "not_found" when the files have none, "invalid" when it is damaged, "unsupported" when
    it is of a kind we do not have.
    """
    bundle = _from_gguf(checkpoint) if checkpoint.format == "gguf" else _from_folder(checkpoint)
    path = checkpoint.path if checkpoint.format == "gguf" else checkpoint.path / "tokenizer.json"
    with refuse_failures(path, "holds a tokenizer that fails on a text", "download the file again"):
        bundle.tokenizer.decode(bundle.tokenizer.encode(_PROBE).ids)
    return bundle


def _from_gguf(checkpoint: Checkpoint) -> TokenizerBundle:
    tokenizer = build_gguf_tokenizer(checkpoint.path, checkpoint.gguf_metadata)
    templates = gguf_templates(checkpoint.path, checkpoint.gguf_metadata)
    return _bundle(checkpoint, tokenizer, templates, {})


def _from_folder(checkpoint: Checkpoint) -> TokenizerBundle:
    folder = checkpoint.path
    config_path = folder / "tokenizer_config.json"
    config = read_json_object(config_path) if config_path.exists() else {}
    tokenizer = _read_tokenizer(folder)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    named = _named_tokens(folder, config)
    _mark_special(tokenizer, named.values())
    return _bundle(checkpoint, tokenizer, folder_templates(folder, config), named)


def _read_tokenizer(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.exists():
        raise CheckpointError(
            "not_found",
            f"{folder} has no tokenizer.json",
            "download it, or write it once with transformers: "
            f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})",
            file=path,
        )
    text = decode_text(path, read_small(path, _MAX_TOKENIZER_BYTES))
    with refuse_failures(path, "is not a tokenizer", "download the file again"):
        return Tokenizer.from_str(text)


def _named_tokens(folder: Path, config: Mapping[str, object]) -> dict[str, str]:
    """The tokens that tokenizer_config.json, or the older special_tokens_map.json, gives a role."""
    map_path = folder / "special_tokens_map.json"
    older = read_json_object(map_path) if map_path.exists() else {}
    named = {}
    for role in _NAMED_TOKENS:
        token = config.get(role, older.get(role))
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            named[role] = token
    return named


def _mark_special(tokenizer: Tokenizer, tokens: Iterable[str]) -> None:
    """A token with a role is special even where tokenizer.json does not say so; none is added to the vocabulary."""
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    missing = [token for token in tokens if token not in special and tokenizer.token_to_id(token) is not None]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in missing])


def _bundle(
    checkpoint: Checkpoint, tokenizer: Tokenizer, templates: Mapping[str, str], named: Mapping[str, str]
) -> TokenizerBundle:
    config = checkpoint.config
    special = {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    bos = named.get("bos_token") or _token_text(tokenizer, config.bos_token_id)
    eos = named.get("eos_token") or _token_text(tokenizer, next(iter(config.eos_token_ids), None))
    special.update(
        number for number in (tokenizer.token_to_id(token) for token in (bos, eos) if token) if number is not None
    )
    return TokenizerBundle(
        tokenizer=tokenizer,
        chat_template=choose_template(templates),
        chat_templates=templates,
        bos_token=bos,
        eos_token=eos,
        special_token_ids=frozenset(special),
        vocab_size=tokenizer.get_vocab_size(with_added_tokens=True),
    )


def _token_text(tokenizer: Tokenizer, number: int | None) -> str | None:
    return None if number is None else tokenizer.id_to_token(number)
