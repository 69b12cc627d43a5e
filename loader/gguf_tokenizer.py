"""Builds a tokenizer from what a GGUF says of it. Imports no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from loader.errors import CheckpointError
from loader.fields import Fields
from loader.guard import refuse_failures

_PREFIX = "tokenizer.ggml."
_CONTROL, _USER_DEFINED = 3, 4
# What looking for the merges of a vocabulary may cost; those in use take a hundredth.
_MAX_CUT_LETTERS = 1 << 31
_CONVERT_AGAIN = "convert the model again with a current llama.cpp"
_SPACE = "\u2581"

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3_SPLIT = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _PreTokenizer:
    """How text is cut before merging: by `splits` in order, then, without any, by GPT-2's own expression."""

    splits: tuple[str, ...] = ()
    digits: bool = False
    gpt2_split: bool = False
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        """The steps as `tokenizers` has them."""
        steps: list[pre_tokenizers.PreTokenizer] = [
            pre_tokenizers.Split(Regex(split), behavior="isolated") for split in self.splits
        ]
        if self.digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.gpt2_split))
        return pre_tokenizers.Sequence(steps)


_GPT2 = _PreTokenizer(gpt2_split=True)
_DIGITS = _PreTokenizer(digits=True, gpt2_split=True)
_LLAMA3 = _PreTokenizer((_LLAMA3_SPLIT,), ignore_merges=True, add_bos=True)
_LLAMA3_MERGED = _PreTokenizer((_LLAMA3_SPLIT,))
_QWEN2 = _PreTokenizer((_QWEN2_SPLIT,), nfc=True)
_PRE_TOKENIZERS: Mapping[str, _PreTokenizer] = {
    **dict.fromkeys(("default", "gpt-2", "olmo", "mpt", "phi-2"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "minerva-7b"), _DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0"), _LLAMA3),
    **dict.fromkeys(("smaug-bpe", "dbrx"), _LLAMA3_MERGED),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2),
    "tekken": _PreTokenizer((_TEKKEN_SPLIT,), ignore_merges=True, add_bos=True),
    "deepseek-coder": _PreTokenizer(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"), digits=True
    ),
}


def build_gguf_tokenizer(path: Path, metadata: Mapping[str, object]) -> Tokenizer:
    """The tokenizer of a GGUF, with its special tokens and the tokens it puts around a text.

    Raises CheckpointError: "unsupported" for a kind of tokenizer we do not have, "invalid" for one that does not
    fit together.
    """
    own = {key.removeprefix(_PREFIX): value for key, value in metadata.items() if key.startswith(_PREFIX)}
    values = Fields(path, own)
    with refuse_failures(path, "has a vocabulary and merges that do not fit together", _CONVERT_AGAIN):
        return _build(values, _texts(values, "tokens"), values.text("model"))


def _build(values: Fields, tokens: Sequence[str], kind: str | None) -> Tokenizer:
    pre = _pre_tokenizer(values) if kind == "gpt2" else None
    if pre is not None:
        tokenizer = _byte_level(values, tokens, pre)
    elif kind == "llama":
        tokenizer = _sentencepiece(values, tokens)
    else:
        raise _unsupported(values.file, "tokenizer model", str(kind), ("gpt2", "llama"))
    _add_tokens(values, tokenizer, tokens)
    _add_post_processor(values, tokenizer, tokens, bos_by_default=pre is None or pre.add_bos)
    return tokenizer


def _pre_tokenizer(values: Fields) -> _PreTokenizer:
    name = values.text("pre")
    if name is None:
        # Any of a dozen ways to cut text could be meant, and a wrong one degrades answers without an error.
        raise CheckpointError(
            "unsupported",
            f"{values.file} does not say how to cut text (tokenizer.ggml.pre is missing)",
            _CONVERT_AGAIN,
            file=values.file,
            expected="tokenizer.ggml.pre",
            found="nothing",
        )
    if name not in _PRE_TOKENIZERS:
        raise _unsupported(values.file, "pre-tokenizer", name, tuple(_PRE_TOKENIZERS))
    return _PRE_TOKENIZERS[name]


