"""Layers of a decoder, cut for one rank of a tensor-parallel group.

Every layer is made from what `loader.layout` says of its parameters, takes their tensors out of the loaded ones
(`place`), and is then called. `group` is None where the group has one rank: then there is nothing to sum.
"""

from collections.abc import Sequence

import torch
from torch.nn import functional

from loader.layout import Embedding, Linear, Vector
from loader.quantised.packed import Packed, take_packed
from worker_service.kernels.linear import LinearKernel, make_linear
from worker_service.kernels.quantised import MakeLinear, make_joined_linear
from worker_service.models.collectives import Collectives
from worker_service.models.lora import RowAdapters

Tensors = dict[str, torch.Tensor]


class ColumnParallelLinear:
    """Products of the same input, each with its output rows split over the ranks, computed as one."""

    def __init__(self, parts: Sequence[Linear]) -> None:
        self._parts = tuple(parts)
        self._linear: LinearKernel = _not_placed

    def place(self, tensors: Tensors, make: MakeLinear = make_joined_linear) -> None:
        """Takes its tensors out of `tensors`; `make` makes the product."""
        self._linear = _take_product(self._parts, tensors, make)

    def __call__(self, x: torch.Tensor, adapters: RowAdapters | None = None) -> torch.Tensor:
        """[rows, in_features] -> [rows, this rank's rows of all parts]."""
        y = self._linear(x)
        if adapters is not None:
            adapters.add(self._parts, x, y)
        return y


class RowParallelLinear:
    """A product with its input split over the ranks; the parts are summed over the group."""

    def __init__(self, part: Linear, group: Collectives | None) -> None:
        self._part = part
        self._group = group
        self._linear: LinearKernel = _not_placed

    def place(self, tensors: Tensors, make: MakeLinear = make_joined_linear) -> None:
        """Takes its tensors out of `tensors`; `make` makes the product."""
        self._linear = _take_product([self._part], tensors, make)

    def __call__(self, x: torch.Tensor, adapters: RowAdapters | None = None) -> torch.Tensor:
        """[rows, this rank's columns] -> [rows, out_features], whole on every rank."""
        partial = self._linear(x)
        if adapters is not None:
            adapters.add([self._part], x, partial)
        return partial if self._group is None else self._group.all_reduce(partial)


class VocabParallelEmbedding:
    """Token ids to vectors, the vocabulary split over the ranks."""

    def __init__(self, table: Embedding, group: Collectives | None) -> None:
        self._table = table
        self._group = group
        self._dtype = torch.float32
        self.weight: torch.Tensor | Packed = torch.empty(0)

    def place(self, tensors: Tensors) -> None:
        """Takes its tensors out of `tensors`."""
        packed = take_packed(self._table.name, tensors)
        self.weight = tensors.pop(f"{self._table.name}.weight") if packed is None else packed

    def prepare(self, dtype: torch.dtype) -> None:
        """Answers in `dtype` from now on where the weight is quantised, and has no type of its own."""
        self._dtype = dtype

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[num_tokens] -> [num_tokens, hidden_size], whole on every rank."""
        if self._group is None:
            return self._look_up(token_ids)
        local = token_ids - self._table.rows.start
        elsewhere = (local < 0) | (local >= len(self._table.rows))
        vectors = self._look_up(local.masked_fill_(elsewhere, 0))
        return self._group.all_reduce(vectors.masked_fill_(elsewhere[:, None], 0))

    def _look_up(self, rows: torch.Tensor) -> torch.Tensor:
        if isinstance(self.weight, torch.Tensor):
            return functional.embedding(rows, self.weight)
        return self.weight.rows(rows).to(self._dtype)


class LmHead:
    """Vectors to logits, the vocabulary split over the ranks; may share the embedding's weight."""

    def __init__(self, part: Linear, num_ranks: int, group: Collectives | None) -> None:
        self._part = part
        self._width = -(-part.outputs.size // num_ranks)
        self._group = group
        self._linear: LinearKernel = _not_placed

    def place(self, tensors: Tensors, make: MakeLinear = make_joined_linear) -> None:
        """Takes its tensors out of `tensors`; `make` makes the product."""
        packed = take_packed(self._part.name, tensors)
        weight = tensors.pop(f"{self._part.name}.weight") if packed is None else packed
        self.use(weight, make, is_shared=False)

    def use(
        self, weight: torch.Tensor | Packed, make: MakeLinear = make_joined_linear, *, is_shared: bool = True
    ) -> None:
        """Uses this rank's rows of the vocabulary, [rows, hidden_size]; see MakeLinear."""
        # All ranks' parts must be equally wide to be gathered.
        missing = self._width - len(self._part.outputs) if self._group is not None else 0
        if isinstance(weight, torch.Tensor):
            if missing:
                weight = torch.cat((weight, weight.new_zeros(missing, weight.shape[1])))
            self._linear = make_linear(weight)
            return
        linear = make([weight], [None], is_shared=is_shared)
        self._linear = (lambda x: functional.pad(linear(x), (0, missing))) if missing else linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, hidden_size] -> [rows, vocab_size], whole on every rank."""
        logits = self._linear(x)
        if self._group is None:
            return logits
        return self._group.all_gather(logits)[:, : self._part.outputs.size].contiguous()


class RmsNorm:
    """Root-mean-square normalisation; held whole by every rank.

    What is added to the weight, `offset`, is added in float32: near 1 the model's type may hold none of the weight.
    """

    def __init__(self, vector: Vector, eps: float, offset: float = 0.0) -> None:
        self._name = vector.name
        self._shape = (vector.size,)
        self._eps = eps
        self._offset = offset
        self._weight = torch.empty(0)

    def place(self, tensors: Tensors) -> None:
        """Takes its tensors out of `tensors`."""
        weight = tensors.pop(f"{self._name}.weight")
        self._weight = weight.float() + self._offset if self._offset else weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, size] -> [rows, size]."""
        if self._offset:
            return functional.rms_norm(x.float(), self._shape, self._weight, self._eps).to(x.dtype)
        return functional.rms_norm(x, self._shape, self._weight, self._eps)


