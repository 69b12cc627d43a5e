"""Which part of an adapter a rank holds. Pure functions; imports no torch."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from loader.adapters.adapter import Adapter
from loader.adapters.contents import LoraModule
from loader.adapters.targets import base_modules
from loader.layout import Embedding, Linear, Parameter, parameters
from loader.shares import RankPlace, Share, whole_share
from loader.tensors import TensorInfo, WeightSlice


@dataclass(frozen=True, slots=True)
class FactorPart:
    """A rank's part of a module's factors: the columns `inputs` of `a`, and the rows `outputs` of `b`.

    One of the two is whole: where the module is split by columns, every rank has all of `a`; where by rows, all of `b`.
    """

    module: LoraModule
    inputs: Share
    outputs: Share
    is_embedding: bool

    @property
    def num_bytes(self) -> int:
        """Bytes of both, in the types they are stored in."""
        a, b = self.module.a, self.module.b
        return a.num_bytes * len(self.inputs) // self.inputs.size + b.num_bytes * len(self.outputs) // self.outputs.size


def factor_parts(adapter: Adapter, place: RankPlace) -> Iterator[FactorPart]:
    """What the rank at `place` holds of the factors. Raises ValueError for a size that cannot split the base."""
    for name, module in base_modules(adapter.base, place).items():
        lora = adapter.modules.get(name)
        if lora is None:
            continue
        if isinstance(module, Embedding):
            yield FactorPart(lora, module.rows, whole_share(module.columns), is_embedding=True)
        elif isinstance(module, Linear):
            yield FactorPart(lora, module.inputs, module.outputs, is_embedding=False)


def full_parts(adapter: Adapter, place: RankPlace) -> Iterator[tuple[TensorInfo, WeightSlice]]:
    """What the rank holds of the weights that replace the base's. Raises like `factor_parts`."""
    for parameter in parameters(adapter.base, place):
        for want in _slices(parameter):
            info = adapter.full_weights.get(want.name)
            if info is not None:
                yield info, want


def adapter_bytes(adapter: Adapter, place: RankPlace) -> int:
    """Bytes that the rank holds of an adapter, in the types it is stored in. Raises like `factor_parts`."""
    factors = sum(part.num_bytes for part in factor_parts(adapter, place))
    full = sum(
        info.num_bytes * prod(want.part_shape) // max(1, prod(want.shape)) for info, want in full_parts(adapter, place)
    )
    return factors + full


def _slices(parameter: Parameter) -> Iterator[WeightSlice]:
    # What replaces the weight of a quantised base, too, is one tensor.
    return (replace(parameter, scheme=None) if isinstance(parameter, Linear | Embedding) else parameter).slices()
