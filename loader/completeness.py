"""Whether a checkpoint holds the tensors that its model needs, and no others. Imports no torch."""

from collections.abc import Mapping
from pathlib import Path

from loader.config import ModelConfig
from loader.errors import CheckpointError
from loader.layout import weight_slices
from loader.shares import RankPlace
from loader.tensors import TensorInfo

# Written by old exporters; computed from the config, never read.
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".attn.masked_bias")
_LAYERS = "model.layers."


def check_tensors(path: Path, config: ModelConfig, tensors: Mapping[str, TensorInfo]) -> None:
    """Holds the stored tensors against what the config implies.

    Raises CheckpointError "invalid" for one that is missing, has another shape or, of a quantised weight, another
    type, or has no place in the model: a tensor left unread is how a model comes to answer nonsense.
    """
    expected = {want.name: want for want in weight_slices(config, RankPlace())}
    for name, want in expected.items():
        stored = tensors.get(name)
        if stored is None:
            raise missing_tensor(path, name, want.shape, len(tensors))
        if stored.shape != want.shape:
            raise wrong_shape(stored, want.shape)
        if want.dtypes and stored.dtype not in want.dtypes:
            raise _wrong_type(stored, want.dtypes)
    for name, stored in tensors.items():
        if name in expected or name.endswith(_IGNORED_SUFFIXES) or is_unused(name, config):
            continue
        if name == "lm_head.weight" and config.tie_word_embeddings:
            embedding = expected["model.embed_tokens.weight"].shape
            if stored.shape != embedding:
                raise wrong_shape(stored, embedding)
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


def is_unused(name: str, config: ModelConfig) -> bool:
    """Whether a tensor belongs to one of the layers after the last, which only speculation would use."""
    if not config.num_unused_layers or not name.startswith(_LAYERS):
        return False
    number = name[len(_LAYERS) :].partition(".")[0]
    layers = range(config.num_layers, config.num_layers + config.num_unused_layers)
    return number.isascii() and number.isdigit() and len(number) < 6 and int(number) in layers


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


def _wrong_type(stored: TensorInfo, dtypes: tuple[str, ...]) -> CheckpointError:
    expected = " or ".join(dtypes)
    return CheckpointError(
        "invalid",
        f"{stored.file}: tensor {stored.name!r} is stored as {stored.dtype}, expected {expected}",
        "check that the quantisation settings and the weights belong together",
        file=stored.file,
        tensor=stored.name,
        expected=expected,
        found=stored.dtype,
    )
