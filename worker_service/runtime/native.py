"""The engine of the compiled CPU kernels: dense decoders in bfloat16 and float32, their weights whole or integers."""

from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from loader.adapters.load import LoraFactors
from loader.config import ModelConfig
from worker_service.kernels import native
from worker_service.kernels.adapters import AdapterRun, AdapterWeights
from worker_service.kernels.layout import LANES, KvLayout
from worker_service.kernels.spec import DecoderSpec
from worker_service.models.native import LAYOUT, decoder_spec, pack_adapter, pack_weights
from worker_service.profiled import is_profiling, part
from worker_service.runtime.adapters import PackedAdapter
from worker_service.runtime.batch import StepBatch
from worker_service.runtime.errors import RuntimeFailure
from worker_service.runtime.executor import Executor
from worker_service.runtime.kv_cache import no_room_for_cache

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


def native_pool(num_threads: int) -> native.Pool | None:
    """Threads for the compiled kernels; None where there are none: no compiler, another CPU, or switched off."""
    library = native.load()
    return None if library is None else native.Pool(library, num_threads)


class NativeEngine:
    """See Engine. For what `models.native.computes`; works on the threads of `pool`."""

    layout = LAYOUT

    def __init__(self, config: ModelConfig, dtype: torch.dtype, pool: native.Pool) -> None:
        self._config = config
        self._dtype = dtype
        self._pool = pool
        self._packed: Mapping[str, torch.Tensor] = {}
        self.kv_bytes_per_token = self._cache_layout(1, LANES).block_bytes // LANES

    def pack(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """See Engine."""
        return pack_weights(self._config, tensors, self._dtype)

    def attach(self, packed: Mapping[str, torch.Tensor]) -> int:
        """See Engine."""
        self._packed = packed
        return sum(tensor.nbytes for tensor in packed.values())

    def executor(self, num_blocks: int, block_size: int, max_model_len: int) -> Executor:
        """See Engine."""
        if block_size % LANES:
            raise RuntimeFailure(
                "invalid",
                f"block_size {block_size} is not a multiple of {LANES}, as the compiled kernels need; set block_size "
                f"to {LANES}, or native_kernels to false",
                {"field": "block_size"},
            )
        spec = decoder_spec(self._config, self._packed, self._dtype, max_model_len)
        return NativeExecutor(self._pool, spec, self._cache_layout(num_blocks, block_size))

    def pack_adapter(self, factors: Mapping[str, LoraFactors]) -> PackedAdapter:
        """See Engine."""
        weights = pack_adapter(self._config, factors)
        return PackedAdapter(weights, weights.num_bytes)

    def attach_adapter(self, packed: PackedAdapter) -> object:
        """See Engine."""
        return packed.weights

    def context_bytes(self, context: int) -> int:  # noqa: ARG002
        """Nothing: keys and values are read where they lie."""
        return 0

    def _cache_layout(self, num_blocks: int, block_size: int) -> KvLayout:
        config = self._config
        return KvLayout(num_blocks, config.num_layers, config.num_kv_heads, block_size, config.head_dim, self._dtype)


class NativeExecutor:
    """See Executor."""

    # A sequence may read blocks that another one fills in the same step: that one is planned before it.
    wants_decodes_first = False
    # Of a small and of a large decoder: up to here reading the weights is what takes the time.
    num_cheap_tokens = 8
    group = None

    def __init__(self, pool: native.Pool, spec: DecoderSpec, layout: KvLayout) -> None:
        """Raises RuntimeFailure "out_of_memory"."""
        self.device = torch.device("cpu")
        self.vocab_size, self._num_layers = spec.vocab_size, len(spec.layers)
        self.num_blocks, self.block_size, self.cache_bytes = layout.num_blocks, layout.block_size, layout.num_bytes
        try:
            cache = layout.allocate()
        except (MemoryError, OSError, RuntimeError) as error:
            raise no_room_for_cache(layout.num_bytes, layout.num_blocks, layout.block_size, self.device) from error
        self._decoder = native.Decoder(pool, spec, layout, cache)

    def take_blocks(self, block_ids: Sequence[IntArray]) -> None:
        """Nothing to do: what an earlier owner left in a block is never read."""

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """See Executor."""
        query_start = np.zeros(len(batch) + 1, np.int32)
        np.cumsum(batch.counts, out=query_start[1:])
        runs = [
            AdapterRun(cast(AdapterWeights, rows.adapter.weights), rows.first, rows.count) for rows in batch.adapters
        ]
        tables = native.BatchTables(
            query_start, batch.computed.astype(np.int32), np.ascontiguousarray(batch.tables, np.int32), runs
        )
        with part("embed"):
            hidden = self._decoder.embed(torch.from_numpy(batch.token_ids))
        if is_profiling():
            for number in range(self._num_layers):
                with part(f"layer {number}"):
                    self._decoder.run(hidden, tables, number, number + 1)
        else:
            self._decoder.run(hidden, tables)
        if len(batch.hidden_tokens) < len(hidden):
            hidden = hidden.index_select(0, torch.from_numpy(batch.hidden_tokens))
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See Executor."""
        with part("head"):
            return self._decoder.logits(hidden, torch.arange(len(hidden)))

    def greedy(self, hidden: torch.Tensor) -> tuple[IntArray, BoolArray]:
        """See Executor."""
        with part("head"):
            token_ids, finite = self._decoder.greedy(hidden, torch.arange(len(hidden)))
        return token_ids.numpy(), finite.numpy()
