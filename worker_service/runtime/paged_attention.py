"""Paged attention of one step by kernels that read keys and values where they lie."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from worker_service.kernels.paged.problem import PagedBatch, PagedKernel, Pages, Rule
from worker_service.models.scores import Scores
from worker_service.runtime.batch import StepBatch
from worker_service.runtime.kv_cache import KvCache


@dataclass(frozen=True, slots=True)
class _Part:
    """Batch rows `start` to `stop`: the decodes of a step, or its chunks of prompts."""

    start: int
    stop: int
    batch: PagedBatch


class KernelPlanner:
    """Makes the attention of steps. Keeps what does not change between them."""

    def __init__(
        self,
        cache: KvCache,
        kernel: PagedKernel,
        windows: Sequence[int | None],
        scores: Sequence[Scores],
        *,
        max_model_len: int,
        device: torch.device,
    ) -> None:
        """`windows` and `scores` are of each layer."""
        self._longest = max_model_len
        self._kernel = kernel
        self._device = device
        self._block_size = cache.block_size
        self._pages = [cache.pages(layer) for layer in range(cache.shape.num_layers)]
        self._rules = [Rule(how, window) for how, window in zip(scores, windows, strict=True)]

    def plan(self, batch: StepBatch) -> "KernelAttention":
        """The attention of a batch whose sequences come as decodes (one new token) first, then prefill chunks."""
        num_decodes = int(np.count_nonzero(np.cumsum(batch.counts != 1) == 0))
        parts = [
            self._part(batch, first, last)
            for first, last in ((0, num_decodes), (num_decodes, len(batch)))
            if first < last
        ]
        return KernelAttention(
            self._kernel, self._pages, self._rules, self._tensor(batch.slots(self._block_size)), parts
        )

    def plan_decodes(self, positions: torch.Tensor, tables: torch.Tensor) -> "KernelAttention":
        """The attention of one new token a sequence, at `positions` int64 [sequences], with int32 `tables`
        [sequences, width]. Asks the device for nothing."""
        count = len(positions)
        blocks = tables.gather(1, (positions // self._block_size)[:, None])[:, 0]
        slots = blocks.long() * self._block_size + positions % self._block_size
        starts = torch.arange(count + 1, dtype=torch.int32, device=self._device)
        batch = PagedBatch(starts, (positions + 1).int(), tables, 1, self._longest)
        return KernelAttention(self._kernel, self._pages, self._rules, slots, [_Part(0, count, batch)])

    def _part(self, batch: StepBatch, first: int, last: int) -> _Part:
        counts, lengths = batch.counts[first:last], (batch.counts + batch.computed)[first:last]
        before = int(batch.counts[:first].sum())
        starts = np.concatenate(([0], np.cumsum(counts)))
        paged = PagedBatch(
            self._tensor(starts.astype(np.int32)),
            self._tensor(lengths.astype(np.int32)),
            self._tensor(np.ascontiguousarray(batch.tables[first:last], np.int32)),
            int(counts.max()),
            self._longest,
        )
        return _Part(before, before + int(starts[-1]), paged)

    def _tensor(self, array: NDArray[np.integer]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)


class KernelAttention:
    """One step's attention: the port that models call. See models.decoder.Attention."""

    def __init__(
        self,
        kernel: PagedKernel,
        pages: Sequence[Pages],
        rules: Sequence[Rule],
        slots: torch.Tensor,
        parts: Sequence[_Part],
    ) -> None:
        self._kernel = kernel
        self._pages = pages
        self._rules = rules
        self._slots = slots
        self._parts = parts

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Writes key and value to the cache, then attends. See models.decoder.Attention for the shapes."""
        pages, rule = self._pages[layer], self._rules[layer]
        self._kernel.store(key, value, self._slots, pages)
        attended = [self._kernel.attend(query[part.start : part.stop], pages, part.batch, rule) for part in self._parts]
        return (attended[0] if len(attended) == 1 else torch.cat(attended)).flatten(1)
