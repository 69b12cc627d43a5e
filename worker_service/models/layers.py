"""Layers of a decoder, cut for one rank of a tensor-parallel group.

Every layer says which slices of which checkpoint tensors it needs (`slices`), takes them out of the
loaded ones (`place`), and is then called. Collectives are called only when the group has more than
one rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from loader.weights import WeightSlice
from worker_service.kernels.linear import LinearKernel, make_linear
from worker_service.models.parallel import Collectives, NoCollectives, ParallelConfig

__all__ = [
    "Collectives",
    "ColumnParallelLinear",
    "ColumnPart",
    "HeadNorms",
    "LmHead",
    "NoCollectives",
    "ParallelConfig",
    "RmsNorm",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "even_part",
    "kv_head_part",
    "vocab_part",
]

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Part:
    """Elements `start` to `stop` of one dimension of `size`."""

    size: int
    start: int
    stop: int

    def scaled(self, width: int) -> "Part":
        """The same part where every element stands for `width` of them."""
        return Part(self.size * width, self.start * width, self.stop * width)

    def __len__(self) -> int:
        return self.stop - self.start


def even_part(size: int, parallel: ParallelConfig, *, what: str) -> Part:
    """This rank's even share. Raises ValueError, naming `what`, when it does not divide evenly."""
    share, rest = divmod(size, parallel.tensor_parallel_size)
    if rest:
        raise ValueError(f"{what} ({size}) is not a multiple of tensor_parallel_size {parallel.tensor_parallel_size}")
    return Part(size, share * parallel.tensor_rank, share * (parallel.tensor_rank + 1))


def kv_head_part(num_kv_heads: int, parallel: ParallelConfig) -> Part:
    """This rank's key-value heads: an even share, or, with more ranks than heads, one that several ranks hold."""
    size = parallel.tensor_parallel_size
    if num_kv_heads >= size:
        return even_part(num_kv_heads, parallel, what="the number of key-value heads")
    if size % num_kv_heads:
        raise ValueError(
            f"tensor_parallel_size {size} is not a multiple of the number of key-value heads, {num_kv_heads}"
        )
    head = parallel.tensor_rank // (size // num_kv_heads)
    return Part(num_kv_heads, head, head + 1)


