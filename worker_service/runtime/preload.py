"""The check before a load: what headers tell of this rank's part, before any tensor is read."""

import torch

from loader.checkpoint import Checkpoint
from loader.needs import RankNeeds, rank_needs
from loader.shares import RankPlace
from worker_service.runtime.errors import RuntimeFailure
from worker_service.runtime.memory import device_memory


def check_before_load(
    checkpoint: Checkpoint, place: RankPlace, dtype: torch.dtype, device: torch.device, memory_fraction: float
) -> RankNeeds:
    """What the rank at `place` needs of an opened checkpoint, held in `dtype`.

    Raises CheckpointError for a tensor of its part that is missing or has another shape; RuntimeFailure "unsupported"
    for sizes that cannot split the model, "out_of_memory" where the weights alone exceed what the process may use.
    What is free now is not asked: weights that are kept for a restart count as used, and are taken over.
    """
    try:
        needs = rank_needs(checkpoint, place, str(dtype).removeprefix("torch."))
    except ValueError as error:
        raise RuntimeFailure("unsupported", f"the model cannot be split over these ranks: {error}") from error
    limit = int(device_memory(device).total_bytes * memory_fraction)
    if needs.weight_bytes > limit:
        raise RuntimeFailure(
            "out_of_memory",
            f"the weights of {checkpoint.path} take {needs.weight_bytes} bytes, and this process may use {limit} of "
            f"{device}; raise memory_fraction, or use more ranks or a smaller model",
            {
                "device": str(device),
                "needed_bytes": str(needs.weight_bytes),
                "limit_bytes": str(limit),
                "expected": f"at most {limit} bytes",
                "found": f"{needs.weight_bytes} bytes",
                "file": str(checkpoint.path),
            },
        )
    return needs
