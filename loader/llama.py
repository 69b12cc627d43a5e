"""The tensors that a checkpoint of a decoder must hold. Imports no torch."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from loader.config import ModelConfig
from loader.errors import CheckpointError
from loader.tensors import TensorInfo

# Written by old exporters; computed from the config, never read.
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".attn.masked_bias")


def expected_tensors(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes, in the Hugging Face way: a linear layer is [out, in]."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", (hidden,)
        for name, rows in (("q", q_size), ("k", kv_size), ("v", kv_size)):
            yield f"{prefix}self_attn.{name}_proj.weight", (rows, hidden)
            if config.qkv_bias:
                yield f"{prefix}self_attn.{name}_proj.bias", (rows,)
        if config.qk_norm:
            yield prefix + "self_attn.q_norm.weight", (config.head_dim,)
            yield prefix + "self_attn.k_norm.weight", (config.head_dim,)
        yield prefix + "self_attn.o_proj.weight", (hidden, q_size)
        if config.output_bias:
            yield prefix + "self_attn.o_proj.bias", (hidden,)
        yield prefix + "post_attention_layernorm.weight", (hidden,)
        for name, rows, columns in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
            yield f"{prefix}mlp.{name}_proj.weight", (rows, columns)
            if config.mlp_bias:
                yield f"{prefix}mlp.{name}_proj.bias", (rows,)
    yield "model.norm.weight", (hidden,)
    if not config.tie_word_embeddings:
        yield "lm_head.weight", (config.vocab_size, hidden)


def check_tensors(path: Path, config: ModelConfig, tensors: Mapping[str, TensorInfo]) -> None:
    """Holds the stored tensors against what the config implies.

    Raises CheckpointError "invalid" for one that is missing, has another shape or has no place in the model: a
    tensor left unread is how a model comes to answer nonsense.
    """
    expected = dict(expected_tensors(config))
    for name, shape in expected.items():
        stored = tensors.get(name)
        if stored is None:
            raise missing_tensor(path, name, shape, len(tensors))
        if stored.shape != shape:
            raise wrong_shape(stored, shape)
    for name, stored in tensors.items():
        if name in expected or name.endswith(_IGNORED_SUFFIXES):
            continue
        if name == "lm_head.weight" and config.tie_word_embeddings:
            if stored.shape != expected["model.embed_tokens.weight"]:
                raise wrong_shape(stored, expected["model.embed_tokens.weight"])
            continue
        raise CheckpointError(
            "invalid",
            f"{stored.file} holds tensor {stored.stored_name!r}, which {config.architecture} with this config "
            "has no place for",
            "check that config and weights belong together",
            file=stored.file,
            tensor=name,
            expected="no such tensor",
            found=f"{stored.dtype} {list(stored.shape)}",
        )


def missing_tensor(path: Path, name: str, shape: tuple[int, ...], num_tensors: int) -> CheckpointError:
    """The error for a tensor the checkpoint lacks."""
    remedy = "check that config and weights belong together, and that no file is missing"
    if name == "lm_head.weight":
        remedy = "set tie_word_embeddings to true if the model shares its embedding, or use the whole checkpoint"
    return CheckpointError(
        "invalid",
        f"{path} has no tensor {name!r} among its {num_tensors}",
        remedy,
        file=path,
        tensor=name,
        expected=str(list(shape)),
        found="nothing",
    )


def wrong_shape(stored: TensorInfo, shape: tuple[int, ...]) -> CheckpointError:
    """The error for a tensor whose shape is not what the model needs."""
    remedy = "check that config and weights belong together"
    if stored.name in ("model.embed_tokens.weight", "lm_head.weight") and stored.shape[1:] == shape[1:]:
        remedy = f"if the vocabulary was resized, set vocab_size to {stored.shape[0]}, else " + remedy
    return CheckpointError(
        "invalid",
        f"{stored.file}: tensor {stored.name!r} has the shape {list(stored.shape)}, expected {list(shape)}",
        remedy,
        file=stored.file,
        tensor=stored.name,
        expected=str(list(shape)),
        found=str(list(stored.shape)),
    )
