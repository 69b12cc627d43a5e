"""Reading weights: byte ranges in file order, sliced for a rank, decoded to the wanted type."""

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from loader.checkpoint import Checkpoint
from loader.completeness import missing_tensor, wrong_shape
from loader.dequantise import dequantise
from loader.errors import CheckpointError, LoadCancelled, unreadable
from loader.gguf_format import GGML_TYPES
from loader.tensors import TensorInfo, WeightSlice
from loader.tied import check_tied_head

__all__ = ["WeightSlice", "bytes_to_read", "load_weights"]

# A decoded chunk of 2^19 float32 values stays in a core's cache; a plain read has no such limit.
_CHUNK_VALUES = 1 << 19
_CHUNK_BYTES = 4 << 20
_MAX_THREADS = 8
_BLOCKS = {name: (block_values, block_bytes) for name, block_values, block_bytes in GGML_TYPES.values()}
_TORCH_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def load_weights(
    checkpoint: Checkpoint,
    wanted: Sequence[WeightSlice],
    *,
    dtype: torch.dtype,
    progress: Callable[[int], None],
    cancelled: Callable[[], bool],
) -> dict[str, Tensor]:
    """Reads the wanted parts into CPU tensors of `dtype`, by name.

    `progress` is called on this thread with all bytes read so far, at least every few MiB; the last call has
    `bytes_to_read(checkpoint, wanted)`. `cancelled` is asked as often. Memory beyond the result is a few chunks,
    whatever the size of the checkpoint. While it runs, torch operations of this process use one thread each: the
    chunks are what runs in parallel, on as many threads as torch had.

    Raises CheckpointError for a tensor that is missing, has another shape or cannot be read, for a value that
    float16 cannot hold, and for an output layer that differs from the embedding it is said to share (these bytes
    are not among those counted, see `loader.tied`); LoadCancelled when `cancelled` says so; ValueError for a name
    wanted twice.
    """
    plans = _plan(checkpoint, wanted)
    check_tied_head(checkpoint, wanted, cancelled)
    results = {plan.want.name: torch.empty(plan.want.part_shape, dtype=dtype) for plan in plans}
    with _one_torch_thread() as num_threads, ExitStack() as stack:
        files = _open_files(stack, plans)
        jobs = (
            _Job(plan, files[plan.info.file], results[plan.want.name], start, stop)
            for plan in sorted(plans, key=lambda plan: (str(plan.info.file), plan.info.offset))
            for start, stop in plan.chunks(dtype)
        )
        _run(jobs, num_threads, progress, cancelled)
    return results


def bytes_to_read(checkpoint: Checkpoint, wanted: Sequence[WeightSlice]) -> int:
    """Bytes of the checkpoint's files that `load_weights` reads for `wanted`. Raises like it, reads nothing."""
    return sum((plan.stop - plan.start) * plan.row_bytes for plan in _plan(checkpoint, wanted))


