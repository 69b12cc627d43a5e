"""Weights from the checkpoint and from the restart store: the same, once in memory, timed without gaps."""

import ctypes
import gc
import os
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from loader.checkpoint import open_checkpoint
from loader.errors import CheckpointError, LoadCancelled
from loader.layout import weight_slices
from loader.shares import RankPlace
from loader.store.folder import StoreFolder
from loader.weights import load_weights
from tests.support.runtime_settings import Settings
from tests.support.tiny_checkpoint import make_tiny_llama
from worker_service.runtime import restart_store
from worker_service.runtime.engine import TorchEngine
from worker_service.runtime.loading import Held, LoadJob, LoadPhases, load_into
from worker_service.runtime.memory import HostMemory, own_bytes
from worker_service.runtime.report import LoadPhase
from worker_service.runtime.restart_store import RestartStore
from worker_service.runtime.step import NewSequence, Sampling, StepInput
from worker_service.runtime.worker import WorkerRuntime

CPU = torch.device("cpu")
MIB = 1 << 20


class PackingEngine:
    """Packs by transposing, and computes with what is attached, as it is."""

    kv_bytes_per_token = 1

    def __init__(self, layout: str = "transposed-1") -> None:
        self.layout = layout
        self.num_packed = 0
        self.attached: Mapping[str, torch.Tensor] = {}

    def pack(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        self.num_packed += 1
        packed = {}
        for name in list(tensors):
            tensor = tensors.pop(name)
            packed[name] = tensor.T.contiguous() if tensor.dim() == 2 else tensor
        return packed

    def attach(self, packed: Mapping[str, torch.Tensor]) -> int:
        self.attached = packed
        return sum(tensor.nbytes for tensor in packed.values())

    def executor(self, num_blocks: int, block_size: int, max_model_len: int) -> None:  # type: ignore[override]
        raise NotImplementedError

    def context_bytes(self, context: int) -> int:
        raise NotImplementedError


def job(path: Path, dtype: torch.dtype = torch.float32, place: RankPlace | None = None) -> LoadJob:
    return LoadJob(open_checkpoint(path), place or RankPlace(), dtype, CPU)


def load(
    job: LoadJob,
    store: RestartStore | None,
    layout: str = "transposed-1",
    cancelled: Callable[[], bool] = lambda: False,
) -> tuple[PackingEngine, Held, list[LoadPhase]]:
    engine = PackingEngine(layout)
    phases = LoadPhases(lambda *_: None, cancelled)
    held = load_into(engine, job, store, phases)
    return engine, held, list(phases.finish())


def names(phases: list[LoadPhase]) -> list[str]:
    return [phase.name for phase in phases]


def expected(job: LoadJob) -> dict[str, torch.Tensor]:
    """What a PackingEngine packs, by way of a plain read."""
    wanted = weight_slices(job.checkpoint.config, job.place)
    tensors = load_weights(job.checkpoint, wanted, dtype=job.dtype, progress=lambda _: None, cancelled=lambda: False)
    return PackingEngine().pack(tensors)


def assert_same(attached: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    assert attached.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert attached[name].dtype == tensor.dtype and torch.equal(attached[name], tensor), name


@pytest.fixture
def store(tmp_path: Path) -> RestartStore:
    return RestartStore(tmp_path / "store", None, is_set=True)


def entries(tmp_path: Path) -> list[str]:
    with StoreFolder(tmp_path / "store", create=True) as folder:
        return [entry.name for entry in folder.entries()]


def test_an_engine_that_lays_weights_out_anew_is_the_last_to_hold_them(tmp_path: Path) -> None:
    class Taking(PackingEngine):
        def attach(self, packed: dict[str, torch.Tensor]) -> int:  # type: ignore[override]
            num_bytes = 0
            while packed:
                _, tensor = packed.popitem()
                held = weakref.ref(tensor)
                num_bytes += tensor.nbytes
                del tensor
                assert held() is None
            return num_bytes

    held = load_into(Taking(), job(make_tiny_llama(tmp_path)), None, LoadPhases(lambda *_: None, lambda: False))
    assert held.weight_bytes > 0


FIRST = ["inspect", "map", "read", "pack", "store", "map", "attach"]
AGAIN = ["inspect", "map", "attach"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_second_load_maps_what_the_first_packed(tiny_path: Path, store: RestartStore, dtype: torch.dtype) -> None:
    """vllm #19824, #20402: every start took as long as the first."""
    wanted = expected(job(tiny_path, dtype))
    total = sum(tensor.nbytes for tensor in wanted.values())
    first, held, phases = load(job(tiny_path, dtype), store)
    assert names(phases) == FIRST and held == Held(total, total)
    assert_same(first.attached, wanted)
    second, held, phases = load(job(tiny_path, dtype), store)
    assert names(phases) == AGAIN and held == Held(total, total)
    assert second.num_packed == 0
    assert_same(second.attached, wanted)
    assert [phase.num_bytes for phase in phases] == [0, total, total]


def test_without_a_store_it_reads_each_time(tiny_path: Path) -> None:
    for _ in range(2):
        engine, held, phases = load(job(tiny_path), None)
        assert names(phases) == ["inspect", "read", "pack", "attach"] and held.mapped_bytes == 0
        assert_same(engine.attached, expected(job(tiny_path)))


def test_every_part_of_the_key_has_weights_of_its_own(
    tiny_path: Path, tmp_path: Path, store: RestartStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(job(tiny_path), store)
    other = make_tiny_llama(tmp_path / "other", seed=1)
    jobs = [
        job(tiny_path, torch.bfloat16),
        job(tiny_path, place=RankPlace(0, 2)),
        job(tiny_path, place=RankPlace(1, 2)),
        job(tiny_path, place=RankPlace(0, 1, 1, 2)),
        job(other),
    ]
    for one in jobs:
        engine, _, phases = load(one, store)
        assert names(phases) == FIRST
        assert_same(engine.attached, expected(one))
    assert names(load(job(tiny_path), store, "transposed-2")[2]) == FIRST
    for part, value in (("code_version", "0.2.0-1"), ("cpu_features", "x86_64-0")):
        monkeypatch.setattr(restart_store, part, lambda value=value: value)
        assert names(load(job(tiny_path), store)[2]) == FIRST
    for one in (*jobs, job(tiny_path)):
        engine, _, phases = load(one, store)
        assert_same(engine.attached, expected(one))
    # The first, five of other jobs, one of another layout, two of other code and machines; the five again on those.
    assert len(entries(tmp_path)) == 14


def test_weights_that_were_changed_on_disk_are_read_anew(tmp_path: Path, store: RestartStore) -> None:
    path, other = make_tiny_llama(tmp_path / "a", seed=0), make_tiny_llama(tmp_path / "b", seed=1)
    load(job(path), store)
    weights, times = path / "model.safetensors", (path / "model.safetensors").stat()
    weights.write_bytes((other / "model.safetensors").read_bytes())
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    engine, _, phases = load(job(path), store)
    assert names(phases) == FIRST
    assert_same(engine.attached, expected(job(other)))


def test_weights_that_change_while_they_are_read_are_not_kept(
    tmp_path: Path, store: RestartStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_tiny_llama(tmp_path / "a")

    def pack(self: PackingEngine, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        os.utime(path / "model.safetensors")
        return dict(tensors)

    monkeypatch.setattr(PackingEngine, "pack", pack)
    _, held, phases = load(job(path), store)
    assert names(phases) == ["inspect", "map", "read", "pack", "attach"] and held.mapped_bytes == 0
    assert entries(tmp_path) == []


def test_weights_that_are_gone_are_named_by_the_reader(tmp_path: Path, store: RestartStore) -> None:
    path = make_tiny_llama(tmp_path / "a")
    wanted = job(path)
    (path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError) as failed:
        load(wanted, store)
    assert (failed.value.code, failed.value.file) == ("not_found", path / "model.safetensors")


def test_weights_that_go_while_they_are_packed_are_not_kept(
    tmp_path: Path, store: RestartStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_tiny_llama(tmp_path / "a")
    pack = PackingEngine.pack

    def unlink_and_pack(self: PackingEngine, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        (path / "model.safetensors").unlink()
        return pack(self, tensors)

    monkeypatch.setattr(PackingEngine, "pack", unlink_and_pack)
    _, held, _ = load(job(path), store)
    assert held.mapped_bytes == 0 and entries(tmp_path) == []


def test_a_damaged_entry_is_dropped_said_once_and_read_anew(
    tiny_path: Path, tmp_path: Path, store: RestartStore, captured: list[dict[str, object]]
) -> None:
    load(job(tiny_path), store)
    (path,) = (tmp_path / "store").glob("*.weights")
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    captured.clear()
    engine, _, phases = load(job(tiny_path), store)
    assert names(phases) == FIRST
    assert_same(engine.attached, expected(job(tiny_path)))
    assert [line["event"] for line in captured] == ["restart_store_unusable", "weights_kept"]
    assert "is damaged" in str(captured[0]["reason"])
    assert names(load(job(tiny_path), store)[2]) == AGAIN


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """What the store logs."""
    lines: list[dict[str, object]] = []

    class Log:
        def info(self, event: str, **fields: object) -> None:
            lines.append({"event": event, **fields})

        warning = info

    monkeypatch.setattr(restart_store, "_log", Log())
    return lines


def test_a_folder_that_is_refused_costs_one_warning(
    tiny_path: Path, tmp_path: Path, store: RestartStore, captured: list[dict[str, object]]
) -> None:
    (tmp_path / "store").mkdir(mode=0o700)
    (tmp_path / "store").chmod(0o755)
    engine, held, _ = load(job(tiny_path), store)
    assert held.mapped_bytes == 0
    assert_same(engine.attached, expected(job(tiny_path)))
    assert len(captured) == 1 and "chmod 700" in str(captured[0]["reason"])


@pytest.mark.parametrize("fails_at", [1, 5])
def test_no_space_left_costs_a_warning_and_no_weights(
    tiny_path: Path,
    tmp_path: Path,
    store: RestartStore,
    captured: list[dict[str, object]],
    monkeypatch: pytest.MonkeyPatch,
    fails_at: int,
) -> None:
    write_for_real, calls = os.pwrite, []

    def fills_up(descriptor: int, data: memoryview, offset: int) -> int:
        calls.append(offset)
        if len(calls) == fails_at:
            raise OSError(28, "No space left on device")
        return write_for_real(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", fills_up)
    engine, held, phases = load(job(tiny_path), store)
    assert held.mapped_bytes == 0 and entries(tmp_path) == []
    assert_same(engine.attached, expected(job(tiny_path)))
    assert names(phases)[-1] == "attach" and names(phases).count("read") == (1 if fails_at == 1 else 2)
    assert [line["event"] for line in captured] == ["restart_store_unusable"]
    assert "No space left" in str(captured[0]["reason"])


def test_too_little_memory_costs_a_warning(
    tiny_path: Path, store: RestartStore, captured: list[dict[str, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restart_store, "host_memory", lambda: HostMemory(1 << 40, 1 << 20))
    engine, held, phases = load(job(tiny_path), store)
    assert held.mapped_bytes == 0 and names(phases).count("read") == 1
    assert_same(engine.attached, expected(job(tiny_path)))
    assert [line["event"] for line in captured] == ["weights_not_kept"]
    assert "memory" in str(captured[0]["reason"])


def test_an_entry_that_is_evicted_at_once_is_read_again(
    tiny_path: Path, store: RestartStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RestartStore, "look_up", lambda *_: None)
    engine, held, phases = load(job(tiny_path), store)
    assert names(phases) == ["inspect", "map", "read", "pack", "store", "map", "read", "pack", "attach"]
    assert held.mapped_bytes == 0
    assert_same(engine.attached, expected(job(tiny_path)))


@pytest.mark.parametrize("phase", ["map", "read", "pack", "store", "attach"])
def test_each_phase_can_be_cancelled(tiny_path: Path, tmp_path: Path, store: RestartStore, phase: str) -> None:
    now = [""]
    phases = LoadPhases(lambda name, *_: now.__setitem__(0, name), lambda: now[0] == phase)
    with pytest.raises(LoadCancelled):
        load_into(PackingEngine(), job(tiny_path), store, phases)
    assert not list((tmp_path / "store").glob("*.writing"))


def test_phases_leave_no_time_out() -> None:
    seen: list[tuple[str, int, int]] = []
    begin = time.perf_counter_ns()
    phases = LoadPhases(lambda *now: seen.append(now), lambda: False)
    phases.enter("read", 100)
    phases.advance(40)
    phases.enter("pack")
    phases.advance(7)
    ended = phases.finish()
    wall = time.perf_counter_ns() - begin
    assert seen == [("inspect", 0, 0), ("read", 0, 100), ("read", 40, 100), ("pack", 0, 0), ("pack", 7, 7)]
    assert [(phase.name, phase.num_bytes) for phase in ended] == [("inspect", 0), ("read", 40), ("pack", 7)]
    assert 0 < sum(phase.duration_ns for phase in ended) <= wall


def test_by_default_only_what_is_computed_with_as_it_is_is_kept(tiny_path: Path, tmp_path: Path) -> None:
    store = RestartStore(tmp_path / "store", None, is_set=False)
    assert names(load(job(tiny_path), store, TorchEngine.layout)[2]) == ["inspect", "read", "pack", "attach"]
    assert not store.suits(torch.device("cuda"), is_copied=False)
    assert names(load(job(tiny_path), store)[2]) == FIRST
    set_store = RestartStore(tmp_path / "store", None, is_set=True)
    _, held, phases = load(job(tiny_path), set_store, TorchEngine.layout)
    assert names(phases) == FIRST and held.mapped_bytes == 0


def test_settings_say_which_store() -> None:
    assert RestartStore.of_settings("off", None) is None
    for text, is_set in (("auto", False), ("/dev/shm/x", True)):
        store = RestartStore.of_settings(text, 5)
        assert store is not None and store.suits(CPU, is_copied=True) == is_set


def test_the_default_store_forgets_at_a_stop_and_one_that_was_set_does_not(tiny_path: Path, tmp_path: Path) -> None:
    for is_set in (False, True):
        store = RestartStore(tmp_path / "store", None, is_set=is_set)
        engine, _, _ = load(job(tiny_path), store)
        other, _, _ = load(job(tiny_path), RestartStore(tmp_path / "store", None, is_set=is_set))
        engine.attached = {}
        store.forget()
        assert len(entries(tmp_path)) == 1, "the other has it in use"
        other.attached = {}
        store.forget()
        assert len(entries(tmp_path)) == is_set


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("native", [True, False])
def test_the_engines_compute_alike_with_pages_that_cannot_be_written(
    tiny_path: Path, store: RestartStore, *, native: bool, dtype: str
) -> None:
    sampled, phases = [], []
    for _ in range(3):
        runtime = WorkerRuntime(Settings(native), store)
        runtime.init_device(RankPlace())
        summary = runtime.load_model(tiny_path, dtype, lambda *_: None, lambda: False)
        phases.append([phase.name for phase in summary.phases])
        assert sum(phase.duration_ns for phase in summary.phases) == summary.duration_ns
        runtime.initialize_cache(8, 16, 64)
        new = NewSequence(1, "r", [5, 6, 7], 3, Sampling(), range(1))
        tokens = list(runtime.execute(StepInput(1, [new], [1], [3], [0], [0], [], [], [])).token_ids)
        for step_id in range(2, 12):
            step = StepInput(step_id, [], [1], [1], [step_id + 1], [0], [], [], [])
            tokens += runtime.execute(step).token_ids
        sampled.append(tokens)
    assert len(sampled[0]) == 11 and sampled[0] == sampled[1] == sampled[2]
    assert phases == [FIRST, AGAIN, AGAIN]


def wait_for_bytes(wanted: int) -> None:
    """The kernel's thread that brings pages into huge ones may have some in hand for a while."""
    deadline = time.monotonic() + 10
    while abs(own_bytes(CPU) - wanted) > 48 * MIB and time.monotonic() < deadline:
        time.sleep(0.02)
    assert abs(own_bytes(CPU) - wanted) < 48 * MIB


def test_memory_holds_mapped_weights_once(tmp_path: Path, store: RestartStore) -> None:
    path = make_tiny_llama(tmp_path / "large", hidden_size=512, intermediate_size=2048, vocab_size=16384, num_layers=2)
    # What earlier tests have left must not go meanwhile.
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = own_bytes(CPU)
    engine, held, _ = load(job(path), store)
    assert held.mapped_bytes > 90 * MIB
    # Mapped pages count as this process's own, and the private copies are gone.
    wait_for_bytes(before + held.mapped_bytes)
    engine.attached = {}
    wait_for_bytes(before)