def _byte_level(values: Fields, tokens: Sequence[str], pre: _PreTokenizer) -> Tokenizer:
    merges = []
    for merge in _texts(values, "merges"):
        cut = merge.find(" ", 1)
        merges.append((merge[:cut], merge[cut + 1 :]))
    tokenizer = _bpe(tokens, merges, ignore_merges=pre.ignore_merges)
    tokenizer.pre_tokenizer = pre.build()
    tokenizer.decoder = decoders.ByteLevel()
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _sentencepiece(values: Fields, tokens: Sequence[str]) -> Tokenizer:
    """Merges by score, unknown characters as bytes, and a space before the text (and after a special token)."""
    scores = values.values.get("scores")
    if not isinstance(scores, Sequence) or isinstance(scores, str) or len(scores) != len(tokens):
        raise values.error("scores", "does not give each token its score", f"{len(tokens)} numbers", "another count")
    unknown = values.token_ids("unknown_token_id", len(tokens))
    unk_token = tokens[unknown[0]] if unknown else ("<unk>" if "<unk>" in tokens else None)
    merges = merges_from_scores(tokens, scores)
    tokenizer = _bpe(tokens, merges, unk_token=unk_token, fuse_unk=True, byte_fallback=True)
    prefix = values.boolean("add_space_prefix", default=True)
    steps: list[normalizers.Normalizer] = [normalizers.Prepend(_SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    decoder: list[decoders.Decoder] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        decoder.append(decoders.Strip(content=" ", left=1))
    tokenizer.decoder = decoders.Sequence(decoder)
    return tokenizer


def merges_from_scores(tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """The pairs that make up each token, best token first: what sentencepiece does while it merges.

    Raises ValueError for tokens so long that there would be no end to it.
    """
    if sum(len(token) ** 2 for token in tokens) > _MAX_CUT_LETTERS:
        raise ValueError("the tokens are too long for a vocabulary")
    known = set(tokens)
    merges = []
    for token, score in zip(tokens, scores, strict=True):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in known and right in known:
                merges.append((score, cut, left, right))
    merges.sort(key=lambda merge: merge[:2], reverse=True)
    return [(left, right) for _, _, left, right in merges]


def _bpe(tokens: Sequence[str], merges: list[tuple[str, str]], **options: object) -> Tokenizer:
    vocab = {token: number for number, token in enumerate(tokens)}
    return Tokenizer(models.BPE(vocab=vocab, merges=merges, **options))


def _add_tokens(values: Fields, tokenizer: Tokenizer, tokens: Sequence[str]) -> None:
    """Control tokens are special; user-defined ones are matched whole too, and are text."""
    kinds = values.values.get("token_type") or ()
    if not isinstance(kinds, Sequence) or isinstance(kinds, str) or len(kinds) not in (0, len(tokens)):
        raise values.error("token_type", "does not give each token its type", f"{len(tokens)} numbers", "another count")
    added = [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, kinds, strict=False)
        if kind in (_CONTROL, _USER_DEFINED) and token
    ]
    tokenizer.add_special_tokens([token for token in added if token.special])
    tokenizer.add_tokens([token for token in added if not token.special])


def _add_post_processor(values: Fields, tokenizer: Tokenizer, tokens: Sequence[str], *, bos_by_default: bool) -> None:
    bos = values.token_ids("bos_token_id", len(tokens))
    eos = values.token_ids("eos_token_id", len(tokens))
    before = [tokens[bos[0]]] if bos and values.boolean("add_bos_token", default=bos_by_default) else []
    after = [tokens[eos[0]]] if eos and values.boolean("add_eos_token", default=False) else []
    special = [(token, tokenizer.token_to_id(token)) for token in dict.fromkeys((*before, *after))]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after], pair=[*before, "$A", *after, "$B:1"], special_tokens=special
    )


def _texts(values: Fields, name: str) -> Sequence[str]:
    texts = values.values.get(name)
    if not isinstance(texts, list) or not texts or not isinstance(texts[0], str):
        raise values.error(f"tokenizer.ggml.{name}", "is missing or holds no texts", "texts", type(texts).__name__)
    return texts


def _unsupported(path: Path, what: str, found: str, supported: tuple[str, ...]) -> CheckpointError:
    names = ", ".join(supported)
    return CheckpointError(
        "unsupported",
        f"{path}: the {what} {found[:100]!r} is not supported",
        f"use a model with one of {names}",
        file=path,
        expected=names,
        found=found[:100],
    )
