"""Every way of reading, on random tensors and slices, against numpy on the whole file's bytes."""

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from loader.byte_runs import BLOCKS, byte_runs
from loader.reading.results import STORED_DTYPES
from loader.reading.tuning import Method, Storage, Tuner
from loader.tensors import Piece, TensorInfo, WeightSlice
from loader.weights import LoadReport, bytes_to_read, load_weights
from tests.support.fake_checkpoint import fake_checkpoint

METHODS: tuple[Method, ...] = ("direct", "buffered", "cached")
FLOATS = ("F32", "F16", "BF16")
QUANTISED = ("Q8_0", "Q4_1", "Q6_K", "Q2_K")
TORCH_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Stored:
    """A tensor of a file, its rows in their right order: in float32, and as bytes of each value or row of blocks."""

    info: TensorInfo
    floats: torch.Tensor | None
    raw: torch.Tensor


class Files:
    """Random tensors in files of their own making, at odd offsets."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        self.numpy = np.random.default_rng(seed)
        self.folder = folder
        self.data: dict[Path, bytearray] = {}

    def write(self) -> None:
        for path, data in self.data.items():
            path.write_bytes(data)

    def tensor(self, name: str, dtype: str, shape: tuple[int, ...], heads: int | None = None) -> Stored:
        """Appends a tensor to one of three files."""
        path = self.folder / f"{self.rng.randrange(3)}.bin"
        data = self.data.setdefault(path, bytearray())
        data.extend(self.numpy.bytes(self.rng.choice((0, 0, 1, 8, 4000, 9000))))
        values, size = BLOCKS[dtype]
        # Such bytes make small finite numbers in every float type.
        raw = self.numpy.integers(0, 0x3C, prod(shape) // values * size, np.uint8)
        info = TensorInfo(name, dtype, shape, path, len(data), raw.size, name, heads)
        data.extend(raw.tobytes())
        rows = raw.reshape(*shape[:-1], -1) if dtype in QUANTISED else raw.reshape(*shape, size)
        return Stored(info, _floats(raw, dtype, shape, heads), torch.from_numpy(_in_order(rows, heads).copy()))


def _floats(raw: np.ndarray, dtype: str, shape: tuple[int, ...], heads: int | None) -> torch.Tensor | None:
    if dtype == "BF16":
        values = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    elif dtype in ("F32", "F16"):
        values = raw.view(np.float32 if dtype == "F32" else np.float16).astype(np.float32)
    elif dtype in QUANTISED:
        values = gguf.quants.dequantize(raw.reshape(1, -1), gguf.GGMLQuantizationType[dtype])
    else:
        return None
    return torch.from_numpy(_in_order(values.reshape(shape), heads).copy())


def _in_order(stored: np.ndarray, heads: int | None) -> np.ndarray:
    """Rows of each head, which are stored as first, middle, second, …, one after the other."""
    if heads is None:
        return stored
    rows = stored.shape[0] // heads
    order = [head * rows + i for head in range(heads) for i in (*range(0, rows, 2), *range(1, rows, 2))]
    return stored[order]


@pytest.fixture
def files(tmp_path: Path, request: pytest.FixtureRequest) -> Files:
    return Files(tmp_path, getattr(request, "param", 0))


def random_tensors(files: Files) -> Iterator[Stored]:
    rng = files.rng
    for number in range(12):
        dtype = rng.choice(
            (*FLOATS, *FLOATS, *QUANTISED, "I64", "I32", "I16", "I8", "U8", "U32", "BOOL", "F8_E4M3", "F64")
        )
        shape = tuple(rng.choice((1, 3, 8, 33)) for _ in range(rng.randrange(4)))
        heads = None
        if dtype in QUANTISED:
            shape = (*shape[:2], 256 * rng.randrange(1, 3))
        if dtype in (*FLOATS, *QUANTISED) and rng.random() < 0.25:
            heads, shape = 2, (rng.choice((8, 24)), *shape[-1:])
        yield files.tensor(f"t{number}", dtype, shape, heads)


def random_want(rng: random.Random, stored: Stored) -> WeightSlice:
    info = stored.info
    as_stored = stored.floats is None or rng.random() < 0.3
    dim = rng.choice((None, *range(len(info.shape))))
    if dim is None:
        return WeightSlice(info.name, info.shape, as_stored=as_stored)
    unit = BLOCKS[info.dtype][0] if as_stored and dim == len(info.shape) - 1 else 1
    ends = sorted(rng.randrange(info.shape[dim] // unit + 1) * unit for _ in range(2))
    return WeightSlice(info.name, info.shape, dim, *ends, as_stored=as_stored)


def expected(stored: Stored, want: WeightSlice, dtype: torch.dtype) -> torch.Tensor:
    raw, info = stored.raw, stored.info
    if not want.as_stored:
        assert stored.floats is not None
        whole = stored.floats.to(dtype)
    elif info.dtype in QUANTISED:
        whole = raw
        if want.dim == len(info.shape) - 1:
            start, stop = (end // BLOCKS[info.dtype][0] * BLOCKS[info.dtype][1] for end in (want.start, want.stop))
            return whole.narrow(want.dim, start, stop - start)
    else:
        whole = raw.contiguous().view(STORED_DTYPES[info.dtype]).squeeze(-1)
    return whole if want.dim is None else whole.narrow(want.dim, want.start, want.stop - want.start)


def same(found: torch.Tensor, right: torch.Tensor) -> bool:
    return (
        found.dtype == right.dtype
        and found.shape == right.shape
        and torch.equal(found.contiguous().view(-1).view(torch.uint8), right.contiguous().view(-1).view(torch.uint8))
    )


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Method:
    """Reads by one method, through buffers so small that most tensors take several."""
    name: Method = request.param
    storage = Storage(disk=Tuner((name,), 3), cache=Tuner((name,), 3))
    monkeypatch.setattr("loader.reading.files.storage_of", lambda device: storage)
    monkeypatch.setattr("loader.reading.files.is_resident", lambda *_: name == "cached")
    monkeypatch.setattr("loader.reading.tuning.Setting.read_bytes", 8192)
    monkeypatch.setattr("loader.reading.decode._STEP_VALUES", 700)
    return name


@pytest.mark.parametrize("files", range(25), indirect=True)
def test_any_slice_of_any_tensor(files: Files, method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    if files.rng.random() < 0.5:
        monkeypatch.setattr("loader.reading.extents.LONG_RUN_BYTES", 64)
    tensors = list(random_tensors(files))
    files.write()
    checkpoint = fake_checkpoint(stored.info for stored in tensors)
    dtype = files.rng.choice(TORCH_FLOATS)
    wanted = [random_want(files.rng, stored) for stored in tensors]
    seen: list[int] = [0]
    report = LoadReport()
    loaded = load_weights(checkpoint, wanted, dtype=dtype, progress=seen.append, cancelled=lambda: False, report=report)
    assert list(loaded) == [want.name for want in wanted]
    for stored, want in zip(tensors, wanted, strict=True):
        assert same(loaded[want.name], expected(stored, want, dtype)), (stored.info, want)
    assert seen[-1] == bytes_to_read(checkpoint, wanted) == report.wanted_bytes
    assert seen[-1] == sum(byte_runs(stored.info, want).num_bytes for stored, want in zip(tensors, wanted, strict=True))
    read = report.cached_bytes if method == "cached" else report.disk_bytes
    assert read >= seen[-1]
    assert report.cached_bytes + report.disk_bytes == read


@pytest.mark.parametrize("files", range(12), indirect=True)
def test_tensors_stored_in_pieces(files: Files, method: Method) -> None:
    rng = files.rng
    tensors, whole = {}, {}
    for number in range(6):
        name, dtype, dim = f"t{number}", rng.choice((*FLOATS, "I32", "Q8_0")), rng.randrange(3)
        shape = [rng.choice((4, 10)) for _ in range(2)] + [256]
        cuts = sorted({0, shape[dim], *(rng.randrange(shape[dim]) // 2 * 2 for _ in range(2))})
        if dtype == "Q8_0" and dim == 2:
            cuts = [0, 64, 256]
        pieces, parts = [], []
        for start, stop in pairwise(cuts):
            part = files.tensor(name, dtype, (*shape[:dim], stop - start, *shape[dim + 1 :]))
            pieces.append(Piece(dim, start, stop, part.info))
            parts.append(part)
        rng.shuffle(pieces)
        info = replace(parts[0].info, shape=tuple(shape), pieces=tuple(pieces), num_bytes=0)
        floats = None if parts[0].floats is None else torch.cat([part.floats for part in parts], dim)  # type: ignore
        tensors[name], whole[name] = info, Stored(info, floats, torch.cat([part.raw for part in parts], dim))
    files.write()
    checkpoint = fake_checkpoint(tensors.values())
    wanted = [random_want(rng, stored) for stored in whole.values()]
    seen = [0]
    loaded = load_weights(checkpoint, wanted, dtype=torch.float32, progress=seen.append, cancelled=lambda: False)
    assert seen[-1] == bytes_to_read(checkpoint, wanted)
    for want in wanted:
        assert same(loaded[want.name], expected(whole[want.name], want, torch.float32)), (whole[want.name].info, want)


@pytest.mark.parametrize("alignment", [4, 512])
def test_direct_reads_fill_tensors_without_a_copy(
    files: Files, monkeypatch: pytest.MonkeyPatch, alignment: int
) -> None:
    """Where the tensor lies to a page as its bytes do in the file, all but its first and last page."""
    stored = files.tensor("t", "F32", (5000, 2))
    files.write()
    storage = Storage(disk=Tuner(("direct", "buffered"), 1), memory_alignment=alignment)
    monkeypatch.setattr("loader.reading.files.storage_of", lambda device: storage)
    monkeypatch.setattr("loader.reading.files.is_resident", lambda *_: False)
    memory = torch.empty(60000, dtype=torch.uint8)
    skip = (stored.info.offset - memory.data_ptr()) % 4096
    target = memory[skip : skip + 40000].view(torch.float32).view(5000, 2)
    reads: list[tuple[int, int]] = []
    real = os.preadv

    def recorded(descriptor: int, views: list[memoryview], offset: int) -> int:
        reads.extend((np.frombuffer(view, np.uint8).ctypes.data, len(view)) for view in views)
        return real(descriptor, views, offset)

    monkeypatch.setattr("loader.reading.files.os.preadv", recorded)
    want = WeightSlice("t", (5000, 2))
    checkpoint = fake_checkpoint([stored.info])
    load_weights(
        checkpoint,
        [want],
        dtype=torch.float32,
        progress=lambda _: None,
        cancelled=lambda: False,
        allocate=lambda want, dtype: target,
    )
    assert same(target, expected(stored, want, torch.float32))
    inside = [size for address, size in reads if target.data_ptr() <= address < target.data_ptr() + 40000]
    assert sum(inside) > 40000 - 2 * 4096
