"""Sleep and WakeUp of WorkerService: when they may be called, and what else may be meanwhile."""

import asyncio
import threading

import grpc
import pytest

from stepwire.rpc.errors import StepwireError, from_rpc_error
from stepwire.v1 import worker_pb2 as pb
from tests.support.worker_server import TIMEOUT_S, RunningWorker, decode_step, first_step, new_sequence, running_worker
from worker_service.runtime.errors import RuntimeFailure
from worker_service.runtime.report import SleepLevel

KEEP, DROP = pb.SLEEP_LEVEL_KEEP_WEIGHTS, pb.SLEEP_LEVEL_DROP_WEIGHTS


async def sleep(worker: RunningWorker, level: int = KEEP, epoch: int = 1) -> int:
    request = pb.SleepRequest(epoch=epoch, level=level)  # type: ignore[arg-type]
    return (await worker.stub.Sleep(request, timeout=TIMEOUT_S)).level


async def wake(worker: RunningWorker, epoch: int = 1) -> None:
    await worker.stub.WakeUp(pb.WakeUpRequest(epoch=epoch), timeout=TIMEOUT_S)


async def refused(call: object) -> StepwireError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call  # type: ignore[misc]
    return from_rpc_error(caught.value)


async def test_the_step_stream_goes_on_where_it_was() -> None:
    async with running_worker() as worker:
        await worker.walk_to_ready()
        stream = await worker.open_stream()
        await stream.execute(first_step(1, new_sequence(1, [1, 2, 3])))
        await stream.execute(pb.Step(epoch=1, step_id=2, finished_sequence_ids=[1]))
        assert await sleep(worker) == KEEP
        status = await worker.status()
        assert (status.phase, status.epoch, status.sleep_level) == (pb.PHASE_READY, 1, KEEP)
        await wake(worker)
        assert (await worker.status()).sleep_level == pb.SLEEP_LEVEL_UNSPECIFIED
        result = await stream.execute(first_step(3, new_sequence(2, [1, 2, 3])))
        assert list(result.sequence_ids) == [2]


async def test_a_step_is_refused_meanwhile_and_ends_the_stream_alone() -> None:
    async with running_worker() as worker:
        await worker.walk_to_ready()
        stream = await worker.open_stream()
        await sleep(worker)
        await stream.send(first_step(1, new_sequence(1, [1, 2, 3])))
        error = from_rpc_error(await stream.error())
        assert error.reason == "WRONG_PHASE" and "WakeUp" in error.message
        await wake(worker)
        stream = await worker.open_stream()
        assert (await stream.execute(first_step(1, new_sequence(1, [1, 2, 3])))).sequence_ids


async def test_it_does_not_sleep_over_a_step_or_a_sequence() -> None:
    async with running_worker() as worker:
        await worker.walk_to_ready()
        stream = await worker.open_stream()
        gate = worker.runtime.gates["execute"] = threading.Event()
        entered = worker.runtime.entered["execute"] = threading.Event()
        await stream.send(first_step(1, new_sequence(1, [1, 2, 3])))
        while not entered.is_set():
            await worker.status()
        assert (await refused(sleep(worker))).reason == "STATE_MISMATCH"
        gate.set()
        await stream.receive()
        assert "1 sequences are known" in (await refused(sleep(worker))).message
        # Nothing has changed.
        assert (await stream.execute(decode_step(2, {1: 3}))).token_ids


async def test_it_goes_deeper_but_not_back() -> None:
    async with running_worker() as worker:
        await worker.walk_to_ready()
        assert [await sleep(worker, level) for level in (KEEP, KEEP, DROP, KEEP)] == [KEEP, KEEP, DROP, DROP]
        assert worker.runtime.slept == [SleepLevel.KEEP_WEIGHTS, SleepLevel.DROP_WEIGHTS]
        for _ in range(2):
            await wake(worker)
        assert worker.runtime.calls.count("wake_up") == 1


@pytest.mark.parametrize("level", [0, 3, -1, 2**31 - 1])
async def test_a_level_that_is_none_is_refused(level: int) -> None:
    async with running_worker() as worker:
        await worker.walk_to_ready()
        error = await refused(sleep(worker, level))
        assert (error.reason, error.metadata["field"]) == ("FIELD_INVALID", "level")


async def test_it_needs_its_epoch_and_a_worker_that_is_ready() -> None:
    async with running_worker() as worker:
        await worker.init_device()
        for call in (sleep, wake):
            assert (await refused(call(worker))).reason == "WRONG_PHASE"
        await worker.reset(2, pb.PHASE_INITIALISED)
        await worker.init_device(2)
        await worker.load_model(2)
        await worker.measure(2)
        await worker.initialize_cache(2)
        await worker.warm_up(2)
        for call in (sleep, wake):
            assert (await refused(call(worker))).reason == "STALE_EPOCH"


@pytest.mark.parametrize(
    ("level", "phase"), [(KEEP, pb.PHASE_LOADED), (DROP, pb.PHASE_INITIALISED)], ids=["keep", "drop"]
)
async def test_a_new_epoch_begins_awake_with_what_is_left(level: int, phase: int) -> None:
    async with running_worker() as worker:
        await worker.walk_to_ready()
        await sleep(worker, level)
        assert (await worker.reset(2, pb.PHASE_CACHED)).phase == phase
        status = await worker.status()
        assert (status.phase, status.sleep_level, status.cache_bytes) == (phase, 0, 0)


async def test_a_failure_leaves_it_as_it_was() -> None:
    async with running_worker() as worker:
        await worker.walk_to_ready()
        worker.runtime.failures["sleep"] = RuntimeFailure("invalid", "odd")
        assert "odd" in (await refused(sleep(worker))).message
        stream = await worker.open_stream()
        assert await stream.execute(pb.Step(epoch=1, step_id=1))
        await sleep(worker)
        worker.runtime.failures["wake_up"] = RuntimeFailure("out_of_memory", "others hold it")
        assert (await refused(wake(worker))).reason == "OUT_OF_MEMORY"
        assert (await worker.status()).sleep_level == KEEP
        await wake(worker)
        assert await stream.execute(pb.Step(epoch=1, step_id=2))


async def test_a_new_epoch_ends_a_wake_up_that_lasts() -> None:
    async with running_worker() as worker:
        await worker.walk_to_ready()
        await sleep(worker, DROP)
        worker.runtime.gates["wake_up"] = threading.Event()
        waking = asyncio.ensure_future(wake(worker))
        while "wake_up" not in worker.runtime.calls:
            await worker.status()
        assert (await worker.reset(2, pb.PHASE_LOADED)).phase == pb.PHASE_INITIALISED
        assert (await refused(waking)).reason == "STALE_EPOCH"
