import os
import threading
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from loader.checkpoint import Checkpoint, open_checkpoint
from loader.errors import CheckpointError, LoadCancelled
from loader.reading.tuning import MAX_THREADS, Storage, Tuner
from loader.weights import LoadReport, WeightSlice, bytes_to_read, load_weights
from tests.support.tiny_checkpoint import make_tiny_llama, tiny_tensors
from tests.support.tiny_gguf import TINY_CONFIG, make_tiny_gguf

Q = "model.layers.1.self_attn.q_proj.weight"
O = "model.layers.1.self_attn.o_proj.weight"  # noqa: E741
NORM = "model.norm.weight"


def load(checkpoint: Checkpoint, *wanted: WeightSlice, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return load_weights(checkpoint, wanted, dtype=dtype, progress=lambda _: None, cancelled=lambda: False)


def everything(checkpoint: Checkpoint) -> list[WeightSlice]:
    return [WeightSlice(name, info.shape) for name, info in checkpoint.tensors.items()]


def part(checkpoint: Checkpoint, name: str, dim: int | None, start: int = 0, stop: int = 0) -> torch.Tensor:
    want = WeightSlice(name, checkpoint.tensors[name].shape, dim, start, stop)
    return load(checkpoint, want)[name]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks so small that every tensor takes several."""
    monkeypatch.setattr("loader.reading.decode._STEP_VALUES", 700)
    monkeypatch.setattr("loader.reading.tuning.Setting.read_bytes", 8192)


@pytest.fixture
def safetensors(tmp_path: Path) -> Checkpoint:
    return open_checkpoint(make_tiny_llama(tmp_path / "hf", sharded=True))


@pytest.fixture
def gguf(tmp_path: Path) -> Checkpoint:
    return open_checkpoint(make_tiny_gguf(tmp_path / "m.gguf"))


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float16])
def test_safetensors_in_every_type(tmp_path: Path, stored: str, wanted: torch.dtype) -> None:
    folder = make_tiny_llama(tmp_path, dtype=stored)
    checkpoint = open_checkpoint(folder)
    loaded = load(checkpoint, *everything(checkpoint), dtype=wanted)
    expected = load_file(folder / "model.safetensors")
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(loaded[name], tensor.to(wanted)), name


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_qwen_gguf_holds_rows_as_they_are(tmp_path: Path, architecture: str) -> None:
    checkpoint = open_checkpoint(make_tiny_gguf(tmp_path / "m.gguf", architecture=architecture))
    expected = tiny_tensors({**TINY_CONFIG, "model_type": architecture}, seed=0, tie=False)
    assert checkpoint.tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(part(checkpoint, name, None), torch.from_numpy(tensor))


def test_gguf_rows_come_back_in_order(gguf: Checkpoint) -> None:
    loaded = load(gguf, *everything(gguf))
    for name, tensor in tiny_tensors(TINY_CONFIG, seed=0, tie=False).items():
        assert torch.equal(loaded[name], torch.from_numpy(tensor)), name


@pytest.mark.parametrize(("quantisation", "tolerance"), [("Q8_0", 0.02), ("Q4_1", 0.2), ("F16", 1e-3), ("BF16", 1e-2)])
def test_quantised_gguf_is_close_to_what_was_quantised(tmp_path: Path, quantisation: str, tolerance: float) -> None:
    checkpoint = open_checkpoint(make_tiny_gguf(tmp_path / "m.gguf", quantisation=quantisation))
    loaded = load(checkpoint, *everything(checkpoint))
    for name, tensor in tiny_tensors(TINY_CONFIG, seed=0, tie=False).items():
        original = torch.from_numpy(tensor)
        error = (loaded[name] - original).abs().max() / original.abs().max()
        assert error < tolerance, name


@pytest.mark.parametrize("source", ["safetensors", "gguf"])
@pytest.mark.parametrize(("start", "stop"), [(0, 16), (16, 48), (5, 9), (10, 50), (63, 64), (0, 64), (7, 7)])
def test_rows_of_a_rank(request: pytest.FixtureRequest, source: str, start: int, stop: int) -> None:
    checkpoint = request.getfixturevalue(source)
    whole = part(checkpoint, Q, None)
    assert torch.equal(part(checkpoint, Q, 0, start, stop), whole[start:stop])


@pytest.mark.parametrize("source", ["safetensors", "gguf"])
@pytest.mark.parametrize(("start", "stop"), [(0, 32), (32, 64), (5, 9), (64, 64)])
def test_columns_of_a_rank(request: pytest.FixtureRequest, source: str, start: int, stop: int) -> None:
    checkpoint = request.getfixturevalue(source)
    for name in (O, Q):
        whole = part(checkpoint, name, None)
        assert torch.equal(part(checkpoint, name, 1, start, stop), whole[:, start:stop])


def test_columns_that_cut_quantised_blocks(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_tiny_gguf(tmp_path / "m.gguf", quantisation="Q4_1"))
    assert torch.equal(part(checkpoint, O, 1, 3, 41), part(checkpoint, O, None)[:, 3:41])


def test_part_of_a_vector(safetensors: Checkpoint) -> None:
    assert torch.equal(part(safetensors, NORM, 0, 3, 11), part(safetensors, NORM, None)[3:11])


def test_ranks_together_hold_the_whole(gguf: Checkpoint) -> None:
    parts = [part(gguf, Q, 0, rank * 16, rank * 16 + 16) for rank in range(4)]
    assert torch.equal(torch.cat(parts), part(gguf, Q, None))


def test_rows_read_no_more_than_they_need(safetensors: Checkpoint) -> None:
    want = WeightSlice(Q, (64, 64), 0, 16, 32)
    assert bytes_to_read(safetensors, [want]) == 16 * 64 * 4
    assert bytes_to_read(safetensors, everything(safetensors)) == safetensors.total_bytes


def test_rows_outside_the_part_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_checkpoint(make_tiny_llama(tmp_path))
    info = checkpoint.tensors[Q]
    reads: list[tuple[int, int]] = []
    real = os.preadv

    def recorded(descriptor: int, buffers: Any, offset: int) -> int:
        reads.append((offset, offset + sum(len(buffer) for buffer in buffers)))
        return real(descriptor, buffers, offset)

    monkeypatch.setattr("loader.reading.files.os.preadv", recorded)
    part(checkpoint, Q, 0, 16, 32)
    row = 64 * 4
    assert min(start for start, _ in reads) == info.offset + 16 * row
    assert max(stop for _, stop in reads) == info.offset + 32 * row


def test_reads_files_from_front_to_back(safetensors: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Storage(disk=Tuner(("direct", "buffered"), 1), cache=Tuner(("cached",), 1))
    monkeypatch.setattr("loader.reading.files.storage_of", lambda device: one)
    offsets: dict[str, list[int]] = {}
    real = os.preadv

    def recorded(descriptor: int, buffers: Any, offset: int) -> int:
        offsets.setdefault(os.readlink(f"/proc/self/fd/{descriptor}"), []).append(offset)
        return real(descriptor, buffers, offset)

    monkeypatch.setattr("loader.reading.files.os.preadv", recorded)
    load(safetensors, *reversed(everything(safetensors)))
    assert len(offsets) == 2
    for found in offsets.values():
        assert found == sorted(found)


def test_short_reads_are_continued(safetensors: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = load(safetensors, *everything(safetensors))
    real = os.preadv

    def short(descriptor: int, buffers: Any, offset: int) -> int:
        return real(descriptor, [buffers[0][:100]], offset)

    monkeypatch.setattr("loader.reading.files.os.preadv", short)
    for name, tensor in load(safetensors, *everything(safetensors)).items():
        assert torch.equal(tensor, expected[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_progress_counts_every_byte(safetensors: Checkpoint, dtype: torch.dtype) -> None:
    wanted = [WeightSlice(Q, (64, 64), 0, 0, 32), WeightSlice(O, (64, 64), 1, 0, 32), WeightSlice(NORM, (64,))]
    seen: list[int] = []
    load_weights(safetensors, wanted, dtype=dtype, progress=seen.append, cancelled=lambda: False)
    assert seen == sorted(seen)
    assert seen[-1] == bytes_to_read(safetensors, wanted)
    assert len(seen) > len(wanted)


def test_callbacks_run_on_the_caller_thread(safetensors: Checkpoint) -> None:
    threads: set[int] = set()

    def seen(_: int = 0) -> bool:
        threads.add(threading.get_ident())
        return False

    load_weights(safetensors, everything(safetensors), dtype=torch.float32, progress=seen, cancelled=seen)
    assert threads == {threading.get_ident()}


def test_cancelled_half_way(safetensors: Checkpoint) -> None:
    read: list[int] = []
    with pytest.raises(LoadCancelled):
        load_weights(
            safetensors,
            everything(safetensors),
            dtype=torch.float32,
            progress=read.append,
            cancelled=lambda: len(read) >= 3,
        )
    assert len(read) == 3


def test_thread_count_is_given_back(safetensors: Checkpoint) -> None:
    before = torch.get_num_threads()
    load(safetensors, WeightSlice(NORM, (64,)))
    with pytest.raises(LoadCancelled):
        load_weights(
            safetensors, everything(safetensors), dtype=torch.float32, progress=lambda _: None, cancelled=lambda: True
        )
    assert torch.get_num_threads() == before


def test_an_error_of_the_caller_ends_the_load(safetensors: Checkpoint) -> None:
    def fails(_: int) -> None:
        raise RuntimeError("the stream is gone")

    with pytest.raises(RuntimeError, match="stream is gone"):
        load_weights(safetensors, everything(safetensors), dtype=torch.float32, progress=fails, cancelled=lambda: False)


def refused(checkpoint: Checkpoint, *wanted: WeightSlice, dtype: torch.dtype = torch.float32) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        load(checkpoint, *wanted, dtype=dtype)
    return caught.value


def test_tensor_missing(safetensors: Checkpoint) -> None:
    error = refused(safetensors, WeightSlice("model.layers.9.mlp.up_proj.weight", (128, 64)))
    assert (error.tensor, error.expected) == ("model.layers.9.mlp.up_proj.weight", "[128, 64]")
    assert error.file == safetensors.path


def test_wrong_shape(safetensors: Checkpoint) -> None:
    error = refused(safetensors, WeightSlice(Q, (128, 64)))
    assert (error.tensor, error.expected, error.found) == (Q, "[128, 64]", "[64, 64]")
    assert error.file == safetensors.tensors[Q].file


def test_file_gone_since_it_was_opened(safetensors: Checkpoint) -> None:
    file = safetensors.tensors[Q].file
    file.unlink()
    error = refused(safetensors, *everything(safetensors))
    assert (error.code, error.file) == ("not_found", file)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_file_cut_since_it_was_opened(safetensors: Checkpoint, dtype: torch.dtype) -> None:
    file = safetensors.tensors[Q].file
    os.truncate(file, safetensors.tensors[Q].offset + 10)
    error = refused(safetensors, *everything(safetensors), dtype=dtype)
    assert error.file == file
    assert "became shorter" in error.message


def test_value_that_float16_cannot_hold(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path)
    file = folder / "model.safetensors"
    checkpoint = open_checkpoint(folder)
    raw = bytearray(file.read_bytes())
    offset = checkpoint.tensors[Q].offset
    raw[offset : offset + 4] = torch.tensor([70000.0]).numpy().tobytes()
    file.write_bytes(raw)
    error = refused(checkpoint, *everything(checkpoint), dtype=torch.float16)
    assert error.tensor == Q
    assert "bfloat16" in error.remedy


def test_name_wanted_twice(safetensors: Checkpoint) -> None:
    with pytest.raises(ValueError, match="twice"):
        load(safetensors, WeightSlice(NORM, (64,)), WeightSlice(NORM, (64,)))


@pytest.mark.parametrize(("dim", "start", "stop"), [(2, 0, 1), (-1, 0, 1), (0, 3, 2), (0, -1, 2), (1, 0, 65)])
def test_slice_outside_the_tensor(dim: int, start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="outside"):
        WeightSlice(Q, (64, 64), dim, start, stop)


def test_nothing_wanted(safetensors: Checkpoint) -> None:
    assert load(safetensors) == {}


def test_rotary_biases_of_a_gguf_come_back_in_order(tmp_path: Path) -> None:
    """Rows of a head are stored 0, 8, 1, 9, …: first and second half by turns."""
    stored = torch.arange(16).view(2, 8).T.reshape(-1)
    sizes = {"attn_q": 64, "attn_k": 32, "attn_v": 32, "attn_output": 64}
    biases = {}
    for name, size in sizes.items():
        rows = torch.arange(size, dtype=torch.float32)
        rotary = name in ("attn_q", "attn_k")
        biases[name] = rows.view(-1, 16)[:, stored].reshape(-1) if rotary else rows
    extra = {f"blk.{layer}.{name}.bias": bias.numpy() for name, bias in biases.items() for layer in range(2)}
    checkpoint = open_checkpoint(make_tiny_gguf(tmp_path / "m.gguf", extra_tensors=extra))
    assert checkpoint.config.qkv_bias and checkpoint.config.output_bias
    for part_name, size in (("q", 64), ("k", 32), ("v", 32), ("o", 64)):
        name = f"model.layers.1.self_attn.{part_name}_proj.bias"
        assert torch.equal(part(checkpoint, name, None), torch.arange(size, dtype=torch.float32))
        assert torch.equal(part(checkpoint, name, 0, 5, 21), torch.arange(5, 21, dtype=torch.float32))


def deliver_all(
    checkpoint: Checkpoint, deliver: Callable[[str, torch.Tensor], None], **options: Any
) -> dict[str, torch.Tensor]:
    return load_weights(
        checkpoint,
        everything(checkpoint),
        dtype=torch.float32,
        progress=lambda _: None,
        cancelled=lambda: False,
        deliver=deliver,
        **options,
    )


def test_tensors_are_delivered_in_the_order_of_the_files(safetensors: Checkpoint) -> None:
    expected = load(safetensors, *everything(safetensors))
    found: list[str] = []
    threads: set[int] = set()

    def deliver(name: str, tensor: torch.Tensor) -> None:
        assert torch.equal(tensor, expected[name])
        found.append(name)
        threads.add(threading.get_ident())

    assert deliver_all(safetensors, deliver) == {}
    infos = sorted(safetensors.tensors.values(), key=lambda info: (str(info.file), info.offset))
    assert found == [info.name for info in infos]
    assert threads == {threading.get_ident()}


def test_reading_goes_on_while_tensors_are_delivered_but_not_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within the largest tensor and the read-ahead, counted when the memory of a tensor is taken."""
    safetensors = open_checkpoint(make_tiny_llama(tmp_path, num_layers=8))
    monkeypatch.setattr("loader.reading.reader.READ_BUFFER_BYTES", 0)
    largest = max(info.num_bytes for info in safetensors.tensors.values())
    most = largest + MAX_THREADS * 2 * 4096 + largest  # the last one may have been begun only
    sizes = {want.name: 4 * prod(want.part_shape) for want in everything(safetensors)}
    lock, ahead, opened = threading.Lock(), 0, 0
    has_read_ahead = threading.Event()

    def allocate(want: WeightSlice, dtype: torch.dtype) -> torch.Tensor:
        nonlocal ahead, opened
        with lock:
            ahead += sizes[want.name]
            opened += 1
            if opened > 3:
                has_read_ahead.set()
        assert ahead <= most
        return torch.empty(want.part_shape, dtype=dtype)

    def deliver(name: str, tensor: torch.Tensor) -> None:
        nonlocal ahead
        assert has_read_ahead.wait(60)
        with lock:
            ahead -= sizes[name]

    assert sum(sizes.values()) > 2 * most
    deliver_all(safetensors, deliver, allocate=allocate)
    assert (ahead, opened) == (0, len(sizes))


def test_memory_is_the_one_that_was_allocated(safetensors: Checkpoint) -> None:
    given: dict[str, torch.Tensor] = {}

    def allocate(want: WeightSlice, dtype: torch.dtype) -> torch.Tensor:
        given[want.name] = torch.zeros(want.part_shape, dtype=dtype)
        return given[want.name]

    found = load_weights(
        safetensors,
        [WeightSlice(Q, (64, 64), 0, 3, 9), WeightSlice(NORM, (64,), 0, 5, 5)],
        dtype=torch.bfloat16,
        progress=lambda _: None,
        cancelled=lambda: False,
        allocate=allocate,
    )
    assert given.keys() == {Q, NORM}
    assert all(found[name] is given[name] for name in found)
    assert torch.equal(given[Q], part(safetensors, Q, 0, 3, 9).bfloat16())


@pytest.mark.parametrize(
    "wrong",
    [
        lambda want, dtype: torch.empty(want.part_shape, dtype=torch.float16),
        lambda want, dtype: torch.empty(want.shape[0], dtype=dtype),
        lambda want, dtype: torch.empty(want.part_shape[::-1], dtype=dtype).T,
    ],
)
def test_memory_for_something_else_is_refused(
    safetensors: Checkpoint, wrong: Callable[[WeightSlice, torch.dtype], torch.Tensor]
) -> None:
    with pytest.raises(ValueError, match=f"{Q} needs a contiguous torch.float32"):
        load_weights(
            safetensors,
            [WeightSlice(Q, (64, 64))],
            dtype=torch.float32,
            progress=lambda _: None,
            cancelled=lambda: False,
            allocate=wrong,
        )


def test_a_failure_to_deliver_ends_the_load(safetensors: Checkpoint) -> None:
    def deliver(name: str, tensor: torch.Tensor) -> None:
        raise MemoryError("no room to pack")

    with pytest.raises(MemoryError, match="no room to pack"):
        deliver_all(safetensors, deliver)


def test_the_report_tells_what_was_read_and_how(safetensors: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [WeightSlice(O, (64, 64), 1, 0, 32), WeightSlice(Q, (64, 64))]
    for resident in (True, False):
        monkeypatch.setattr("loader.reading.files.is_resident", lambda *_, answer=resident: answer)
        report = LoadReport()
        load_weights(
            safetensors,
            wanted,
            dtype=torch.bfloat16,
            progress=lambda _: None,
            cancelled=lambda: False,
            report=report,
        )
        assert report.wanted_bytes == 64 * 32 * 4 + 64 * 64 * 4
        read, other = (report.cached_bytes, report.disk_bytes)[:: 1 if resident else -1]
        assert other == 0
        assert report.wanted_bytes < read <= 2 * 64 * 64 * 4  # whole rows, of which half is wanted
        assert (report.method == "cached") == resident
        assert report.threads >= 1
        assert report.wall_s >= report.convert_s / report.threads > 0
        assert report.read_s > 0
        assert report.buffer_bytes > 0


def test_a_type_that_does_not_become_floats_is_named(safetensors: Checkpoint) -> None:
    infos = {**safetensors.tensors, Q: replace(safetensors.tensors[Q], dtype="I32")}
    checkpoint = replace(safetensors, tensors=infos)
    error = refused(checkpoint, WeightSlice(Q, (64, 64)))
    assert (error.code, error.tensor, error.found) == ("unsupported", Q, "I32")
    as_stored = load(checkpoint, WeightSlice(Q, (64, 64), as_stored=True))[Q]
    assert as_stored.dtype == torch.int32
    assert torch.equal(as_stored.view(torch.float32), part(safetensors, Q, None))
    error = refused(checkpoint, WeightSlice(Q, (64, 64), as_stored=True, dtypes=("U8", "F8_E4M3")))
    assert (error.expected, error.found) == ("U8, F8_E4M3", "I32")


def test_blocks_wanted_as_stored_are_not_cut(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_tiny_gguf(tmp_path / "m.gguf", quantisation="Q4_1"))
    error = refused(checkpoint, WeightSlice(O, (64, 64), 1, 3, 32, as_stored=True))
    assert (error.code, error.tensor) == ("unsupported", O)
    assert "3:32 cuts" in error.message
    assert load(checkpoint, WeightSlice(O, (64, 64), 1, 32, 64, as_stored=True))[O].shape == (64, 20)
