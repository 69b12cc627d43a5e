"""Integers of 4 bits in the layout of torch's operator for them on CUDA.

The operator takes a weight [out, places] in groups of a few sizes, out being a multiple of 8, places one of the group's
size, and computes a value q of a group as (q - 8) * scale + zero.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from loader.quantised.bits import pack_rows, unpack_rows
from loader.quantised.packed import GroupedInts
from worker_service.kernels.layout import rounded_up
from worker_service.kernels.torch_products.product import filled

MULTIPLE = 8
"""Of outputs."""
_GROUP_SIZES = (256, 128, 64, 32)
# Columns of a tile of the layout, and how many of them lie side by side at most.
_TILE_COLUMNS = 16
_INNER_TILES = (8, 4, 2)
# Places that no input has are read for nothing: a quarter of the inputs, or so many.
_MOST_FILLING = 256
_MIDDLE = 8.0


@dataclass(frozen=True, slots=True)
class Places:
    """Where the inputs of a weight come to lie: in groups of `group_size`, each with the scale of one of its groups.

    `groups` [groups] names that one. Input i is at place `front + i`, or input `order[p]` int32 [places] at place p, a
    number that no input has standing for a zero. `inner_tiles` is how many tiles of the layout lie side by side.
    """

    group_size: int
    num_places: int
    num_inputs: int
    groups: Tensor
    front: int = 0
    order: Tensor | None = None

    @property
    def inner_tiles(self) -> int:
        """As many as the places can be cut into."""
        return next(count for count in _INNER_TILES if self.num_places % (count * _TILE_COLUMNS) == 0)

    @property
    def is_straight(self) -> bool:
        """Whether the inputs lie as they are."""
        return self.order is None and self.num_places == self.num_inputs

    def inputs(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, places], contiguous."""
        if self.order is not None:
            whole = x if self.num_places == self.num_inputs else functional.pad(x, (0, 1))
            return whole.index_select(1, self.order)
        if self.is_straight:
            return x.contiguous()
        return functional.pad(x, (self.front, self.num_places - self.num_inputs - self.front))

    def values(self, values: Tensor) -> Tensor:
        """The same for a weight's values, uint8 [out, in]."""
        return self.inputs(values)


def places_of(weight: GroupedInts) -> Places:
    """Where the inputs lie. Raises ValueError where the operator has no such groups, or would read much for nothing."""
    places = _straight(weight) if weight.group_of is None else _ordered(weight, weight.group_of)
    if places.num_places - places.num_inputs > max(places.num_inputs // 4, _MOST_FILLING):
        raise ValueError(f"{places.num_inputs} inputs would take {places.num_places} places")
    return places


def _straight(weight: GroupedInts) -> Places:
    num_inputs, device = weight.num_inputs, weight.words.device
    if weight.num_groups == 1:
        size = next((size for size in _GROUP_SIZES if num_inputs % size == 0), _GROUP_SIZES[-1])
        num_places = rounded_up(num_inputs, size)
        groups = torch.zeros(num_places // size, dtype=torch.int64, device=device)
        return Places(size, num_places, num_inputs, groups)
    size = next((size for size in _GROUP_SIZES if weight.group_size % size == 0), 0)
    if not size:
        raise ValueError(f"_weight_int4pack_mm has no groups of {weight.group_size}")
    front = weight.first % size
    num_places = rounded_up(front + num_inputs, size)
    starts = weight.first - front + torch.arange(0, num_places, size, device=device)
    return Places(size, num_places, num_inputs, starts // weight.group_size, front)


def _ordered(weight: GroupedInts, group_of: Tensor) -> Places:
    num_inputs, num_groups, device = weight.num_inputs, weight.num_groups, weight.words.device
    group_of = group_of.long()
    counts = torch.bincount(group_of, minlength=num_groups)
    largest = int(counts.max())
    size = min((size for size in _GROUP_SIZES if size >= largest), default=0)
    if not size:
        raise ValueError(f"_weight_int4pack_mm has no groups of {largest} inputs in any order")
    by_group = torch.argsort(group_of, stable=True)
    groups = group_of[by_group]
    places = groups * size + torch.arange(num_inputs, device=device) - (counts.cumsum(0) - counts)[groups]
    order = torch.full((num_groups * size,), num_inputs, dtype=torch.int32, device=device)
    order[places] = by_group.int()
    return Places(size, num_groups * size, num_inputs, torch.arange(num_groups, device=device), order=order)


def operator_words(weight: GroupedInts, places: Places) -> Tensor:
    """The values in the operator's layout, int32 [out / 8, tiles, 32, inner_tiles / 2]."""
    words = weight.words
    if not places.is_straight:
        words = pack_rows(places.values(unpack_rows(words, 4, weight.num_inputs)), 4)
    return _converted(filled(words, rounded_up(words.shape[0], MULTIPLE), words.shape[1]), places.inner_tiles)


def _converted(words: Tensor, inner_tiles: int) -> Tensor:
    """From values packed as `loader.quantised.bits` has them; the operator takes the first of two in the high bits."""
    return torch._convert_weight_to_int4pack(((words << 4) | (words >> 4)).contiguous(), inner_tiles)


def scales_and_zeros(weight: GroupedInts, places: Places) -> Tensor:
    """bfloat16 [groups, out rounded up, 2]."""
    scales, minima = weight.by_group()
    if minima is not None:
        zeros = minima + _MIDDLE * scales
    elif weight.zeros is not None:
        zeros = (_MIDDLE - weight.zeros.float()) * scales
    else:
        zeros = torch.zeros_like(scales)
    num_rows = rounded_up(scales.shape[0], MULTIPLE)
    chosen = (filled(part.index_select(1, places.groups), num_rows, len(places.groups)) for part in (scales, zeros))
    return torch.stack([part.t() for part in chosen], dim=2).bfloat16().contiguous()


def tile_order(inner_tiles: int, device: torch.device) -> Tensor:
    """Where the values of a tile, row after row, lie among those of its words: int64 [8 * 16 * inner_tiles].

    Found out, by laying out their numbers, four bits at a time.
    """
    columns = _TILE_COLUMNS * inner_tiles
    numbers = torch.arange(MULTIPLE * columns, device=device).view(MULTIPLE, columns)
    found = torch.zeros(MULTIPLE * columns, dtype=torch.int64, device=device)
    for shift in (0, 4, 8):
        words = _converted(pack_rows(((numbers >> shift) & 0xF).to(torch.uint8), 4), inner_tiles)
        found += _values_as_they_lie(words).view(-1).long() << shift
    return torch.argsort(found)


def values_of_words(words: Tensor, order: Tensor) -> Tensor:
    """Words of the operator's layout -> uint8 [out, places]; `order` is that of a tile."""
    num_rows, num_tiles = words.shape[0] * MULTIPLE, words.shape[1]
    tiles = _values_as_they_lie(words).index_select(2, order)
    return tiles.view(words.shape[0], num_tiles, MULTIPLE, -1).transpose(1, 2).reshape(num_rows, -1)


def _values_as_they_lie(words: Tensor) -> Tensor:
    """uint8 [out / 8, tiles, values of a tile]."""
    of_bytes = words.contiguous().view(words.shape[0], words.shape[1], -1).view(torch.uint8)
    return torch.stack((of_bytes & 0xF, of_bytes >> 4), dim=-1).view(words.shape[0], words.shape[1], -1)
