"""An adapter's factors as the compiled kernels take them, see cpu/lora.h."""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from worker_service.kernels import abi
from worker_service.kernels.layout import LANES, depth_of, empty_huge

MODULES = ("q", "k", "v", "o", "gate", "up", "down")
"""The modules of a layer that an adapter may change, in the order of cpu/api.h."""


_PRODUCTS = (("q", "k", "v"), ("o",), ("gate", "up"), ("down",))


@dataclass(frozen=True, slots=True)
class PackedFactors:
    """A module's change: `scaling` times b times a. See `pack_factors` for how `a` and `b` lie."""

    a: torch.Tensor
    b: torch.Tensor
    rank: int
    scaling: float


def pack_factors(a: torch.Tensor, b: torch.Tensor, scaling: float) -> PackedFactors:
    """a [rank, in], b [out, rank] -> [ceil(rank / 16), in / depth, 16, depth] and [ceil(out / 16), rank / depth, 16,
    depth], filled up with zeros, the rank to a multiple of 2 * `depth`.

    Raises ValueError for factors that do not fit each other, for a type that is not served, and for an input whose
    size is no multiple of 16.
    """
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1] or a.dtype != b.dtype:
        raise ValueError(f"{a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)} are no factors of a product")
    if a.shape[1] % LANES:
        raise ValueError(f"an input of {a.shape[1]} is not a multiple of {LANES}")
    even = functional.pad(b, (0, -b.shape[1] % (2 * depth_of(b.dtype))))
    return PackedFactors(_pack_lanes(a), _pack_lanes(even), even.shape[1], scaling)


class AdapterWeights:
    """An adapter's factors for all layers: for each, those of the modules that it changes, by their names."""

    def __init__(self, layers: Sequence[Mapping[str, PackedFactors]]) -> None:
        self.num_layers = len(layers)
        self.dtypes = {factors.a.dtype for layer in layers for factors in layer.values()}
        self.num_bytes = sum(f.a.nbytes + f.b.nbytes for layer in layers for f in layer.values())
        # The C side holds addresses only: what they point to lives as long as this object.
        self._layers = _gathered(layers, self.num_bytes)
        self.c = (abi.Factors * (len(layers) * len(MODULES)))(
            *(_c_factors(layer.get(name)) for layer in self._layers for name in MODULES)
        )

    def sizes(self) -> list[dict[str, tuple[int, int]]]:
        """Of each layer's changed modules: vectors of 16 outputs, and inputs."""
        return [
            {name: (f.b.shape[0], f.a.shape[1] * f.a.shape[3]) for name, f in layer.items()} for layer in self._layers
        ]


@dataclass(frozen=True, slots=True)
class AdapterRun:
    """Tokens [first, first + count) of a batch have this adapter."""

    weights: AdapterWeights
    first: int
    count: int


def c_runs(runs: Sequence[AdapterRun]) -> "ctypes.Array[abi.Run]":
    """The runs as the library takes them; the caller keeps `runs`."""
    return (abi.Run * len(runs))(*(abi.Run(ctypes.addressof(run.weights.c), run.first, run.count) for run in runs))


def _c_factors(factors: PackedFactors | None) -> abi.Factors:
    if factors is None:
        return abi.Factors()
    return abi.Factors(factors.a.data_ptr(), factors.b.data_ptr(), factors.rank, factors.scaling)


def _gathered(layers: Sequence[Mapping[str, PackedFactors]], num_bytes: int) -> list[dict[str, PackedFactors]]:
    """The factors in one piece of memory of large pages, in the order in which a step reads them."""
    memory, end = empty_huge(num_bytes), 0

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal end
        begin, end = end, end + tensor.nbytes
        return memory[begin:end].view(tensor.dtype).view(tensor.shape).copy_(tensor)

    gathered: list[dict[str, PackedFactors]] = []
    for layer in layers:
        moved_layer: dict[str, PackedFactors] = {}
        for product in _PRODUCTS:
            names = [name for name in product if name in layer]
            firsts = {name: moved(layer[name].a) for name in names}
            moved_layer |= {name: replace(layer[name], a=firsts[name], b=moved(layer[name].b)) for name in names}
        gathered.append(moved_layer)
    return gathered


def _pack_lanes(weight: torch.Tensor) -> torch.Tensor:
    """[rows, columns] -> [ceil(rows / 16), columns / depth, 16, depth]."""
    depth = depth_of(weight.dtype)
    rows = functional.pad(weight, (0, 0, 0, -weight.shape[0] % LANES))
    return rows.view(-1, LANES, weight.shape[1] // depth, depth).permute(0, 2, 1, 3).contiguous()