@dataclass(frozen=True, slots=True)
class _Plan:
    """How one slice is read: the rows `[start, stop)` of the stored tensor, which hold all that is wanted.

    Rows are slices along dimension 0, each `row_values` values in `row_bytes` bytes; they are read in multiples of
    `row_group`, so that what is stored together (the rotary rows of a head) is decoded together.
    """

    want: WeightSlice
    info: TensorInfo
    start: int
    stop: int
    row_values: int
    row_bytes: int
    row_group: int

    def chunks(self, dtype: torch.dtype) -> Iterator[tuple[int, int]]:
        """The row ranges to read one after the other."""
        limit = _CHUNK_VALUES
        if self.is_direct(dtype):
            limit = _CHUNK_BYTES * self.row_values // max(1, self.row_bytes)
        step = max(1, limit // max(1, self.row_values * self.row_group)) * self.row_group
        for start in range(self.start, self.stop, step):
            yield start, min(start + step, self.stop)

    def is_direct(self, dtype: torch.dtype) -> bool:
        """Whether the bytes in the file are the bytes of the result."""
        return _TORCH_DTYPES.get(self.info.dtype) == dtype and self.row_group == 1 and not self.want.dim


@dataclass(frozen=True, slots=True)
class _Job:
    """The rows `[start, stop)` of a plan, to be read into their place in `result`."""

    plan: _Plan
    descriptor: int
    result: Tensor
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return (self.stop - self.start) * self.plan.row_bytes

    def run(self) -> int:
        """Reads and decodes; returns the number of bytes read."""
        plan = self.plan
        first = plan.want.start if plan.want.dim == 0 else 0
        if plan.is_direct(self.result.dtype):
            target = (
                self.result.view(-1) if self.result.dim() == 0 else self.result[self.start - first : self.stop - first]
            )
            self._read(target)
            return self.num_bytes
        raw = torch.empty(self.num_bytes, dtype=torch.uint8)
        self._read(raw)
        values = torch.empty((self.stop - self.start, *plan.info.shape[1:]), dtype=self.result.dtype)
        dequantise(raw, plan.info.dtype, values)
        self._check_range(values)
        values = _undo_rotary_order(values, plan.info)
        self._store(values, first)
        return self.num_bytes

    def _store(self, values: Tensor, first: int) -> None:
        want = self.plan.want
        if want.dim:
            self.result[self.start : self.stop].copy_(values.narrow(want.dim, want.start, want.stop - want.start))
            return
        if self.result.dim() == 0:
            self.result.copy_(values.view(()))
            return
        low, high = max(self.start, first), min(self.stop, first + self.result.shape[0])
        self.result[low - first : high - first].copy_(values[low - self.start : high - self.start])

    def _read(self, target: Tensor) -> None:
        """Fills the contiguous `target` with the bytes of the rows."""
        info = self.plan.info
        view = target.reshape(-1).view(torch.uint8).numpy().data
        offset = info.offset + self.start * self.plan.row_bytes
        while view:
            try:
                count = os.preadv(self.descriptor, [view], offset)
            except OSError as error:
                raise unreadable(info.file, error) from error
            if count == 0:
                raise CheckpointError(
                    "invalid",
                    f"{info.file} became shorter while it was read: {len(view)} bytes of tensor {info.name!r} are gone",
                    "wait until the download has ended, then load again",
                    file=info.file,
                    tensor=info.name,
                )
            view = view[count:]
            offset += count

    def _check_range(self, values: Tensor) -> None:
        """float16 ends at 65504: a larger value would become infinite, and the model nonsense."""
        if values.dtype != torch.float16 or self.plan.info.dtype == "F16" or bool(torch.isfinite(values).all()):
            return
        info = self.plan.info
        raise CheckpointError(
            "unsupported",
            f"{info.file}: tensor {info.name!r} has values that float16 cannot hold",
            "load the model as bfloat16 or float32",
            file=info.file,
            tensor=info.name,
            expected="at most 65504",
        )


def _plan(checkpoint: Checkpoint, wanted: Sequence[WeightSlice]) -> list[_Plan]:
    if len({want.name for want in wanted}) != len(wanted):
        raise ValueError("a tensor is wanted twice")
    return [_plan_one(checkpoint, want) for want in wanted]


def _plan_one(checkpoint: Checkpoint, want: WeightSlice) -> _Plan:
    info = checkpoint.tensors.get(want.name)
    if info is None:
        raise missing_tensor(checkpoint.path, want.name, want.shape, len(checkpoint.tensors))
    if info.shape != want.shape:
        raise wrong_shape(info, want.shape)
    block_values, block_bytes = _block(info)
    num_rows = info.shape[0] if info.shape else 1
    row_values = prod(info.shape[1:])
    row_bytes = row_values * block_bytes // block_values
    row_group = 1
    if info.rotary_heads is not None:
        row_group = num_rows // info.rotary_heads
    start, stop = (want.start, want.stop) if want.dim == 0 else (0, num_rows)
    if start < stop:
        start, stop = start - start % row_group, stop + -stop % row_group
    return _Plan(want, info, start, stop, row_values, row_bytes, row_group)


def _block(info: TensorInfo) -> tuple[int, int]:
    block = _BLOCKS.get(info.dtype)
    if block is None:
        raise CheckpointError(
            "unsupported",
            f"{info.file}: tensor {info.name!r} is stored as {info.dtype}",
            f"use a model stored as one of {', '.join(_BLOCKS)}",
            file=info.file,
            tensor=info.name,
            expected=", ".join(_BLOCKS),
            found=info.dtype,
        )
    return block


def _undo_rotary_order(values: Tensor, info: TensorInfo) -> Tensor:
    """llama GGUFs store the two halves of each head's rows alternately; Hugging Face one after the other."""
    if info.rotary_heads is None:
        return values
    head_dim = info.shape[0] // info.rotary_heads
    pairs = values.view(-1, head_dim // 2, 2, *values.shape[1:])
    return pairs.transpose(1, 2).reshape(values.shape)


@contextmanager
def _one_torch_thread() -> Iterator[int]:
    """Yields how many threads torch had. Its own threads, woken for each small chunk, cost more than they give."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield num_threads
    finally:
        torch.set_num_threads(num_threads)


def _open_files(stack: ExitStack, plans: Sequence[_Plan]) -> Mapping[Path, int]:
    files: dict[Path, int] = {}
    for path in sorted({plan.info.file for plan in plans}):
        try:
            files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise unreadable(path, error) from error
        stack.callback(os.close, files[path])
    return files


def _run(
    jobs: Iterator[_Job], num_threads: int, progress: Callable[[int], None], cancelled: Callable[[], bool]
) -> None:
    """Runs the jobs a few at a time, in order, so that reads stay sequential and buffers few."""
    num_threads = max(1, min(num_threads, _MAX_THREADS))
    num_bytes = 0
    running: deque[Future[int]] = deque()
    with ThreadPoolExecutor(num_threads, thread_name_prefix="load") as pool:
        try:
            for job in jobs:
                if cancelled():
                    raise LoadCancelled
                running.append(pool.submit(job.run))
                if len(running) > num_threads:
                    num_bytes += running.popleft().result()
                    progress(num_bytes)
            while running:
                num_bytes += running.popleft().result()
                progress(num_bytes)
        except BaseException:
            for future in running:
                future.cancel()
            raise
