"""The collectives that layers call."""

from typing import Protocol

import torch


class Collectives(Protocol):
    """What layers need of the tensor-parallel group; called only when it has more than one rank."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in the same shape; may reuse `tensor`."""
        ...

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """All ranks' tensors joined along the last dimension, in order of rank."""
        ...
