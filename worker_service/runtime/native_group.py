"""A rank's part of a decoder on the compiled kernels: whole layers of a stage, or halves of layers between sums."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from worker_service.kernels import native
from worker_service.kernels.adapters import AdapterRun, AdapterWeights
from worker_service.kernels.layout import KvLayout
from worker_service.kernels.spec import DecoderSpec
from worker_service.models.native import NativePart
from worker_service.profiled import is_profiling, note_operator, part
from worker_service.runtime.batch import StepBatch
from worker_service.runtime.group import RankGroup

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


def batch_tables(batch: StepBatch) -> native.BatchTables:
    """A batch as the kernels take it."""
    query_start = np.zeros(len(batch) + 1, np.int32)
    np.cumsum(batch.counts, out=query_start[1:])
    runs = []
    for rows in batch.adapters:
        assert isinstance(rows.adapter.weights, AdapterWeights)
        runs.append(AdapterRun(rows.adapter.weights, rows.first, rows.count))
    return native.BatchTables(
        query_start, batch.computed.astype(np.int32), np.ascontiguousarray(batch.tables, np.int32), runs
    )


def timed_part(decoder: native.Decoder, name: str) -> AbstractContextManager[object]:
    """A part of a step, see `profiled.part`, with its operators by the kernels' own clock."""
    return _timed_part(decoder, name) if is_profiling() else part(name)


@contextmanager
def _timed_part(decoder: native.Decoder, name: str) -> Iterator[None]:
    with part(name), decoder.timed() as operators:
        yield
    for operator, nanoseconds in operators.items():
        if nanoseconds:
            note_operator(name, operator, nanoseconds)


def run_layers(decoder: native.Decoder, hidden: torch.Tensor, tables: native.BatchTables, num_layers: int) -> None:
    """All layers: in one call, or for a profile one after the other, which changes no result."""
    if not is_profiling():
        decoder.run(hidden, tables)
        return
    for number in range(num_layers):
        with timed_part(decoder, f"layer {number}"):
            decoder.run(hidden, tables, number, number + 1)


class NativeGroupExecutor:
    """See Executor."""

    wants_decodes_first = False
    num_cheap_tokens = 8
    # The same on all ranks, whatever the bits of their weights: they must all draft the same.
    token_cost = 0.1

    def __init__(
        self, decoder: native.Decoder, spec: DecoderSpec, layout: KvLayout, part: NativePart, group: RankGroup
    ) -> None:
        self.group = group
        self.device = torch.device("cpu")
        self.vocab_size = part.vocabulary.size
        self.num_blocks, self.block_size, self.cache_bytes = layout.num_blocks, layout.block_size, layout.num_bytes
        self._decoder = decoder
        self._num_layers, self._hidden_size, self._dtype = len(spec.layers), spec.hidden_size, spec.dtype
        self._part = part
        self._is_split = part.place.tensor_parallel_size > 1

    def prepare_decodes(self, max_sequences: int) -> int:  # noqa: ARG002
        """Nothing to do: a step is one call as it is."""
        return 0

    def take_blocks(self, block_ids: Sequence[IntArray]) -> None:
        """Nothing to do: what an earlier owner left in a block is never read."""

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """See Executor."""
        tables, place = batch_tables(batch), self._part.place
        if place.is_first_stage:
            hidden = self._embed(torch.from_numpy(batch.token_ids))
        else:
            hidden = self.group.receive_hidden(len(batch.token_ids), self._hidden_size, self._dtype).float()
        if self._is_split:
            self._run_halves(hidden, tables)
        else:
            run_layers(self._decoder, hidden, tables, self._num_layers)
        if not place.is_last_stage:
            # As a stage without compiled kernels has them.
            self.group.send_hidden(hidden.to(self._dtype))
        elif len(batch.hidden_tokens) < len(hidden):
            hidden = hidden.index_select(0, torch.from_numpy(batch.hidden_tokens))
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See Executor."""
        with timed_part(self._decoder, "head"):
            local = self._decoder.logits(hidden, torch.arange(len(hidden)))
        if not self._is_split:
            return local
        vocabulary = self._part.vocabulary
        width = -(-vocabulary.size // self._part.place.tensor_parallel_size)
        # All ranks' parts must be equally wide to be gathered.
        padded = functional.pad(local, (0, width - len(vocabulary)))
        return self.group.all_gather(padded)[:, : vocabulary.size].contiguous()

    def greedy(self, batch: StepBatch) -> tuple[IntArray, BoolArray]:
        """See Executor. Ranks exchange the likeliest of their own token ids, not all logits."""
        hidden = self.forward(batch)
        rows = torch.arange(len(hidden))
        with timed_part(self._decoder, "head"):
            if not self._is_split:
                token_ids, finite = self._decoder.greedy(hidden, rows)
                return token_ids.numpy(), finite.numpy()
            local = self._decoder.logits(hidden, rows)
        return self.group.likeliest(local, self._part.vocabulary.start)

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        with timed_part(self._decoder, "embed"):
            if not self._is_split:
                return self._decoder.embed(token_ids)
            return self._embed_part(token_ids)

    def _embed_part(self, token_ids: torch.Tensor) -> torch.Tensor:
        vocabulary = self._part.vocabulary
        local = token_ids - vocabulary.start
        elsewhere = (local < 0) | (local >= len(vocabulary))
        hidden = self._decoder.embed(local.masked_fill_(elsewhere, 0))
        return self.group.all_reduce(hidden.masked_fill_(elsewhere[:, None], 0))

    def _run_halves(self, hidden: torch.Tensor, tables: native.BatchTables) -> None:
        decoder, all_reduce = self._decoder, self.group.all_reduce
        for layer in range(self._num_layers):
            with timed_part(decoder, f"layer {layer}"):
                branch = all_reduce(decoder.attention_half(layer, hidden, tables))
                decoder.add_branch(layer, "attention", hidden, branch)
                branch = all_reduce(decoder.mlp_half(layer, hidden, tables))
                decoder.add_branch(layer, "mlp", hidden, branch)
