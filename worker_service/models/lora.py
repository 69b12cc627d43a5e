"""Adapters in plain torch: the reference, and what runs where there are no compiled kernels."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from loader.layout import Linear


@dataclass(frozen=True, slots=True)
class Factors:
    """A module's change, in the model's type: `scaling` times b [out, rank] times a [rank, in]."""

    a: torch.Tensor
    b: torch.Tensor
    scaling: float


AdapterFactors = Mapping[str, Factors]
"""An adapter's factors by the base's module, such as "model.layers.0.self_attn.q_proj"."""


class RowAdapters:
    """Which adapter each row of a batch has. Adds their changes as PEFT does: after the base's own product, and
    rounded to the model's type at each step."""

    def __init__(self, adapters: Sequence[AdapterFactors], which: torch.Tensor) -> None:
        """`which` [rows] indexes `adapters`; -1 stands for none."""
        self._adapters = adapters
        self._which = which
        self._rows = [torch.nonzero(which == number).flatten() for number in range(len(adapters))]

    def add(self, parts: Sequence[Linear], x: torch.Tensor, y: torch.Tensor) -> None:
        """Changes y [rows, outputs of all parts], the products of x [rows, in], in place."""
        start = 0
        for part in parts:
            stop = start + len(part.outputs)
            for adapter, rows in zip(self._adapters, self._rows, strict=True):
                factors = adapter.get(part.name)
                if factors is not None and len(rows):
                    change = functional.linear(functional.linear(x[rows], factors.a), factors.b) * factors.scaling
                    y[:, start:stop].index_add_(0, rows, change)
            start = stop

    def select(self, rows: torch.Tensor) -> "RowAdapters":
        """Of these rows of the batch, in this order."""
        return RowAdapters(self._adapters, self._which[rows])
