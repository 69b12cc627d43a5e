"""A rank's place in its group, and its share of what the group divides. Pure functions; imports no torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankPlace:
    """A rank's place among the tensor- and pipeline-parallel ranks. Raises ValueError for one outside its size."""

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
            if not 0 <= rank < size:
                raise ValueError(f"{name}_rank {rank} does not lie in a group of {size}")

    @property
    def num_ranks(self) -> int:
        """Ranks of the group."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def rank(self) -> int:
        """The rank among all of the group: stage by stage."""
        return self.pipeline_rank * self.tensor_parallel_size + self.tensor_rank

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank embeds token ids."""
        return self.pipeline_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank produces logits."""
        return self.pipeline_rank == self.pipeline_parallel_size - 1


@dataclass(frozen=True, slots=True)
class Share:
    """The elements `[start, stop)` of a dimension of `size`."""

    size: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the dimension."""
        return len(self) == self.size

    def scaled(self, width: int) -> "Share":
        """The same share where every element stands for `width` of them."""
        return Share(self.size * width, self.start * width, self.stop * width)


def whole_share(size: int) -> Share:
    """All of a dimension."""
    return Share(size, 0, size)


def even_share(size: int, rank: int, num_ranks: int, *, what: str) -> Share:
    """An even share. Raises ValueError, naming `what`, where `size` does not divide."""
    width, rest = divmod(size, num_ranks)
    if rest:
        raise ValueError(f"{what}, {size}, cannot be divided by {num_ranks}")
    return Share(size, width * rank, width * (rank + 1))


def grouped_share(num_kv_heads: int, rank: int, num_ranks: int) -> Share:
    """Key-value heads: an even share or, with more ranks than heads, one head that several ranks replicate.

    Raises ValueError where neither comes out even.
    """
    what = "the number of key-value heads"
    if num_kv_heads >= num_ranks:
        return even_share(num_kv_heads, rank, num_ranks, what=what)
    if num_ranks % num_kv_heads:
        raise ValueError(f"{what}, {num_kv_heads}, can neither be divided by {num_ranks} nor be replicated evenly")
    head = rank // (num_ranks // num_kv_heads)
    return Share(num_kv_heads, head, head + 1)


def vocabulary_share(vocab_size: int, rank: int, num_ranks: int) -> Share:
    """Token ids, as if padded to a multiple of `num_ranks`: the last shares may be smaller.

    Raises ValueError where some rank would be left with none.
    """
    width = -(-vocab_size // num_ranks)
    if width * (num_ranks - 1) >= vocab_size:
        raise ValueError(f"the vocabulary, {vocab_size}, leaves one of {num_ranks} ranks without a token")
    return Share(vocab_size, width * rank, min(width * (rank + 1), vocab_size))


def stage_layers(num_layers: int, stage: int, num_stages: int) -> range:
    """The layers of a pipeline stage; stages differ by one layer at most, earlier ones are the larger.

    Raises ValueError where a stage would have none.
    """
    if num_stages > num_layers:
        raise ValueError(f"{num_layers} layers cannot fill {num_stages} stages")
    size, rest = divmod(num_layers, num_stages)
    start = stage * size + min(stage, rest)
    return range(start, start + size + (stage < rest))
