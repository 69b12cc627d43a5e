"""AddAdapter, RemoveAdapter and ListAdapters of a worker over real gRPC, with a fake runtime."""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from loader.errors import CheckpointError
from stepwire.rpc.errors import StepwireError, from_rpc_error
from stepwire.v1 import worker_pb2 as pb
from tests.support.fake_runtime import FakeRuntime, adapter_fingerprint
from tests.support.scheduler_server import until
from tests.support.worker_server import TIMEOUT_S, RunningWorker, decode_step, first_step, new_sequence, running_worker
from worker_service.runtime.errors import RuntimeFailure

A, B = adapter_fingerprint("a"), adapter_fingerprint("b")


@pytest.fixture
async def worker() -> AsyncIterator[RunningWorker]:
    async with running_worker() as running:
        await running.walk_to_ready()
        yield running


async def add(
    worker: RunningWorker, path: str = "/adapters/a", epoch: int = 1, fingerprint: str = ""
) -> pb.HeldAdapter:
    request = pb.AddAdapterRequest(epoch=epoch, path=path, fingerprint=fingerprint)
    return (await worker.stub.AddAdapter(request, timeout=TIMEOUT_S)).adapter


async def remove(worker: RunningWorker, fingerprint: str, epoch: int = 1) -> None:
    await worker.stub.RemoveAdapter(pb.RemoveAdapterRequest(epoch=epoch, fingerprint=fingerprint), timeout=TIMEOUT_S)


async def held(worker: RunningWorker) -> list[str]:
    response = await worker.stub.ListAdapters(pb.ListAdaptersRequest(), timeout=TIMEOUT_S)
    return [adapter.path for adapter in response.adapters]


async def error_of(call: Any) -> StepwireError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_rpc_error(caught.value)


async def test_adapters_come_and_go(worker: RunningWorker) -> None:
    adapter = await add(worker)
    assert (adapter.fingerprint, adapter.rank, adapter.byte_count, adapter.resident) == (A, 4, 10, False)
    assert await add(worker, fingerprint=A) == adapter
    assert (await add(worker, "/elsewhere/a")).path == "/adapters/a"
    await add(worker, "/adapters/b")
    assert await held(worker) == ["/adapters/a", "/adapters/b"]
    for _ in range(2):
        await remove(worker, A)
    assert await held(worker) == ["/adapters/b"]


async def test_calls_out_of_phase_or_epoch_change_nothing() -> None:
    async with running_worker() as worker:
        assert await held(worker) == []
        await worker.init_device()
        error = await error_of(add(worker))
        assert (error.reason, error.metadata["needed"]) == ("WRONG_PHASE", "LOADED")
        assert (await error_of(remove(worker, A))).reason == "WRONG_PHASE"
        await worker.load_model()
        assert (await error_of(add(worker, epoch=2))).reason == "STALE_EPOCH"
        assert "read_adapter" not in worker.runtime.calls
        await add(worker)
        assert (await error_of(remove(worker, A, epoch=2))).reason == "STALE_EPOCH"
        assert await held(worker) == ["/adapters/a"]


@pytest.mark.parametrize("fingerprint", ["a", "A" * 64, "0" * 65, "../" + "0" * 61])
async def test_what_is_no_fingerprint_is_refused(worker: RunningWorker, fingerprint: str) -> None:
    for call in (add(worker, fingerprint=fingerprint), remove(worker, fingerprint)):
        error = await error_of(call)
        assert (error.reason, error.metadata["field"]) == ("FIELD_INVALID", "fingerprint")


async def test_other_content_than_expected_is_refused(worker: RunningWorker) -> None:
    error = await error_of(add(worker, fingerprint=B))
    assert (error.reason, error.metadata["expected"], error.metadata["found"]) == ("CHECKPOINT_INVALID", B, A)
    assert await held(worker) == []


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (CheckpointError("invalid", "a tensor is broken", "get it again", file=Path("/a")), "CHECKPOINT_INVALID"),
        (CheckpointError("not_found", "there is nothing", "look", file=Path("/a")), "CHECKPOINT_NOT_FOUND"),
        (RuntimeFailure("unsupported", "quantised"), "ADAPTER_UNSUPPORTED"),
        (RuntimeFailure("limit", "too large"), "ADAPTER_LIMIT"),
        (MemoryError(), "OUT_OF_MEMORY"),
    ],
)
async def test_what_goes_wrong_is_named_and_the_worker_goes_on(
    worker: RunningWorker, failure: BaseException, reason: str
) -> None:
    worker.runtime.failures["read_adapter"] = failure
    error = await error_of(add(worker))
    assert (error.reason, error.metadata["phase"], error.metadata["rank"]) == (reason, "READY", "0")
    assert await held(worker) == []
    await add(worker)


