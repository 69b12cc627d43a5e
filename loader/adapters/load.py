"""Reading an adapter: a rank's factors, to be applied at run time or merged into its weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from loader.adapters.adapter import Adapter, content_fingerprint
from loader.adapters.parts import FactorPart, factor_parts, full_parts
from loader.shares import RankPlace
from loader.stored_rows import FLOAT_DTYPES, read_rows
from loader.tensors import TensorInfo, WeightSlice


@dataclass(frozen=True, slots=True)
class LoraFactors:
    """A rank's part of one module's change: `scaling` * b @ a, where a is [rank, inputs] and b [outputs, rank].

    Inputs and outputs are those that the rank holds of the module's weight [outputs, inputs]. Those of an embedding
    are its token ids and its columns, so that the change of its weight is the transpose. The product of a module that
    is split by rows is a part of a sum over the ranks, as the module's own is.
    """

    a: Tensor
    b: Tensor
    scaling: float
    is_embedding: bool


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """A rank's part of an adapter, on the CPU, in the types it is stored in.

    `factors` are by the base's module, `full_weights`, which replace those of the base, by its tensor.
    `fingerprint` names the content of the whole adapter: KV blocks are keyed by it.
    """

    adapter: Adapter
    place: RankPlace
    fingerprint: str
    factors: Mapping[str, LoraFactors] = field(repr=False)
    full_weights: Mapping[str, Tensor] = field(repr=False)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        pairs = sum(factors.a.nbytes + factors.b.nbytes for factors in self.factors.values())
        return pairs + sum(tensor.nbytes for tensor in self.full_weights.values())


def load_adapter(adapter: Adapter, place: RankPlace) -> LoadedAdapter:
    """Reads what the rank at `place` holds of an opened adapter.

    Raises CheckpointError for a file that is no longer what was opened, ValueError for a size that cannot split the
    base.
    """
    with adapter.open_weights() as descriptor:
        fingerprint = content_fingerprint(adapter.config, descriptor)
        factors = {part.module.name: _read_factors(descriptor, part) for part in factor_parts(adapter, place)}
        full = {want.name: _read(descriptor, info, want) for info, want in full_parts(adapter, place)}
    return LoadedAdapter(adapter, place, fingerprint, factors, full)


def _read_factors(descriptor: int, part: FactorPart) -> LoraFactors:
    module, inputs, outputs = part.module, part.inputs, part.outputs
    a = _read(descriptor, module.a, WeightSlice(module.a.name, module.a.shape, 1, inputs.start, inputs.stop))
    b = _read(descriptor, module.b, WeightSlice(module.b.name, module.b.shape, 0, outputs.start, outputs.stop))
    return LoraFactors(a, b, module.scaling, part.is_embedding)


def _read(descriptor: int, info: TensorInfo, want: WeightSlice) -> Tensor:
    """The wanted part. Of one along dimension 0 no other bytes are read."""
    start, stop = (want.start, want.stop) if want.dim == 0 else (0, info.shape[0])
    data, dtype = read_rows(descriptor, info, start, stop), FLOAT_DTYPES[info.dtype]
    values = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    rows = values.view(stop - start, *info.shape[1:])
    if want.dim != 1 or len(info.shape) < 2 or prod(want.part_shape) == values.numel():
        return rows
    return rows[:, want.start : want.stop].clone(memory_format=torch.contiguous_format)