def vocab_part(vocab_size: int, parallel: ParallelConfig) -> Part:
    """This rank's token ids; the last rank's share may be the smaller one."""
    share = -(-vocab_size // parallel.tensor_parallel_size)
    return Part(
        vocab_size,
        min(share * parallel.tensor_rank, vocab_size),
        min(share * (parallel.tensor_rank + 1), vocab_size),
    )


@dataclass(frozen=True, slots=True)
class ColumnPart:
    """One of the products that a ColumnParallelLinear joins: the tensor's name without ".weight", and its rows."""

    name: str
    rows: Part


class ColumnParallelLinear:
    """Products of the same input, each with its output rows split over the ranks, computed as one."""

    def __init__(self, parts: Sequence[ColumnPart], in_features: int, *, bias: bool) -> None:
        self._parts = tuple(parts)
        self._in_features = in_features
        self._bias = bias
        self._linear: LinearKernel = _not_placed

    def slices(self) -> list[WeightSlice]:
        """What this layer needs of the checkpoint."""
        wanted = [_rows(f"{part.name}.weight", part.rows, self._in_features) for part in self._parts]
        if self._bias:
            wanted += [_rows(f"{part.name}.bias", part.rows) for part in self._parts]
        return wanted

    def place(self, tensors: Tensors) -> None:
        """Takes its tensors out of `tensors`."""
        weight = torch.cat([tensors.pop(f"{part.name}.weight") for part in self._parts])
        bias = torch.cat([tensors.pop(f"{part.name}.bias") for part in self._parts]) if self._bias else None
        self._linear = make_linear(weight, bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, in_features] -> [rows, this rank's rows of all parts]."""
        return self._linear(x)


class RowParallelLinear:
    """A product with its input split over the ranks; the parts are summed over the group."""

    def __init__(
        self, name: str, columns: Part, out_features: int, *, bias: bool, parallel: ParallelConfig, group: Collectives
    ) -> None:
        self._name = name
        self._columns = columns
        self._out_features = out_features
        # The sum over the ranks must hold the bias once.
        self._bias = bias and parallel.tensor_rank == 0
        self._group = group if parallel.tensor_parallel_size > 1 else None
        self._linear: LinearKernel = _not_placed

    def slices(self) -> list[WeightSlice]:
        """What this layer needs of the checkpoint."""
        shape = (self._out_features, self._columns.size)
        wanted = [WeightSlice(f"{self._name}.weight", shape, 1, self._columns.start, self._columns.stop)]
        if self._bias:
            wanted.append(_whole(f"{self._name}.bias", self._out_features))
        return wanted

    def place(self, tensors: Tensors) -> None:
        """Takes its tensors out of `tensors`."""
        bias = tensors.pop(f"{self._name}.bias") if self._bias else None
        self._linear = make_linear(tensors.pop(f"{self._name}.weight"), bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, this rank's columns] -> [rows, out_features], whole on every rank."""
        partial = self._linear(x)
        return partial if self._group is None else self._group.all_reduce(partial)


class VocabParallelEmbedding:
    """Token ids to vectors, the vocabulary split over the ranks."""

    def __init__(
        self, name: str, rows: Part, hidden_size: int, *, parallel: ParallelConfig, group: Collectives
    ) -> None:
        self._name = name
        self._rows = rows
        self._hidden_size = hidden_size
        self._group = group if parallel.tensor_parallel_size > 1 else None
        self.weight = torch.empty(0)

    def slices(self) -> list[WeightSlice]:
        """What this layer needs of the checkpoint."""
        return [_rows(f"{self._name}.weight", self._rows, self._hidden_size)]

    def place(self, tensors: Tensors) -> None:
        """Takes its tensors out of `tensors`."""
        self.weight = tensors.pop(f"{self._name}.weight")

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[num_tokens] -> [num_tokens, hidden_size], whole on every rank."""
        if self._group is None:
            return functional.embedding(token_ids, self.weight)
        local = token_ids - self._rows.start
        elsewhere = (local < 0) | (local >= len(self._rows))
        vectors = functional.embedding(local.masked_fill_(elsewhere, 0), self.weight)
        return self._group.all_reduce(vectors.masked_fill_(elsewhere[:, None], 0))


class LmHead:
    """Vectors to logits, the vocabulary split over the ranks; may share the embedding's weight."""

    def __init__(
        self, name: str, rows: Part, hidden_size: int, *, parallel: ParallelConfig, group: Collectives
    ) -> None:
        self._name = name
        self._rows = rows
        self._hidden_size = hidden_size
        self._share = -(-rows.size // parallel.tensor_parallel_size)
        self._group = group if parallel.tensor_parallel_size > 1 else None
        self._linear: LinearKernel = _not_placed

    def slices(self) -> list[WeightSlice]:
        """What this layer needs of the checkpoint, when its weight is its own."""
        return [_rows(f"{self._name}.weight", self._rows, self._hidden_size)]

    def place(self, tensors: Tensors) -> None:
        """Takes its tensors out of `tensors`."""
        self.share(tensors.pop(f"{self._name}.weight"))

    def share(self, weight: torch.Tensor) -> None:
        """Uses this rank's rows of the vocabulary, [rows, hidden_size]."""
        # All ranks' parts must be equally wide to be gathered.
        missing = self._share - len(self._rows)
        if self._group is not None and missing:
            weight = torch.cat((weight, weight.new_zeros(missing, self._hidden_size)))
        self._linear = make_linear(weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, hidden_size] -> [rows, vocab_size], whole on every rank."""
        logits = self._linear(x)
        if self._group is None:
            return logits
        return self._group.all_gather(logits)[:, : self._rows.size].contiguous()


class RmsNorm:
    """Root-mean-square normalisation; held whole by every rank."""

    def __init__(self, name: str, size: int, eps: float) -> None:
        self._name = name
        self._shape = (size,)
        self._eps = eps
        self._weight = torch.empty(0)

    def slices(self) -> list[WeightSlice]:
        """What this layer needs of the checkpoint."""
        return [_whole(f"{self._name}.weight", *self._shape)]

    def place(self, tensors: Tensors) -> None:
        """Takes its tensors out of `tensors`."""
        self._weight = tensors.pop(f"{self._name}.weight")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, size] -> [rows, size]."""
        return functional.rms_norm(x, self._shape, self._weight, self._eps)


class HeadNorms:
    """Root-mean-square normalisation of each head by itself; heads of several kinds, each with its weight, as one."""

    def __init__(self, kinds: Sequence[tuple[str, int]], head_dim: int, eps: float) -> None:
        """`kinds` holds each kind's name and this rank's number of such heads, in their order."""
        self._kinds = tuple(kinds)
        self._shape = (head_dim,)
        self._eps = eps
        self._weight = torch.empty(0)

    def slices(self) -> list[WeightSlice]:
        """What this layer needs of the checkpoint."""
        return [_whole(f"{name}.weight", *self._shape) for name, _ in self._kinds]

    def place(self, tensors: Tensors) -> None:
        """Takes its tensors out of `tensors`."""
        self._weight = torch.cat([tensors.pop(f"{name}.weight").expand(count, -1) for name, count in self._kinds])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, heads of all kinds, head_dim] -> the same."""
        return functional.rms_norm(x, self._shape, None, self._eps) * self._weight


def _rows(name: str, rows: Part, *rest: int) -> WeightSlice:
    return WeightSlice(name, (rows.size, *rest), 0, rows.start, rows.stop)


def _whole(name: str, size: int) -> WeightSlice:
    return WeightSlice(name, (size,), None, 0, size)


def _not_placed(_x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("the layer's weights have not been placed")
