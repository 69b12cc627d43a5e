"""Whether a checkpoint holds the tensors that its model needs, and no others. Imports no torch."""

from collections.abc import Mapping
from pathlib import Path

from loader.config import ModelConfig
from loader.errors import CheckpointError
from loader.layout import expected_tensors
from loader.tensors import TensorInfo

# Written by old exporters; computed from the config, never read.
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".attn.masked_bias")


def check_tensors(path: Path, config: ModelConfig, tensors: Mapping[str, TensorInfo]) -> None:
    """Holds the stored tensors against what the config implies.

    Raises CheckpointError "invalid" for one that is missing, has another shape or has no place in the model: a
    tensor left unread is how a model comes to answer nonsense.
    """
    expected = expected_tensors(config)
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
