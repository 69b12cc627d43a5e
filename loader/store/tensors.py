"""Tensors in and out of the restart store."""

import ctypes
import os
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from loader.store.folder import Limits, StoreFolder
from loader.store.format import (
    ITEM_BYTES,
    PIECE_BYTES,
    Header,
    StoredTensor,
    digest,
    encode_header,
    plan_file,
)
from loader.store.key import EntryKey
from loader.store.mapping import MappedEntry

_ANY_OFFSET = 10**15
_TRIM_EVERY_BYTES = 256 << 20


def mapped_tensors(entry: MappedEntry) -> dict[str, Tensor]:
    """The tensors of an entry, without a copy. They keep it mapped, and must never be written."""
    data = entry.data
    # torch warns of buffers that are read-only; this one says nothing of it. The array owns the mapping.
    region = (ctypes.c_uint8 * data.nbytes).from_address(data.ctypes.data)
    region.owner = data  # type: ignore[attr-defined]
    whole = torch.frombuffer(region, dtype=torch.uint8)
    return {name: _tensor(whole, stored) for name, stored in entry.header.tensors.items()}


def write_entry(
    folder: StoreFolder,
    key: EntryKey,
    tensors: dict[str, Tensor],
    *,
    model: str,
    limits: Limits,
    progress: Callable[[int], None],
    takes: bool = False,
) -> int:
    """Makes an entry of `tensors`, which are contiguous and on any device, and answers the bytes of its file.

    With `takes` each tensor is taken out of `tensors` once it is written, so that memory holds one of them twice and
    not all; without it the file needs as much memory again. `progress` is called with the bytes written so far, and
    ends it by raising. Raises, with nothing left of the entry: StoreFull, StoreBusy, ValueError for a tensor that
    cannot be stored, all three before anything is taken; OSError (no space left); what `progress` raises.
    """
    header = _plan(key, tensors, model)
    largest = max((tensor.num_bytes for tensor in header.tensors.values()), default=0)
    needed = largest if takes else header.file_bytes
    with folder.create(key.name, header.file_bytes, limits, memory_bytes=needed) as descriptor:
        stored, num_written, num_freed = {}, 0, 0
        progress(0)
        for name, plan in header.tensors.items():
            hashes = []
            for start, end in plan.pieces():
                piece = _bytes_of(tensors[name], start - plan.offset, end - plan.offset)
                hashes.append(digest(piece))
                _write(descriptor, piece, start)
                del piece
                num_written += end - start
                progress(num_written)
            stored[name] = StoredTensor(plan.dtype, plan.shape, plan.offset, plan.num_bytes, tuple(hashes))
            if takes:
                del tensors[name]
                num_freed += plan.num_bytes
                if num_freed >= _TRIM_EVERY_BYTES:
                    trim_heap()
                    num_freed = 0
        head = encode_header(Header(key, header.model, header.created_s, header.file_bytes, stored))
        _write(descriptor, memoryview(head), 0)
    if takes:
        trim_heap()
    return header.file_bytes


def trim_heap() -> None:
    """Gives memory that was freed back to the system. glibc keeps blocks of up to 32 MiB."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _plan(key: EntryKey, tensors: Mapping[str, Tensor], model: str) -> Header:
    """The header with offsets and with empty hashes."""
    stored = {}
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in ITEM_BYTES or tensor.layout is not torch.strided or not tensor.is_contiguous():
            raise ValueError(f"tensor {name!r} of {dtype} is no plain tensor")
        blank = ("0" * 32,) * -(-tensor.nbytes // PIECE_BYTES)
        stored[name] = StoredTensor(dtype, tuple(tensor.shape), _ANY_OFFSET, tensor.nbytes, blank)
    draft = Header(key, model, int(time.time()), _ANY_OFFSET, stored)
    # With the longest numbers there can be: the header that is written at last is no longer.
    header_bytes = len(encode_header(draft))
    offsets, file_bytes = plan_file([(tensor.dtype, tensor.shape) for tensor in stored.values()], header_bytes)
    placed = {
        name: StoredTensor(tensor.dtype, tensor.shape, offset, tensor.num_bytes, tensor.hashes)
        for (name, tensor), offset in zip(stored.items(), offsets, strict=True)
    }
    return Header(key, model, draft.created_s, file_bytes, placed)


def _bytes_of(tensor: Tensor, start: int, end: int) -> memoryview:
    # A view of one dimension, which a scalar needs before it can be seen as bytes.
    piece = tensor.detach().reshape(-1).view(torch.uint8)[start:end].cpu()
    return piece.numpy().data


def _write(descriptor: int, data: memoryview, offset: int) -> None:
    while data.nbytes:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def _tensor(whole: Tensor, stored: StoredTensor) -> Tensor:
    dtype = getattr(torch, stored.dtype)
    if not stored.num_bytes:
        return torch.empty(stored.shape, dtype=dtype)
    raw = whole[stored.offset : stored.offset + stored.num_bytes]
    return raw.view(dtype).view(stored.shape)
