"""Steps of one token a sequence, recorded once for each size of a batch and replayed: a step of a small model on a fast
device otherwise costs more to launch than to compute."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from worker_service.runtime.batch import StepBatch

# Rows of the inputs before the block table.
_TOKEN, _POSITION, _TABLE = 0, 1, 2


class Recorder(Protocol):
    """Records what a device computes, to have it computed again from the same memory to the same memory."""

    def record(self, compute: Callable[[], torch.Tensor]) -> "Recorded":
        """Runs `compute`, which neither allocates by size of its data nor asks the device for values."""
        ...

    def driver_bytes(self) -> int:
        """What the recordings so far keep of the device's memory, beside what torch's allocator knows of."""
        ...


@dataclass(frozen=True, slots=True)
class Recorded:
    """A recording: where its result lies, and what computes it anew."""

    result: torch.Tensor
    replay: Callable[[], None]


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """What a decode computes from, of `rows` sequences: int64 [rows] each, and block tables, int32 [rows, width]."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    tables: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Bucket:
    """A recording with its inputs: int32 [2 + width, rows] on the host and on the device, in memory that all share. The
    table's entries of all rows at one place lie side by side, so that those in use are one run to copy."""

    size: int
    host: torch.Tensor
    inputs: torch.Tensor
    recorded: Recorded


def bucket_sizes(max_sequences: int) -> list[int]:
    """Sizes of batches that are recorded, rising: close enough that little is computed for nobody."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 1025, 64)]
    return [size for size in sizes if size < max_sequences] + [max_sequences] * (max_sequences <= 1024)


class DecodeGraphs:
    """The recordings of one executor. A batch goes into the smallest that holds it; rows that are left over compute for
    the spare block, which no sequence has."""

    def __init__(
        self,
        compute: Callable[[DecodeInputs], torch.Tensor],
        recorder: Recorder,
        *,
        spare_block: int,
        table_width: int,
        device: torch.device,
    ) -> None:
        """`compute` answers hidden states [rows, hidden_size]."""
        self._compute = compute
        self._recorder = recorder
        self._spare_block = spare_block
        self._table_width = table_width
        self._device = device
        self._buckets: list[_Bucket] = []

    @torch.inference_mode()
    def prepare(self, max_sequences: int) -> int:
        """Records batches of up to so many sequences; answers the bytes that the driver keeps for it."""
        sizes = bucket_sizes(max_sequences)
        host = torch.empty(sizes[-1] * (_TABLE + self._table_width), dtype=torch.int32)
        if self._device.type == "cuda":
            host = host.pin_memory()
        inputs = torch.empty_like(host, device=self._device)
        # The largest first: the memory that it works in serves the others too.
        self._buckets = [self._record(size, host, inputs) for size in reversed(sizes)][::-1]
        return self._recorder.driver_bytes()

    def run(self, batch: StepBatch) -> torch.Tensor | None:
        """Hidden states of a batch, which the next run overwrites; None for one that was not recorded."""
        count = len(batch)
        if batch.adapters or len(batch.token_ids) != count:
            return None
        bucket = next((bucket for bucket in self._buckets if bucket.size >= count), None)
        if bucket is None:
            return None
        width = batch.tables.shape[1]
        host = bucket.host.numpy()
        host[_TOKEN : _TABLE + width, count:] = self._padding(width)[:, None]
        host[_TOKEN, :count] = batch.token_ids
        host[_POSITION, :count] = batch.positions
        host[_TABLE : _TABLE + width, :count] = batch.tables.T
        bucket.inputs[: _TABLE + width].copy_(bucket.host[: _TABLE + width], non_blocking=True)
        bucket.recorded.replay()
        return bucket.recorded.result[:count]

    def _record(self, size: int, all_of_host: torch.Tensor, all_of_inputs: torch.Tensor) -> _Bucket:
        host, inputs = (
            whole[: size * (_TABLE + self._table_width)].view(-1, size) for whole in (all_of_host, all_of_inputs)
        )
        host.numpy()[:] = self._padding(self._table_width)[:, None]
        inputs.copy_(host)

        def compute() -> torch.Tensor:
            tables = inputs[_TABLE:].t().contiguous()
            return self._compute(DecodeInputs(inputs[_TOKEN].long(), inputs[_POSITION].long(), tables))

        return _Bucket(size, host, inputs, self._recorder.record(compute))

    def _padding(self, width: int) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
        """The column of a row that nobody asked for: some token, at the first position of the spare block."""
        column = np.zeros(_TABLE + width, np.int32)
        column[_TABLE:] = self._spare_block
        return column


class CudaRecorder:
    """CUDA graphs, which share the memory that they work in: never two of them at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._unknown_before = self._unknown_bytes()

    def record(self, compute: Callable[[], torch.Tensor]) -> Recorded:
        """See Recorder."""
        # Kernels are compiled and libraries make their workspaces at the first call, which a graph cannot hold.
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            compute()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = compute()
        return Recorded(result, graph.replay)

    def driver_bytes(self) -> int:
        """See Recorder."""
        return max(0, self._unknown_bytes() - self._unknown_before)

    def _unknown_bytes(self) -> int:
        """What is in use on the device, less what torch's allocator has taken of it."""
        torch.cuda.synchronize(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free - torch.cuda.memory_reserved(self._device)
