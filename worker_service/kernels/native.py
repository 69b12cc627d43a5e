"""The compiled kernels from Python: threads, single products, and whole decoders over a packed batch.

What one row gets depends neither on the other rows of a batch nor on how prompts are cut nor on the
number of threads: sums are made in one order, whatever the tiling.
"""

import ctypes
import functools
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray

from worker_service.kernels import abi
from worker_service.kernels.adapters import MODULES, AdapterRun, AdapterWeights, c_runs
from worker_service.kernels.build import library_path
from worker_service.kernels.layout import DTYPES, LANES, KvLayout, depth_of
from worker_service.kernels.quantised_layout import QuantisedProduct
from worker_service.kernels.spec import DecoderSpec, check_quantised, check_spec, check_tensor, packed_shape
from worker_service.kernels.structures import (
    QuantisedStructures,
    address,
    layer_structure,
    model_structure,
    quantised_structure,
)

Half = Literal["attention", "mlp"]


@functools.cache
def load() -> ctypes.CDLL | None:
    """The library, built at its first use on this machine; None when it cannot be, or STEPWIRE_NATIVE_KERNELS=0."""
    if os.environ.get("STEPWIRE_NATIVE_KERNELS") == "0":
        return None
    path = library_path()
    return None if path is None else abi.open_library(path)


