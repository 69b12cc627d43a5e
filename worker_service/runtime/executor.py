"""A model with its KV cache, as the runner uses them: a packed batch in, what to sample from out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray

from worker_service.kernels.paged.problem import PagedKernel
from worker_service.models.decoder import Attention
from worker_service.models.lora import AdapterFactors, RowAdapters
from worker_service.models.model import Model
from worker_service.profiled import part
from worker_service.runtime.adapters import ResidentAdapter
from worker_service.runtime.attention import TILE, AttentionPlanner, PagedAttention, gather_bytes
from worker_service.runtime.batch import StepBatch
from worker_service.runtime.decode_graphs import DecodeGraphs, DecodeInputs, Recorder
from worker_service.runtime.group import RankGroup
from worker_service.runtime.kv_cache import CacheShape, KvCache
from worker_service.runtime.paged_attention import KernelPlanner

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


class Executor(Protocol):
    """Computes steps over `num_blocks` blocks of `block_size` positions. Used by one thread only."""

    @property
    def wants_decodes_first(self) -> bool:
        """How batches are to be ordered, see `build_batch`."""
        ...

    @property
    def num_cheap_tokens(self) -> int:
        """How many tokens of a step cost no more than `token_cost`: drafts fill it up to these."""
        ...

    @property
    def token_cost(self) -> float:
        """Time that another token adds to a step of a few, as a part of the time of one; the same on all ranks."""
        ...

    @property
    def group(self) -> RankGroup | None:
        """The ranks that it computes with; None for none."""
        ...

    @property
    def device(self) -> torch.device: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def cache_bytes(self) -> int:
        """Bytes of the KV tensors."""
        ...

    def prepare_decodes(self, max_sequences: int) -> int:
        """Makes ready for steps of one token for each of up to so many sequences.

        Answers the bytes that the device's driver keeps for it, which nobody else counts.
        """
        ...

    def take_blocks(self, block_ids: Sequence[IntArray]) -> None:
        """Makes blocks ready for sequences that begin to write them."""
        ...

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Runs all layers over the batch's tokens, storing their keys and values.

        Answers the hidden states of the rows `batch.hidden_tokens`, [hidden_tokens, hidden_size]; a stage before the
        last hands all of them to the next one, and its own answer means nothing.
        """
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden_size] -> [rows, vocab_size]."""
        ...

    def greedy(self, batch: StepBatch) -> tuple[IntArray, BoolArray]:
        """As `forward`: the likeliest token after each of those rows, and whether its logits are finite."""
        ...


@dataclass(frozen=True, slots=True)
class Paging:
    """What attends to keys and values where they lie. With a recorder, decodes are recorded: then the cache has a spare
    block, and the model asks the device for nothing."""

    kernel: PagedKernel
    recorder: Recorder | None = None


class TorchExecutor:
    """A decoder of plain torch operators, on any device."""

    wants_decodes_first = True
    num_cheap_tokens = 8
    # Of one sequence less; but several sequences attend one by one when they have more than a token each.
    token_cost = 0.1

    def __init__(
        self,
        model: Model,
        cache: KvCache,
        *,
        max_model_len: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        group: RankGroup | None = None,
        paging: Paging | None = None,
    ) -> None:
        """Without `paging` keys and values are gathered before attention reads them."""
        self._model = model
        self._cache = cache
        self._dtype = dtype
        self.group = group
        self.device = device
        self.vocab_size = model.config.vocab_size
        self.num_blocks, self.block_size, self.cache_bytes = cache.num_blocks, cache.block_size, cache.num_bytes
        # A window that no context outgrows is none.
        windows = [w if w is not None and w < max_model_len else None for w in model.windows]
        self._planner: AttentionPlanner | KernelPlanner
        self._graphs: DecodeGraphs | None = None
        if paging is None:
            self._planner = AttentionPlanner(cache, device, windows, model.scores)
            return
        self._planner = planner = KernelPlanner(
            cache, paging.kernel, windows, model.scores, max_model_len=max_model_len, device=device
        )
        if paging.recorder is None:
            return

        def decode(inputs: DecodeInputs) -> torch.Tensor:
            attention = planner.plan_decodes(inputs.positions, inputs.tables)
            return model.forward(inputs.token_ids, inputs.positions, attention)

        self._graphs = DecodeGraphs(
            decode,
            paging.recorder,
            spare_block=cache.num_blocks,
            table_width=-(-max_model_len // cache.block_size),
            device=device,
        )

    def prepare_decodes(self, max_sequences: int) -> int:
        """Records them, where they are recorded at all."""
        return 0 if self._graphs is None else self._graphs.prepare(max_sequences)

    def take_blocks(self, block_ids: Sequence[IntArray]) -> None:
        """Clears them; see KvCache."""
        self._cache.clear(self._tensor(np.concatenate(block_ids)))

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """See Executor."""
        hidden = None if self._graphs is None else self._graphs.run(batch)
        if hidden is None:
            adapters = self._row_adapters(batch) if batch.adapters else None
            positions, attention = self._tensor(batch.positions), self._attention(batch)
            hidden = self._model.forward(self._input(batch), positions, attention, adapters)
        if self.group is not None and not self._model.rank_place.is_last_stage:
            self.group.send_hidden(hidden)
            return hidden
        if len(batch.hidden_tokens) < len(hidden):
            hidden = hidden.index_select(0, self._tensor(batch.hidden_tokens))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See Executor."""
        with part("head"):
            return self._model.logits(hidden)

    def greedy(self, batch: StepBatch) -> tuple[IntArray, BoolArray]:
        """See Executor."""
        peaks, token_ids = self.logits(self.forward(batch)).max(-1)
        return token_ids.cpu().numpy(), torch.isfinite(peaks).cpu().numpy()

    def _attention(self, batch: StepBatch) -> Attention:
        if isinstance(self._planner, KernelPlanner):
            return self._planner.plan(batch)
        plan = self._planner.plan(batch.slots(self.block_size), batch.counts, batch.computed, batch.tables)
        return PagedAttention(self._cache, self._planner, plan)

    def _row_adapters(self, batch: StepBatch) -> RowAdapters:
        numbers: dict[ResidentAdapter, int] = {}
        which = np.full(len(batch.token_ids), -1, np.int64)
        for rows in batch.adapters:
            which[rows.first : rows.first + rows.count] = numbers.setdefault(rows.adapter, len(numbers))
        return RowAdapters([cast(AdapterFactors, adapter.weights) for adapter in numbers], self._tensor(which))

    def _input(self, batch: StepBatch) -> torch.Tensor:
        if self.group is None or self._model.rank_place.is_first_stage:
            return self._tensor(batch.token_ids)
        return self.group.receive_hidden(len(batch.token_ids), self._model.config.hidden_size, self._dtype)

    def _tensor(self, array: IntArray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)


def context_bytes(shape: CacheShape, context: int) -> int:
    """What a TorchExecutor takes more than a step of fresh prompts when contexts are up to `context` tokens long."""
    return 2 * gather_bytes(shape, context) + TILE * context * shape.dtype.itemsize
