"""Tensors in and out of the restart store."""

import ctypes
import os
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from loader.errors import LoadCancelled
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
    tensors: Mapping[str, Tensor],
    *,
    model: str,
    limits: Limits,
    progress: Callable[[int], None],
    cancelled: Callable[[], bool],
) -> int:
    """Makes an entry of `tensors`, which are contiguous and on any device, and answers the bytes of its file.

    Memory beyond the file: one piece of 64 MiB for tensors of another device. Raises StoreFull, StoreBusy, OSError
    (no space left), ValueError for a tensor that cannot be stored, LoadCancelled; then nothing is left of it.
    """
    header = _plan(key, tensors, model)
    with folder.create(key.name, header.file_bytes, limits) as descriptor:
        stored, num_written = {}, 0
        for name, plan in header.tensors.items():
            hashes = []
            for start, end in plan.pieces():
                if cancelled():
                    raise LoadCancelled
                piece = _bytes_of(tensors[name], start - plan.offset, end - plan.offset)
                hashes.append(digest(piece))
                _write(descriptor, piece, start)
                num_written += end - start
                progress(num_written)
            stored[name] = StoredTensor(plan.dtype, plan.shape, plan.offset, plan.num_bytes, tuple(hashes))
        head = encode_header(Header(key, header.model, header.created_s, header.file_bytes, stored))
        _write(descriptor, memoryview(head), 0)
    return header.file_bytes


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
