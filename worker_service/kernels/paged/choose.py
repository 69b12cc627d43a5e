"""Which paged attention a device can run: each is tried on a small problem and held against the reference."""

from collections.abc import Sequence
from dataclasses import dataclass

import structlog
import torch

from worker_service.kernels.paged.flash import FlashKernel
from worker_service.kernels.paged.problem import PagedBatch, PagedKernel, Pages, Rule
from worker_service.kernels.paged.reference import ReferenceKernel

TOLERANCES = {torch.float32: 2e-3, torch.bfloat16: 4e-2, torch.float16: 1e-2}
"""Largest errors of attention over a few dozen values of size 1, by type."""

_log = structlog.stdlib.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Trial:
    """The kind of problem that is to be computed; keys and values are rounded to `stored` where that is given."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    device: torch.device
    stored: torch.dtype | None = None
    rules: Sequence[Rule] = ()


def choose_kernel(trial: Trial) -> PagedKernel | None:
    """The first of torch's flash attention and Triton that computes what the reference does; None for neither."""
    for name in ("flash", "triton"):
        try:
            kernel = paged_kernel(name, trial)
            error = largest_error(kernel, trial)
        except Exception as failure:
            # Whatever a kernel, its compiler or its driver raises is a reason to take the next one.
            _log.info("paged_kernel_unusable", kernel=name, reason=f"{type(failure).__name__}: {failure}"[:500])
            continue
        if error <= TOLERANCES[trial.dtype]:
            _log.info("paged_kernel_chosen", kernel=name, largest_error=error)
            return kernel
        _log.warning("paged_kernel_wrong", kernel=name, largest_error=error, tolerance=TOLERANCES[trial.dtype])
    _log.warning("no_paged_kernel", consequence="plain torch gathers keys and values, which is slower")
    return None


def largest_error(kernel: PagedKernel, trial: Trial) -> float:
    """Largest difference from the reference, of decodes and of chunks, in what is attended and what is stored."""
    generator = torch.Generator().manual_seed(0)
    errors = []
    for counts in ([1, 1, 1], [2, 1, 40]):
        lengths = [count + before for count, before in zip(counts, (0, 2 * trial.block_size, 5), strict=True)]
        batch, slots, num_blocks = _batch(counts, lengths, trial)
        shape = (sum(lengths), trial.num_kv_heads, trial.head_dim)
        key, value = (torch.randn(shape, generator=generator).to(trial.device, trial.dtype) for _ in range(2))
        query_shape = (sum(counts), trial.num_heads, trial.head_dim)
        query = torch.randn(query_shape, generator=generator).to(trial.device, trial.dtype)
        pages, expected_pages = (_pages(num_blocks, trial) for _ in range(2))
        kernel.store(key, value, slots, pages)
        reference = ReferenceKernel()
        reference.store(key, value, slots, expected_pages)
        for rule in trial.rules:
            expected = reference.attend(query, expected_pages, batch, rule)
            got = kernel.attend(query, pages, batch, rule)
            error = (got.float() - expected.float()).abs().max()
            errors.append(float(error) if bool(torch.isfinite(error)) else torch.inf)
    return max(errors)


def paged_kernel(name: str, trial: Trial) -> PagedKernel:
    """The kernel "flash" or "triton". Raises ValueError or ImportError where it is not to be had."""
    if name == "flash":
        return FlashKernel(trial.block_size, trial.device)
    # Not every torch brings Triton.
    from worker_service.kernels.paged.triton_paged import TritonKernel

    return TritonKernel()


def _batch(counts: list[int], lengths: list[int], trial: Trial) -> tuple[PagedBatch, torch.Tensor, int]:
    """A batch whose blocks lie in falling order, the slots of all its positions, and how many blocks there are."""
    held = [-(-length // trial.block_size) for length in lengths]
    next_block, width, slots = sum(held), max(held), []
    tables = torch.zeros(len(lengths), width, dtype=torch.int32)
    for i, (length, count) in enumerate(zip(lengths, held, strict=True)):
        tables[i, :count] = torch.arange(next_block - 1, next_block - 1 - count, -1)
        next_block -= count
        places = torch.arange(length)
        slots.append(tables[i].long()[places // trial.block_size] * trial.block_size + places % trial.block_size)
    query_start = torch.tensor([0, *counts]).cumsum(0).int()
    on_device = [part.to(trial.device) for part in (query_start, torch.tensor(lengths).int(), tables)]
    batch = PagedBatch(on_device[0], on_device[1], on_device[2], max(counts), max(lengths))
    return batch, torch.cat(slots).to(trial.device), sum(held)


def _pages(num_blocks: int, trial: Trial) -> Pages:
    dims = (num_blocks, 2, trial.num_kv_heads, trial.block_size)
    if trial.stored is None:
        data = torch.zeros((*dims, trial.head_dim), dtype=trial.dtype, device=trial.device)
        return Pages(data[:, 0], data[:, 1])
    codes = torch.zeros((*dims, trial.head_dim), dtype=torch.uint8, device=trial.device).view(trial.stored)
    scales = torch.zeros(dims, device=trial.device)
    return Pages(codes[:, 0], codes[:, 1], scales[:, 0], scales[:, 1])
