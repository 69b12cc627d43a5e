"""Reading weights: byte ranges in the order of the files, sliced for a rank, in the wanted type.

What the page cache holds is read from there. The rest is read by direct or buffered reads on as many threads as
turn out to be fastest (see `loader.reading.tuning`). Slices along a dimension but the first are read with what lies
between them, through the page cache, unless their runs are long: so the disk reads each byte once for all ranks of
a machine that load at about the same time. Host memory beyond the results is at most two `READ_BUFFER_BYTES` and
the largest tensor: buffers and what is decoded in them; what is read ahead of `deliver`; and what is stored in
pieces that do not lie one after the other in the result.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from loader.checkpoint import Checkpoint
from loader.errors import LoadCancelled
from loader.reading.reader import Reader
from loader.reading.report import LoadReport
from loader.reading.results import Allocate, plan_results
from loader.reading.tuning import READ_BUFFER_BYTES
from loader.tensors import WeightSlice
from loader.tied import check_tied_head

__all__ = ["READ_BUFFER_BYTES", "LoadReport", "WeightSlice", "bytes_to_read", "load_weights"]


def load_weights(  # noqa: PLR0913  one call is a whole load, and each of these changes how it goes
    checkpoint: Checkpoint,
    wanted: Sequence[WeightSlice],
    *,
    dtype: torch.dtype,
    progress: Callable[[int], None],
    cancelled: Callable[[], bool],
    deliver: Callable[[str, Tensor], None] | None = None,
    allocate: Allocate | None = None,
    report: LoadReport | None = None,
) -> dict[str, Tensor]:
    """Reads the wanted parts into tensors by name: of `dtype`, or of the type they are stored in where that is wanted.
    Blocks of quantised values that are wanted as stored come as bytes, uint8 [..., bytes of a row].

    With `deliver`, each tensor is handed over on this thread as soon as it is complete, in the order of the files, and
    reading goes on meanwhile; the answer is empty then. `allocate` gives the memory of a tensor, on the CPU or on a
    CUDA device, when its first bytes are about to be read; it is called on threads of the load, one call at a time.

    `progress` is called on this thread with all bytes read so far, at least every few MiB; the last call has
    `bytes_to_read(checkpoint, wanted)`. `cancelled` is asked at least as often, and several times a second. `report`
    is filled in at the end.

    Raises CheckpointError for a tensor that is missing, has another shape or cannot be read, for a value that
    float16 cannot hold, and for an output layer that differs from the embedding it is said to share (these bytes
    are not among those counted, see `loader.tied`); LoadCancelled when `cancelled` says so; ValueError for a name
    wanted twice. Of several failures the first in the order of the files is raised.
    """
    begin = time.perf_counter()
    report = LoadReport() if report is None else report
    results = plan_results(checkpoint, wanted, dtype)
    check_tied_head(checkpoint, wanted, cancelled)
    tensors: dict[str, Tensor] = {}
    num_bytes = 0
    in_order = sorted(results, key=lambda result: result.position)
    with (
        _torch_threads_kept(),
        Reader(in_order, allocate or _on_host, report, is_delivered=deliver is not None) as reader,
    ):
        for step in reader.steps():
            if cancelled():
                raise LoadCancelled
            if step.num_bytes:
                num_bytes += step.num_bytes
                progress(num_bytes)
            for result in step.complete:
                assert result.tensor is not None
                if deliver is None:
                    tensors[result.want.name] = result.tensor
                    continue
                start = time.perf_counter()
                deliver(result.want.name, result.tensor)
                report.deliver_s += time.perf_counter() - start
                reader.release(result)
    report.wanted_bytes = num_bytes
    report.wall_s = time.perf_counter() - begin
    return {want.name: tensors[want.name] for want in wanted} if deliver is None else {}


def bytes_to_read(checkpoint: Checkpoint, wanted: Sequence[WeightSlice]) -> int:
    """Bytes of the checkpoint's files that `wanted` is made of. Raises like `load_weights`, reads nothing."""
    return sum(result.file_bytes for result in plan_results(checkpoint, wanted, torch.float32))


def _on_host(want: WeightSlice, dtype: torch.dtype) -> Tensor:
    return torch.empty(want.part_shape, dtype=dtype)


@contextmanager
def _torch_threads_kept() -> Iterator[None]:
    """Reading threads set how many threads torch uses, of which the setting of the whole process follows."""
    num_threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
