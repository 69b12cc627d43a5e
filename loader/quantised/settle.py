"""What becomes of a checkpoint's weights in memory: kept as stored, made whole, or rounded. Imports no torch."""

from dataclasses import replace
from typing import Literal, get_args

from loader.checkpoint import Checkpoint
from loader.errors import CheckpointError
from loader.layout import Embedding, Linear, parameters
from loader.quantised.config import Quantisation
from loader.quantised.roundings import Rounding
from loader.quantised.schemes import BLOCK_FORMS, BlockScheme, Scheme
from loader.shares import RankPlace

Quantize = Literal["auto", "none", "int8", "int4", "fp8"]
QUANTIZE: tuple[Quantize, ...] = get_args(Quantize)
"""auto keeps weights as they are stored; none makes all of them whole; the others round what is whole."""
GGUF_METHOD = "gguf"


def settle(checkpoint: Checkpoint, quantize: Quantize) -> tuple[Checkpoint, Rounding | None]:
    """The checkpoint as it is to be read, and what its unquantised weights are rounded to.

    Of a GGUF, whose blocks can be read either way, the config says from now on which. Raises CheckpointError
    "unsupported" where weights of another form, or of transformers' definition of a model, are to be anything but what
    they are.
    """
    if quantize == "auto":
        return _kept(checkpoint), None
    if _is_gguf(checkpoint):
        checkpoint = replace(checkpoint, config=replace(checkpoint.config, quantisation=None))
    rounding = None if quantize == "none" else quantize
    check_rounding(checkpoint, rounding)
    if checkpoint.config.quantisation is not None:
        raise _quantised_by(checkpoint, checkpoint.config.quantisation.method, "made whole")
    return checkpoint, rounding


def check_rounding(checkpoint: Checkpoint, rounding: Rounding | None) -> None:
    """Raises CheckpointError "unsupported" for a rounding of a checkpoint that is quantised already, or of a model that
    is run by transformers' definition of it, which takes weights as they are."""
    config, quantisation = checkpoint.config, checkpoint.config.quantisation
    if rounding is not None and config.other is not None:
        raise CheckpointError(
            "unsupported",
            f"{checkpoint.path}: {config.architecture} is none of our own models: its weights cannot be rounded",
            "leave out quantize",
            file=checkpoint.path,
            found=config.architecture,
        )
    if rounding is not None and quantisation is not None:
        raise _quantised_by(checkpoint, quantisation.method, f"rounded to {rounding} too")


def _quantised_by(checkpoint: Checkpoint, method: str, what: str) -> CheckpointError:
    return CheckpointError(
        "unsupported",
        f"{checkpoint.path} is quantised by {method}: its weights cannot be {what}",
        "leave out quantize, or use the unquantised model",
        file=checkpoint.path,
        expected="unquantised weights",
        found=method,
    )


def _is_gguf(checkpoint: Checkpoint) -> bool:
    quantisation = checkpoint.config.quantisation
    return quantisation is not None and quantisation.method == GGUF_METHOD


def _kept(checkpoint: Checkpoint) -> Checkpoint:
    """The same with a scheme for each product, and the embedding, that is stored in blocks of a GGUF."""
    config = checkpoint.config
    if config.quantisation is not None or config.other is not None:
        return checkpoint
    schemes: dict[str, Scheme] = {}
    for part in parameters(config, RankPlace()):
        if isinstance(part, Linear | Embedding):
            stored = checkpoint.tensors.get(f"{part.name}.weight")
            if stored is not None and stored.dtype in BLOCK_FORMS:
                schemes[part.name] = BlockScheme(stored.dtype)
    if not schemes:
        return checkpoint
    return replace(checkpoint, config=replace(config, quantisation=Quantisation(GGUF_METHOD, schemes)))
