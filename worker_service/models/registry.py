"""Which class computes which family of models."""

from collections.abc import Mapping

from loader.config import ModelConfig
from loader.errors import CheckpointError
from loader.families import FAMILIES
from loader.shares import RankPlace
from worker_service.models.collectives import Collectives
from worker_service.models.decoder import Decoder
from worker_service.models.model import Model

# Families differ in what their configs say, which one class computes.
MODEL_CLASSES: Mapping[str, type[Decoder]] = {family.name: Decoder for family in FAMILIES.values()}


def build_model(config: ModelConfig, place: RankPlace, group: Collectives | None) -> Model:
    """The model of a config, without weights.

    Raises CheckpointError for a family that is not known, ValueError for one that cannot be split over the group.
    """
    if config.other is not None:
        return _other_model(config, place, group)
    model_class = MODEL_CLASSES.get(config.family)
    if model_class is None:
        raise CheckpointError(
            "unsupported",
            f"architecture {config.architecture} (family {config.family!r}) is not supported",
            f"use a checkpoint of one of these families: {', '.join(MODEL_CLASSES)}",
            expected=", ".join(MODEL_CLASSES),
            found=config.family,
        )
    return model_class(config, place, group)


def _other_model(config: ModelConfig, place: RankPlace, group: Collectives | None) -> Model:
    try:
        # Takes seconds, and is not installed everywhere.
        from worker_service.models.transformers_path import TransformersModel
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "transformers":
            raise
        raise CheckpointError(
            "unsupported",
            f"architecture {config.architecture} is run by transformers' definition of it, and transformers is not "
            "installed here",
            'pip install "stepwire[transformers]" where the worker runs',
            expected=", ".join(MODEL_CLASSES),
            found=config.architecture,
        ) from error
    return TransformersModel(config, place, group)
