"""The check before a load: what headers tell of this rank's part, before any tensor is read."""

import structlog
import torch

from loader.checkpoint import Checkpoint
from loader.needs import RankNeeds, rank_needs
from loader.quantised.roundings import Rounding
from loader.shares import RankPlace
from worker_service.runtime.errors import RuntimeFailure
from worker_service.runtime.holders import text_of_bytes

_log = structlog.stdlib.get_logger(__name__)


def check_before_load(
    checkpoint: Checkpoint,
    place: RankPlace,
    dtype: torch.dtype,
    device: torch.device,
    limit_bytes: int,
    rounding: Rounding | None = None,
) -> RankNeeds:
    """What the rank at `place` needs of an opened checkpoint, held in `dtype` and with `rounding`.

    Raises CheckpointError for a tensor of its part that is missing or has another shape; RuntimeFailure "unsupported"
    for sizes that cannot split the model, "out_of_memory" where the weights alone exceed `limit_bytes`, which
    is what the process may use. What is free now is not asked: weights that are kept for a restart count as used, and
    are taken over.
    """
    try:
        needs = rank_needs(checkpoint, place, str(dtype).removeprefix("torch."), rounding=rounding)
    except ValueError as error:
        raise RuntimeFailure("unsupported", f"the model cannot be split over these ranks: {error}") from error
    _log.info("memory_reserved", weight_bytes=needs.weight_bytes, limit_bytes=limit_bytes, device=str(device))
    if needs.weight_bytes > limit_bytes:
        raise RuntimeFailure(
            "out_of_memory",
            f"the weights of {checkpoint.path} take {text_of_bytes(needs.weight_bytes)}, and this process may use "
            f"{text_of_bytes(limit_bytes)} of {device}; raise memory_fraction or memory_limit_bytes, or use more ranks "
            "or a smaller model",
            {
                "device": str(device),
                "needed_bytes": str(needs.weight_bytes),
                "limit_bytes": str(limit_bytes),
                "expected": f"at most {limit_bytes} bytes",
                "found": f"{needs.weight_bytes} bytes",
                "file": str(checkpoint.path),
            },
        )
    return needs
