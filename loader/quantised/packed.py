"""Quantised weights as they are kept in memory, and what they stand for: two forms that every format is brought to.

Between reading and computing they are tensors by name (`flatten`, `take_packed`), as unquantised weights are, so that
whatever moves, stores or counts tensors does so with these.
"""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from loader.quantised.activations import Activation, ActivationKind
from loader.quantised.bits import row_bytes, unpack_rows


@dataclass(frozen=True, slots=True)
class GroupedInts:
    """A weight [out, in] of integers of 2, 3, 4 or 8 bits: w[o, i] = scales[o, g(i)] · (q[o, i] - zeros[o, g(i)]).

    `words` uint8 [out, bytes] holds q, packed along the inputs (see `bits`); `scales` [out, groups] is as stored,
    `zeros` uint8 [out, groups], or None for 2^(bits - 1). Input i belongs to group g(i) = (first + i) // group_size,
    or group_of[i] (int32 [in]) where that is given: a rank's share may begin inside a group.

    With `minima`, of the type of the scales, w = scales · q + minima. With `factors`, int8 [out, groups], scales and
    minima are [out, blocks], of several groups each: a group's scale is its block's times its factor, and its minimum
    its block's times that of `minimum_factors`.
    """

    words: Tensor
    scales: Tensor
    zeros: Tensor | None
    group_of: Tensor | None
    bits: int
    num_inputs: int
    group_size: int
    first: int = 0
    minima: Tensor | None = None
    factors: Tensor | None = None
    minimum_factors: Tensor | None = None

    def __post_init__(self) -> None:
        num_outputs, num_groups = (self.scales if self.factors is None else self.factors).shape
        if self.words.shape != (num_outputs, row_bytes(self.num_inputs, self.bits)):
            raise ValueError(f"words {tuple(self.words.shape)} do not fit {num_outputs} x {self.num_inputs}")
        if self.zeros is not None and self.zeros.shape != (num_outputs, num_groups):
            raise ValueError(f"zeros {tuple(self.zeros.shape)} do not fit scales {tuple(self.scales.shape)}")
        if num_groups % self.scales.shape[1] or (self.minima is not None and self.minima.shape != self.scales.shape):
            raise ValueError(f"{num_groups} groups, or their minima, do not fit scales {tuple(self.scales.shape)}")
        if self.group_of is None and (self.first + self.num_inputs - 1) // self.group_size >= num_groups:
            raise ValueError(f"{self.num_inputs} inputs in groups of {self.group_size} need more than {num_groups}")

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.words.shape[0], self.num_inputs

    @property
    def num_groups(self) -> int:
        """Of a row."""
        return (self.scales if self.factors is None else self.factors).shape[1]

    def dequantise(self, start: int = 0, stop: int | None = None) -> Tensor:
        """The rows [start, stop) as float32 [rows, in]."""
        values = unpack_rows(self.words[start:stop], self.bits, self.num_inputs).float()
        scales = self._by_input(_by_group(self.scales, self.factors, start, stop))
        if self.minima is not None:
            return values.mul_(scales).add_(self._by_input(_by_group(self.minima, self.minimum_factors, start, stop)))
        if self.zeros is None:
            return values.sub_(float(1 << (self.bits - 1))).mul_(scales)
        return values.sub_(self._by_input(self.zeros[start:stop].float())).mul_(scales)

    def by_group(self) -> tuple[Tensor, Tensor | None]:
        """Scales, and minima where there are any, of all groups, float32 [out, groups]."""
        minima = None if self.minima is None else _by_group(self.minima, self.minimum_factors, 0, None)
        return _by_group(self.scales, self.factors, 0, None), minima

    def rows(self, numbers: Tensor) -> Tensor:
        """Chosen rows, int64 [n], as float32 [n, in]."""

        def chosen(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.index_select(0, numbers)

        return replace(
            self,
            words=self.words.index_select(0, numbers),
            scales=self.scales.index_select(0, numbers),
            zeros=chosen(self.zeros),
            minima=chosen(self.minima),
            factors=chosen(self.factors),
            minimum_factors=chosen(self.minimum_factors),
        ).dequantise()

    def _by_input(self, by_group: Tensor) -> Tensor:
        """[rows, groups] -> [rows, in]."""
        if self.group_of is not None:
            return by_group.index_select(1, self.group_of)
        spread = by_group.repeat_interleave(self.group_size, dim=1) if by_group.shape[1] > 1 else by_group
        if spread.shape[1] == 1:
            return spread.expand(-1, self.num_inputs)
        return spread[:, self.first : self.first + self.num_inputs]


def _by_group(scales: Tensor, factors: Tensor | None, start: int, stop: int | None) -> Tensor:
    """The rows [start, stop) of scales, or of minima, as float32 [rows, groups]."""
    values = scales[start:stop].float()
    if factors is None:
        return values
    return values.repeat_interleave(factors.shape[1] // scales.shape[1], dim=1).mul_(factors[start:stop])


@dataclass(frozen=True, slots=True)
class ScaledGrid:
    """A weight [out, in] of 8-bit values, int8 or float8 e4m3: w[o, i] = scales[block of o, block of i] · values[o, i].

    The block of row o is (first_row + o) // block_rows, and of column i alike: a rank's share may begin inside a
    block. `activation` tells how the input of the product is rounded, and `input_scale` [] by which scale where that
    is static.
    """

    values: Tensor
    scales: Tensor
    input_scale: Tensor | None
    block_rows: int
    block_columns: int
    first_row: int = 0
    first_column: int = 0
    activation: Activation | None = None

    def __post_init__(self) -> None:
        rows, columns = self.values.shape
        grid = ((self.first_row + rows - 1) // self.block_rows, (self.first_column + columns - 1) // self.block_columns)
        if any(last >= size for last, size in zip(grid, self.scales.shape, strict=True)):
            raise ValueError(f"scales {tuple(self.scales.shape)} do not cover {rows} x {columns}")

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.values.shape[0], self.values.shape[1]

    def dequantise(self, start: int = 0, stop: int | None = None) -> Tensor:
        """The rows [start, stop) as float32 [rows, in]."""
        values = self.values[start:stop].float()
        return values.mul_(self._spread(start, start + values.shape[0]))

    def rows(self, numbers: Tensor) -> Tensor:
        """Chosen rows, int64 [n], as float32 [n, columns], of a weight with a scale a row."""
        return self.values.index_select(0, numbers).float().mul_(self.scales.index_select(0, numbers))

    def _spread(self, start: int, stop: int) -> Tensor:
        """The scale of each value of the rows, in a shape that is broadcast to theirs."""
        scales = self.scales.float()
        if scales.shape[0] > 1:
            rows = torch.arange(self.first_row + start, self.first_row + stop, device=scales.device)
            scales = scales.index_select(0, rows // self.block_rows)
        if scales.shape[1] > 1:
            last = self.first_column + self.values.shape[1]
            columns = torch.arange(self.first_column, last, device=scales.device)
            scales = scales.index_select(1, columns // self.block_columns)
        return scales


Packed = GroupedInts | ScaledGrid
"""A weight [out, in] that is kept quantised."""

_FORM = "form"
_ACTIVATIONS: tuple[ActivationKind | None, ...] = (None, "int8", "fp8")


def flatten(name: str, packed: Packed) -> dict[str, Tensor]:
    """Its tensors by `name` and their own, with one of eight numbers, "form", that tells what they are."""
    values = ((field.name, getattr(packed, field.name)) for field in fields(packed))
    tensors = {f"{name}.{part}": value for part, value in values if isinstance(value, Tensor)}
    tensors[f"{name}.{_FORM}"] = torch.tensor(_numbers(packed), dtype=torch.int64)
    return tensors


def take_packed(name: str, tensors: dict[str, Tensor]) -> Packed | None:
    """The weight whose tensors `flatten` made, taken out of `tensors`; None where there is none of this name."""
    form = tensors.pop(f"{name}.{_FORM}", None)
    if form is None:
        return None
    is_grid, *numbers = form.tolist()
    if is_grid:
        block_rows, block_columns, first_row, first_column, kind, is_static, size = numbers
        chosen = _ACTIVATIONS[kind]
        return ScaledGrid(
            values=tensors.pop(f"{name}.values"),
            scales=tensors.pop(f"{name}.scales"),
            input_scale=tensors.pop(f"{name}.input_scale", None),
            block_rows=block_rows,
            block_columns=block_columns,
            first_row=first_row,
            first_column=first_column,
            activation=None if chosen is None else Activation(chosen, bool(is_static), size or None),
        )
    bits, num_inputs, group_size, first, *_ = numbers
    return GroupedInts(
        words=tensors.pop(f"{name}.words"),
        scales=tensors.pop(f"{name}.scales"),
        zeros=tensors.pop(f"{name}.zeros", None),
        group_of=tensors.pop(f"{name}.group_of", None),
        bits=bits,
        num_inputs=num_inputs,
        group_size=group_size,
        first=first,
        minima=tensors.pop(f"{name}.minima", None),
        factors=tensors.pop(f"{name}.factors", None),
        minimum_factors=tensors.pop(f"{name}.minimum_factors", None),
    )


def _numbers(packed: Packed) -> list[int]:
    if isinstance(packed, GroupedInts):
        return [0, packed.bits, packed.num_inputs, packed.group_size, packed.first, 0, 0, 0]
    chosen = packed.activation
    kind = _ACTIVATIONS.index(None if chosen is None else chosen.kind)
    rounding = [kind, int(chosen is not None and chosen.is_static), (chosen and chosen.group_size) or 0]
    return [1, packed.block_rows, packed.block_columns, packed.first_row, packed.first_column, *rounding]
