"""The engine of the compiled CPU kernels: dense decoders, their weights whole or integers."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from loader.adapters.load import LoraFactors
from loader.config import ModelConfig
from loader.shares import RankPlace
from worker_service.kernels import native
from worker_service.kernels.layout import LANES, KvLayout
from worker_service.kernels.quantised_layout import QuantisedProduct
from worker_service.kernels.spec import DecoderSpec, Product
from worker_service.models.native import LAYOUT, decoder_spec, pack_adapter, pack_weights, part_of
from worker_service.profiled import is_profiling
from worker_service.runtime.adapters import PackedAdapter
from worker_service.runtime.batch import StepBatch
from worker_service.runtime.errors import RuntimeFailure
from worker_service.runtime.executor import Executor
from worker_service.runtime.group import RankGroup
from worker_service.runtime.kv_cache import no_room_for_cache
from worker_service.runtime.native_group import NativeGroupExecutor, batch_tables, run_layers, timed_part

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
_ALONE = RankPlace()

# By bits of a weight: those of a few bits are read in so little time that multiplying them counts at once. Measured
# with a decoder of 135M parameters on two cores, 8 tokens against one.
_TOKEN_COSTS = {32: 0.02, 16: 0.02, 8: 0.1, 4: 0.25}


def _bits_of(product: Product) -> int:
    return product.bits if isinstance(product, QuantisedProduct) else 8 * product.element_size()


def native_pool(num_threads: int) -> native.Pool | None:
    """Threads for the compiled kernels; None where there are none: no compiler, another CPU, or switched off."""
    library = native.load()
    return None if library is None else native.Pool(library, num_threads)


class NativeEngine:
    """See Engine. For what `models.native.computes`; works on the threads of `pool`."""

    layout = LAYOUT

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        pool: native.Pool,
        place: RankPlace = _ALONE,
        group: RankGroup | None = None,
        *,
        stored: torch.dtype | None = None,
    ) -> None:
        """`group` is that of the place, where it is not the only one. Keys and values are rounded to `stored`, int8,
        where that is given."""
        self._config = config
        self._stored = stored
        self._part = part_of(config, place)
        self._group = group
        self._dtype = dtype
        self._pool = pool
        self._packed: Mapping[str, torch.Tensor] = {}
        self.kv_bytes_per_token = self._cache_layout(1, LANES).block_bytes // LANES

    def pack(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """See Engine."""
        return pack_weights(self._config, self._part, tensors, self._dtype)

    def attach(self, packed: dict[str, torch.Tensor]) -> int:
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
        spec = decoder_spec(self._config, self._part, self._packed, self._dtype, max_model_len)
        layout = self._cache_layout(num_blocks, block_size)
        if self._group is None or self._part.place.num_ranks == 1:
            return NativeExecutor(self._pool, spec, layout)
        return NativeGroupExecutor(new_decoder(self._pool, spec, layout), spec, layout, self._part, self._group)

    def pack_adapter(self, factors: Mapping[str, LoraFactors]) -> PackedAdapter:
        """See Engine."""
        weights = pack_adapter(self._part, factors)
        return PackedAdapter(weights, weights.num_bytes)

    def attach_adapter(self, packed: PackedAdapter) -> object:
        """See Engine."""
        return packed.weights

    def move_weights(self, device: torch.device) -> None:
        """Nothing to do: they are in host memory always."""

    def context_bytes(self, context: int) -> int:  # noqa: ARG002
        """Nothing: keys and values are read where they lie."""
        return 0

    def _cache_layout(self, num_blocks: int, block_size: int) -> KvLayout:
        part, head_dim = self._part, self._config.head_dim
        return KvLayout(
            num_blocks, len(part.layers), part.num_kv_heads, block_size, head_dim, self._dtype, self._stored
        )


def new_decoder(pool: native.Pool, spec: DecoderSpec, layout: KvLayout) -> native.Decoder:
    """A decoder with a new KV cache. Raises RuntimeFailure "out_of_memory"."""
    try:
        cache = layout.allocate()
    except (MemoryError, OSError, RuntimeError) as error:
        device = torch.device("cpu")
        raise no_room_for_cache(layout.num_bytes, layout.num_blocks, layout.block_size, device) from error
    return native.Decoder(pool, spec, layout, cache)


class NativeExecutor:
    """See Executor."""

    # A sequence may read blocks that another one fills in the same step: that one is planned before it.
    wants_decodes_first = False
    # Beyond, it is multiplying that takes the time of every format, no more reading.
    num_cheap_tokens = 8
    group = None

    def __init__(self, pool: native.Pool, spec: DecoderSpec, layout: KvLayout) -> None:
        """Raises RuntimeFailure "out_of_memory"."""
        self.device = torch.device("cpu")
        self.vocab_size, self._num_layers = spec.vocab_size, len(spec.layers)
        self.num_blocks, self.block_size, self.cache_bytes = layout.num_blocks, layout.block_size, layout.num_bytes
        self.token_cost = max(_TOKEN_COSTS[_bits_of(layer.down)] for layer in spec.layers)
        self._decoder = new_decoder(pool, spec, layout)

    def prepare_decodes(self, max_sequences: int) -> int:  # noqa: ARG002
        """Nothing to do: a step is one call as it is."""
        return 0

    def take_blocks(self, block_ids: Sequence[IntArray]) -> None:
        """Nothing to do: what an earlier owner left in a block is never read."""

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """See Executor."""
        if is_profiling():
            return self._by_layer(batch)
        return self._decoder.hidden_states(*_inputs(batch))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See Executor."""
        with timed_part(self._decoder, "head"):
            return self._decoder.logits(hidden, torch.arange(len(hidden)))

    def greedy(self, batch: StepBatch) -> tuple[IntArray, BoolArray]:
        """See Executor."""
        if is_profiling():
            hidden = self._by_layer(batch)
            with timed_part(self._decoder, "head"):
                token_ids, finite = self._decoder.greedy(hidden, torch.arange(len(hidden)))
        else:
            token_ids, finite = self._decoder.forward_greedy(*_inputs(batch))
        return token_ids.numpy(), finite.numpy()

    def _by_layer(self, batch: StepBatch) -> torch.Tensor:
        token_ids, tables, wanted = _inputs(batch)
        with timed_part(self._decoder, "embed"):
            hidden = self._decoder.embed(token_ids)
        run_layers(self._decoder, hidden, tables, self._num_layers)
        return hidden if len(wanted) == len(hidden) else hidden.index_select(0, wanted)


def _inputs(batch: StepBatch) -> tuple[torch.Tensor, native.BatchTables, torch.Tensor]:
    """Token ids, tables and wanted rows of a batch, as the kernels take them."""
    return torch.from_numpy(batch.token_ids), batch_tables(batch), torch.from_numpy(batch.hidden_tokens)