class Pool:
    """Threads that share the work of a call, the caller's own among them. One call at a time."""

    def __init__(self, library: ctypes.CDLL, threads: int, *, spin_us: int = 50, pin: bool = False) -> None:
        """Threads that wait spin for `spin_us` before they sleep. `pin` binds all but the caller's to cores.

        Raises ValueError for fewer than one thread.
        """
        if not 1 <= threads <= 1024 or not 0 <= spin_us <= 1_000_000:
            raise ValueError(f"threads {threads} must be 1 to 1024, spin_us {spin_us} at most a second")
        self.library = library
        self.threads = threads
        self.handle: int | None = library.sw_pool_create(threads, spin_us, int(pin))

    def close(self) -> None:
        """Ends the threads; harmless when done before. What uses the pool must be gone."""
        if self.handle is not None:
            self.library.sw_pool_destroy(self.handle)
            self.handle = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def linear(
    pool: Pool, x: torch.Tensor, packed: torch.Tensor, out_features: int, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x [rows, in] times a weight of `pack_linear` -> [rows, out_features], plus bias, float32 [out_features]."""
    rows, depth = x.shape
    check_tensor("packed", packed, x.dtype, packed_shape(out_features, depth, x.dtype))
    check_tensor("x", x, x.dtype, (rows, depth))
    check_tensor("bias", bias, torch.float32, (out_features,))
    y = torch.empty(rows, out_features, dtype=x.dtype)
    pool.library.sw_linear(
        pool.handle,
        DTYPES.index(x.dtype),
        address(x),
        rows,
        address(packed),
        address(bias),
        depth,
        out_features,
        address(y),
    )
    return y


def quantised_linear(
    pool: Pool, x: torch.Tensor, product: QuantisedProduct, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x [rows, depth] times a quantised weight -> [rows, num_outputs], plus bias, float32 [num_outputs]."""
    check_quantised("product", product, product.num_outputs, product.depth)
    depth_of(x.dtype)
    check_tensor("x", x, x.dtype, (len(x), product.depth))
    check_tensor("bias", bias, torch.float32, (product.num_outputs,))
    y = torch.empty(len(x), product.num_outputs, dtype=x.dtype)
    weight = quantised_structure(product)
    pool.library.sw_quantised_linear(
        pool.handle, DTYPES.index(x.dtype), address(x), len(x), weight, address(bias), product.num_outputs, address(y)
    )
    return y


@dataclass(frozen=True, slots=True)
class BatchTables:
    """The new tokens of all sequences, one after the other. All int32 and contiguous.

    Tokens query_start[i] to query_start[i + 1] are sequence i's; `computed[i]` of its positions are in
    the cache, and block_tables[i] [max_blocks] says in which blocks its positions lie. A sequence
    that reads blocks which another one fills in the same call comes after that one. The caller
    answers for the block ids. `runs` say which tokens have an adapter, in rising order.
    """

    query_start: NDArray[np.int32]
    computed: NDArray[np.int32]
    block_tables: NDArray[np.int32]
    runs: Sequence[AdapterRun] = ()
    longest: int = field(init=False, compare=False, repr=False)
    """Positions of the longest sequence, the new ones among them."""
    _c_runs: Any = field(default=None, init=False, compare=False, repr=False)
    c: abi.Batch = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        count = len(self.computed)
        for name in ("query_start", "computed", "block_tables"):
            array = getattr(self, name)
            if array.dtype != np.int32 or not array.flags.c_contiguous:
                raise ValueError(f"{name} must be contiguous int32, not {array.dtype}")
        if self.query_start.shape != (count + 1,) or self.block_tables.shape[:1] != (count,):
            raise ValueError(
                f"query_start {self.query_start.shape}, computed {self.computed.shape} and block_tables "
                f"{self.block_tables.shape} are not of the same sequences"
            )
        new = self.query_start[1:] - self.query_start[:-1]
        if count == 0 or self.query_start[0] != 0 or new.min() < 1 or self.computed.min() < 0:
            raise ValueError("query_start must begin with 0 and rise, computed must not be negative")
        object.__setattr__(self, "longest", int((self.computed + new).max()))
        pointers = [array.ctypes.data for array in (self.query_start, self.computed, self.block_tables)]
        batch = abi.Batch(count, int(self.query_start[-1]), *pointers, self.block_tables.shape[1])
        if self.runs:
            check_runs(self.runs, self.num_tokens)
            object.__setattr__(self, "_c_runs", c_runs(self.runs))
            batch.runs, batch.num_runs = ctypes.addressof(self._c_runs), len(self.runs)
        object.__setattr__(self, "c", batch)

    @property
    def num_tokens(self) -> int:
        """New tokens of all sequences."""
        return int(self.query_start[-1])


class Decoder:
    """A decoder's layers on this rank, with their cache. Used by one thread at a time."""

    # Until there is one: __del__ comes also after an __init__ that raised.
    _handle: int | None = None

    def __init__(self, pool: Pool, spec: DecoderSpec, layout: KvLayout, cache: torch.Tensor) -> None:
        """Raises ValueError, naming what does not fit."""
        check_spec(spec, layout)
        check_tensor("cache", cache, layout.held, layout.shape)
        self._pool, self._spec, self._layout = pool, spec, layout
        # The C side holds addresses only: what they point to lives as long as this object.
        self._cache = cache
        self._known_adapters: weakref.WeakSet[AdapterWeights] = weakref.WeakSet()
        self._max_positions = min((len(cos) for cos, _ in spec.rope), default=0)
        self._quantised = QuantisedStructures()
        layers = (abi.Layer * len(spec.layers))(
            *(layer_structure(layer, spec, self._quantised) for layer in spec.layers)
        )
        model = model_structure(spec, layout, layers, cache, self._quantised)
        self._handle = pool.library.sw_decoder_create(pool.handle, model)

    def close(self) -> None:
        """Frees working memory; harmless when done before."""
        if self._handle is not None:
            self._pool.library.sw_decoder_destroy(self._handle)
            self._handle = None

    def __del__(self) -> None:
        self.close()

    @contextmanager
    def timed(self) -> Iterator[dict[str, int]]:
        """Takes the time of the calls within: nanoseconds by operator (`abi.OPERATORS`), there when the block ends."""
        sums = np.zeros(len(abi.OPERATORS), np.int64)
        found: dict[str, int] = {}
        self._pool.library.sw_decoder_time(self._handle, sums.ctypes.data)
        try:
            yield found
        finally:
            self._pool.library.sw_decoder_time(self._handle, None)
            found.update(zip(abi.OPERATORS, sums.tolist(), strict=True))

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Token ids, int64 [num_tokens], of a vocabulary that holds them -> [num_tokens, hidden_size]."""
        hidden = self._empty(len(token_ids))
        self._forward(None, token_ids, hidden, range(0), None)
        return hidden

    def run(self, hidden: torch.Tensor, batch: BatchTables, first: int = 0, last: int | None = None) -> None:
        """Layers [first, last) over `hidden` [num_tokens, hidden_size], in place, residuals included."""
        self._check_batch(batch)
        self._forward(batch.c, None, hidden, range(first, self._num_layers if last is None else last), None)

    def hidden_states(self, token_ids: torch.Tensor, batch: BatchTables, rows: torch.Tensor) -> torch.Tensor:
        """Embedding and all layers in one call -> hidden states of `rows`, int64 [m], rising: [m, hidden_size]."""
        hidden = self._run_whole(token_ids, batch, rows, None)
        return hidden if len(hidden) == len(rows) else hidden.index_select(0, rows)

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Final norm and head of `rows`, int64 [m], of hidden -> float32 [m, vocab_size]."""
        logits = torch.empty(len(rows), self._spec.vocab_size)
        self._forward(None, None, hidden, range(0), self._head(rows, len(hidden), logits=logits))
        return logits

    def greedy(self, hidden: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The most likely token of each of `rows`, int64 [m], the first one of several, without storing
        logits; and whether all its logits are finite, bool [m]."""
        token_ids, finite = self._greedy_outputs(len(rows))
        self._forward(None, None, hidden, range(0), self._head(rows, len(hidden), token_ids=token_ids, finite=finite))
        return token_ids, finite

    def forward(self, token_ids: torch.Tensor, batch: BatchTables, rows: torch.Tensor) -> torch.Tensor:
        """Embedding, all layers, and logits of `rows`, float32 [m, vocab_size], in one call."""
        logits = torch.empty(len(rows), self._spec.vocab_size)
        head = self._head(rows, batch.num_tokens, logits=logits) if len(rows) else None
        self._run_whole(token_ids, batch, rows, head)
        return logits

    def forward_greedy(
        self, token_ids: torch.Tensor, batch: BatchTables, rows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `forward`, with what `greedy` answers."""
        best, finite = self._greedy_outputs(len(rows))
        head = self._head(rows, batch.num_tokens, token_ids=best, finite=finite) if len(rows) else None
        self._run_whole(token_ids, batch, rows, head)
        return best, finite

    def attention_half(self, layer: int, hidden: torch.Tensor, batch: BatchTables) -> torch.Tensor:
        """The attention branch of one layer, neither normalised after nor joined: this rank's partial sum."""
        self._check_batch(batch)
        self._check_hidden(hidden, batch.num_tokens)
        partial = torch.empty_like(hidden, dtype=self._spec.dtype)
        self._pool.library.sw_attention_half(
            self._handle, batch.c, self._layer(layer), address(hidden), address(partial)
        )
        return partial

    def mlp_half(self, layer: int, hidden: torch.Tensor, batch: BatchTables) -> torch.Tensor:
        """The other branch; likewise."""
        self._check_batch(batch)
        self._check_hidden(hidden, batch.num_tokens)
        partial = torch.empty_like(hidden, dtype=self._spec.dtype)
        self._pool.library.sw_mlp_half(self._handle, batch.c, self._layer(layer), address(hidden), address(partial))
        return partial

    def add_branch(self, layer: int, half: Half, hidden: torch.Tensor, branch: torch.Tensor) -> None:
        """Joins a branch, summed over the ranks, to `hidden`, in place, after its post norm if it has one."""
        self._check_hidden(hidden, len(hidden))
        check_tensor("branch", branch, self._spec.dtype, (len(hidden), self._spec.hidden_size))
        self._pool.library.sw_add_branch(
            self._handle, self._layer(layer), int(half == "mlp"), len(hidden), address(hidden), address(branch)
        )

    def _run_whole(
        self, token_ids: torch.Tensor, batch: BatchTables, rows: torch.Tensor, head: abi.Head | None
    ) -> torch.Tensor:
        """Embedding, all layers and the head, if any, of `rows`. Answers the hidden states of all tokens; where rows
        are fewer, and it can, those of `rows` alone: the last layer is computed for them only.
        """
        self._check_batch(batch)
        hidden, c_batch = self._empty(batch.num_tokens), batch.c
        only_rows = len(rows) < batch.num_tokens and not batch.runs and bool((rows[1:] > rows[:-1]).all())
        if only_rows:
            self._check_rows(rows, batch.num_tokens)
            c_batch = abi.Batch.from_buffer_copy(c_batch)
            # Of no rows there is no address, and without one all are wanted.
            c_batch.wanted, c_batch.num_wanted = address(rows if len(rows) else rows.new_zeros(1)), len(rows)
            if head is not None:
                head.rows = None
        self._forward(c_batch, token_ids, hidden, range(self._num_layers), head)
        return hidden[: len(rows)] if only_rows else hidden

    def _forward(
        self,
        batch: abi.Batch | None,
        token_ids: torch.Tensor | None,
        hidden: torch.Tensor,
        layers: range,
        head: abi.Head | None,
    ) -> None:
        if not 0 <= layers.start <= layers.stop <= self._num_layers:
            raise ValueError(f"there are no layers {layers.start} to {layers.stop}: the decoder has {self._num_layers}")
        self._check_hidden(hidden, len(hidden) if batch is None else batch.num_tokens)
        if token_ids is not None:
            check_tensor("token_ids", token_ids, torch.int64, (len(hidden),))
            if self._spec.embedding is None:
                raise ValueError("this decoder has no embedding")
        if batch is None:
            batch = abi.Batch(num_tokens=len(hidden) if token_ids is not None else 0)
        self._pool.library.sw_forward(
            self._handle, batch, address(token_ids), address(hidden), layers.start, layers.stop, head
        )

    def _head(
        self,
        rows: torch.Tensor,
        num_tokens: int,
        *,
        logits: torch.Tensor | None = None,
        token_ids: torch.Tensor | None = None,
        finite: torch.Tensor | None = None,
    ) -> abi.Head:
        self._check_rows(rows, num_tokens)
        if self._spec.head is None:
            raise ValueError("this decoder has no head")
        return abi.Head(address(rows), len(rows), address(logits), address(token_ids), address(finite))

    def _greedy_outputs(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty(count, dtype=torch.int64), torch.empty(count, dtype=torch.bool)

    def _empty(self, num_tokens: int) -> torch.Tensor:
        return torch.empty(num_tokens, self._spec.hidden_size)

    @property
    def _num_layers(self) -> int:
        return len(self._spec.layers)

    def _layer(self, layer: int) -> int:
        if not 0 <= layer < self._num_layers:
            raise ValueError(f"there is no layer {layer}: the decoder has {self._num_layers}")
        return layer

    def _check_rows(self, rows: torch.Tensor, num_tokens: int) -> None:
        check_tensor("rows", rows, torch.int64, (len(rows),))
        numbers = rows.tolist()
        if numbers and not 0 <= min(numbers) <= max(numbers) < num_tokens:
            raise ValueError(f"rows must lie below {num_tokens}")

    def _check_hidden(self, hidden: torch.Tensor, num_tokens: int) -> None:
        if self._handle is None or self._pool.handle is None:
            raise ValueError("the decoder or its pool is closed")
        check_tensor("hidden", hidden, torch.float32, (num_tokens, self._spec.hidden_size))

    def _check_batch(self, batch: BatchTables) -> None:
        for run in batch.runs:
            self._check_adapter(run.weights)
        longest, held = batch.longest, batch.block_tables.shape[1] * self._layout.block_size
        if longest > held or longest > self._max_positions:
            raise ValueError(
                f"a sequence of {longest} positions exceeds its block table ({held}) or the rope tables "
                f"({self._max_positions})"
            )

    def _check_adapter(self, weights: AdapterWeights) -> None:
        if weights in self._known_adapters:
            return
        spec = self._spec
        if weights.num_layers != self._num_layers or not weights.dtypes <= {spec.dtype}:
            raise ValueError(
                f"the adapter is for {weights.num_layers} layers in {weights.dtypes}, not for this decoder's "
                f"{self._num_layers} in {spec.dtype}"
            )
        heads, kv_heads = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        hidden, inner = spec.hidden_size, spec.inner_size
        shapes = (
            (heads, hidden),
            *((kv_heads, hidden),) * 2,
            (hidden, heads),
            *((inner, hidden),) * 2,
            (hidden, inner),
        )
        expected = {name: (-(-out // LANES), depth) for name, (out, depth) in zip(MODULES, shapes, strict=True)}
        for number, layer in enumerate(weights.sizes()):
            for name, size in layer.items():
                if size != expected[name]:
                    raise ValueError(f"the adapter's {name} of layer {number} is {size}, not {expected[name]}")
        self._known_adapters.add(weights)


def check_runs(runs: Sequence[AdapterRun], num_tokens: int) -> None:
    """Raises ValueError unless the runs follow each other within the batch."""
    end = 0
    for run in runs:
        if run.first < end or run.count < 1:
            raise ValueError(f"runs must follow each other: one begins at {run.first}, before {end}, or is empty")
        end = run.first + run.count
    if end > num_tokens:
        raise ValueError(f"a run ends at {end} of {num_tokens} tokens")