class HeadNorms:
    """Root-mean-square normalisation of each head by itself; heads of several kinds, each with its weight, as one."""

    def __init__(self, kinds: Sequence[tuple[Vector, int]], eps: float, offset: float = 0.0) -> None:
        """`kinds` holds each kind's weight and this rank's number of such heads, in their order; `offset` is as
        for RmsNorm."""
        self._kinds = tuple(kinds)
        self._shape = (kinds[0][0].size,)
        self._eps = eps
        self._offset = offset
        self._weight = torch.empty(0)

    def place(self, tensors: Tensors) -> None:
        """Takes its tensors out of `tensors`."""
        weights = [tensors.pop(f"{vector.name}.weight").expand(count, -1) for vector, count in self._kinds]
        weight = torch.cat(weights)
        self._weight = weight.float() + self._offset if self._offset else weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, heads of all kinds, head_dim] -> the same."""
        if self._offset:
            return (functional.rms_norm(x.float(), self._shape, None, self._eps) * self._weight).to(x.dtype)
        return functional.rms_norm(x, self._shape, None, self._eps) * self._weight


class ProjectionNorms:
    """Root-mean-square normalisation of all queries of a token together, and of all its keys, over the ranks."""

    def __init__(self, query: Vector, key: Vector, eps: float, num_ranks: int, group: Collectives | None) -> None:
        self._names = (query.name, key.name)
        self._sizes = tuple(len(vector.share) if vector.share else vector.size for vector in (query, key))
        # Where ranks share a head, each of them counts it, equally often for all heads.
        self._num_summed = [size * num_ranks for size in self._sizes]
        self._eps = eps
        self._group = group
        self._weight = torch.empty(0)

    def place(self, tensors: Tensors) -> None:
        """Takes its tensors out of `tensors`."""
        self._weight = torch.cat([tensors.pop(f"{name}.weight") for name in self._names]).float()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, this rank's query and key heads, head_dim] -> the same."""
        flat = x.reshape(x.shape[0], -1).float()
        parts = (flat[:, : self._sizes[0]], flat[:, self._sizes[0] :])
        sums = torch.stack([part.square().sum(-1) for part in parts], -1)
        if self._group is not None:
            sums = self._group.all_reduce(sums)
        factors = (sums / sums.new_tensor(self._num_summed) + self._eps).rsqrt()
        normalised = torch.cat([part * factors[:, i : i + 1] for i, part in enumerate(parts)], -1)
        return (normalised * self._weight).to(x.dtype).view(x.shape)


def _take_product(parts: Sequence[Linear], tensors: Tensors, make: MakeLinear) -> LinearKernel:
    """The product of one input with the weights of all parts, which are taken out of `tensors`."""
    packed = [take_packed(part.name, tensors) for part in parts]
    weights = [
        tensors.pop(f"{part.name}.weight") if kept is None else kept for part, kept in zip(parts, packed, strict=True)
    ]
    return make(weights, [tensors.pop(f"{part.name}.bias") if part.bias else None for part in parts])


def _not_placed(_x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("the layer's weights have not been placed")
