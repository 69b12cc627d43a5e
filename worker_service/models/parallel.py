"""A rank's place in its group, and the collectives that layers call."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    # Not at run time: the simulated device takes its place in a group without torch.
    import torch


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Place of this rank among the tensor- and pipeline-parallel ranks.

    Raises ValueError for a size below 1 or a rank outside its size.
    """

    tensor_rank: int = 0
    tensor_parallel_size: int = 1
    pipeline_rank: int = 0
    pipeline_parallel_size: int = 1

    def __post_init__(self) -> None:
        places = (
            ("tensor", self.tensor_rank, self.tensor_parallel_size),
            ("pipeline", self.pipeline_rank, self.pipeline_parallel_size),
        )
        for name, rank, size in places:
            if size < 1 or not 0 <= rank < size:
                raise ValueError(f"{name}_rank {rank} does not lie in a group of {size}")

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank embeds token ids."""
        return self.pipeline_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank produces logits."""
        return self.pipeline_rank == self.pipeline_parallel_size - 1

    def layer_range(self, num_layers: int) -> range:
        """The layers of this stage; sizes differ by one at most, earlier stages are the larger ones."""
        size, rest = divmod(num_layers, self.pipeline_parallel_size)
        start = self.pipeline_rank * size + min(self.pipeline_rank, rest)
        return range(start, start + size + (self.pipeline_rank < rest))


class Collectives(Protocol):
    """What layers need of the tensor-parallel group; called only when it has more than one rank."""

    def all_reduce(self, tensor: "torch.Tensor") -> "torch.Tensor":
        """The sum over all ranks, in the same shape; may reuse `tensor`."""
        ...

    def all_gather(self, tensor: "torch.Tensor") -> "torch.Tensor":
        """All ranks' tensors joined along the last dimension, in order of rank."""
        ...


class NoCollectives:
    """The group of one."""

    def all_reduce(self, tensor: "torch.Tensor") -> "torch.Tensor":
        """`tensor` as it is."""
        return tensor

    def all_gather(self, tensor: "torch.Tensor") -> "torch.Tensor":
        """`tensor` as it is."""
        return tensor