async def test_all_bytes_together_are_bounded(worker: RunningWorker) -> None:
    for name in "abc":
        await add(worker, f"/adapters/{name}")
    error = await error_of(add(worker, "/adapters/d"))
    assert (error.reason, error.code.name) == ("ADAPTER_LIMIT", "RESOURCE_EXHAUSTED")


async def test_steps_go_on_while_one_is_read(worker: RunningWorker) -> None:
    gate = worker.runtime.gates["read_adapter"] = threading.Event()
    reading = asyncio.create_task(add(worker))
    await until(lambda: "read_adapter" in worker.runtime.calls)
    stream = await worker.open_stream()
    await stream.execute(first_step(1, new_sequence(1, [1, 2, 3])))
    result = await stream.execute(decode_step(2, {1: 3}))
    assert list(result.sequence_ids) == [1]
    assert not reading.done()
    gate.set()
    assert (await reading).fingerprint == A


async def test_one_that_was_read_for_an_epoch_that_ended_is_not_taken(worker: RunningWorker) -> None:
    gate = worker.runtime.gates["read_adapter"] = threading.Event()
    reading = asyncio.create_task(add(worker))
    await until(lambda: "read_adapter" in worker.runtime.calls)
    await worker.reset(2)
    gate.set()
    assert (await error_of(reading)).reason == "STALE_EPOCH"
    assert await held(worker) == []


async def test_a_sleep_without_weights_takes_no_adapters_and_says_so(worker: RunningWorker) -> None:
    await worker.open_stream()
    await add(worker)
    for level, is_taken in ((pb.SLEEP_LEVEL_KEEP_WEIGHTS, True), (pb.SLEEP_LEVEL_DROP_WEIGHTS, False)):
        await worker.stub.Sleep(pb.SleepRequest(epoch=1, level=level), timeout=TIMEOUT_S)
        if is_taken:
            await add(worker, "/adapters/b")
    error = await error_of(add(worker, "/adapters/c"))
    assert (error.reason, error.code) == ("MODEL_ASLEEP", grpc.StatusCode.UNAVAILABLE)
    assert "stepwire admin wake" in error.message and error.retry_after_s
    await remove(worker, A)
    assert await held(worker) == []


async def test_one_that_was_read_for_a_model_that_sleeps_now_is_not_taken(worker: RunningWorker) -> None:
    gate = worker.runtime.gates["read_adapter"] = threading.Event()
    await worker.open_stream()
    reading = asyncio.create_task(add(worker))
    await until(lambda: "read_adapter" in worker.runtime.calls)
    request = pb.SleepRequest(epoch=1, level=pb.SLEEP_LEVEL_DROP_WEIGHTS)
    await worker.stub.Sleep(request, timeout=TIMEOUT_S)
    gate.set()
    assert (await error_of(reading)).reason == "MODEL_ASLEEP"


async def test_paths_lie_below_the_roots(tmp_path: Path) -> None:
    (tmp_path / "roots" / "a").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    (tmp_path / "roots" / "link").symlink_to(tmp_path / "outside")
    async with running_worker(model_roots=[str(tmp_path / "roots"), "/models"]) as worker:
        await worker.init_device()
        await worker.load_model()
        assert (await add(worker, str(tmp_path / "roots" / "a"))).fingerprint == A
        for path in ("outside", "roots/link", "roots/../outside"):
            error = await error_of(add(worker, str(tmp_path / path)))
            assert (error.reason, error.metadata["field"]) == ("FIELD_INVALID", "path")
        for path in ("", "x" * 5000, "/nul\0", "http://host/a"):
            assert (await error_of(add(worker, path))).metadata["field"] == "path"


async def test_a_sequence_whose_adapter_cannot_be_a_fingerprint_fails_alone() -> None:
    async with running_worker(runtime=FakeRuntime()) as worker:
        await worker.walk_to_ready()
        stream = await worker.open_stream()
        sequences = [new_sequence(1, [1, 2]), new_sequence(2, [1, 2], adapter="x" * 65)]
        result = await stream.execute(first_step(1, *sequences))
        assert list(result.sequence_ids) == [1]
        assert [(error.sequence_id, error.message) for error in result.errors] == [
            (2, "adapter has 65 characters; a fingerprint has 64")
        ]
