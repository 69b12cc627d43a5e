"""Starts of several ranks that meet, or fail on one: one error, with everything it said, and the others stop."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from scheduler_service.engine.start import GroupStarter
from scheduler_service.rpc.worker_client import WorkerClient
from stepwire.rpc.errors import StepwireError
from stepwire.telemetry.trace import get_tracer
from stepwire.v1 import worker_pb2
from tests.support.fake_worker import FakeWorker, FakeWorkerServer
from tests.support.scheduler_server import start_plan, until

BROKEN = StepwireError(
    "CHECKPOINT_INVALID",
    "shard 2 is truncated; download it again",
    {
        "file": "/models/tiny/model-00002-of-00002.safetensors",
        "tensor": "model.norm.weight",
        "expected": "256 bytes",
        "found": "255 bytes",
        "remedy": "download it again",
    },
)


@asynccontextmanager
async def two_ranks() -> AsyncIterator[tuple[list[FakeWorker], GroupStarter]]:
    """Two workers, and what starts them as one group."""
    servers = [FakeWorkerServer(FakeWorker(choices=[5])) for _ in range(2)]
    for server in servers:
        await server.start()
    clients = [WorkerClient(server.address, key=None, tracer=get_tracer(None)) for server in servers]
    try:
        yield (
            [server.worker for server in servers],
            GroupStarter(clients, start_plan(tensor_parallel_size=2), get_tracer(None)),
        )
    finally:
        for client in clients:
            await client.close()
        for server in servers:
            await server.kill()


@pytest.mark.parametrize("failing", [0, 1])
async def test_a_load_that_fails_on_one_rank_stops_the_other_within_a_second(failing: int) -> None:
    async with two_ranks() as (workers, starter):
        slow, broken = workers[1 - failing], workers[failing]
        slow.load_delay_s = 60.0
        broken.failures["LoadModel at end"] = BROKEN
        broken.load_delay_s = 0.3  # so that the other one is in its load
        began = time.monotonic()
        with pytest.raises(StepwireError) as caught:
            await starter.start()
        await until(lambda: "LoadModel cancelled" in slow.calls)
        # Of the minute that it would have taken.
        assert time.monotonic() - began < 20
        error = caught.value
        assert error.reason == "CHECKPOINT_INVALID"
        assert error.metadata | {**BROKEN.metadata, "phase": "load_model", "rank": str(failing)} == error.metadata
        assert error.metadata["host"] == "fakehost"
        assert f"load_model failed on rank {failing} at 127.0.0.1:" in error.message
        assert error.message.endswith(BROKEN.message)
        assert all("DetermineAvailableMemory" not in worker.calls for worker in workers)


async def test_the_first_failure_is_the_one_that_is_told() -> None:
    async with two_ranks() as (workers, starter):
        first, second = workers
        first.load_delay_s = 0.1
        first.failures["LoadModel at end"] = BROKEN
        second.load_delay_s = 5.0
        second.failures["LoadModel at end"] = StepwireError("WORKER_FAILED", "its peer is gone")
        with pytest.raises(StepwireError) as caught:
            await starter.start()
        assert (caught.value.reason, caught.value.metadata["rank"]) == ("CHECKPOINT_INVALID", "0")


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize(
    ("method", "phase"),
    [
        ("InitDevice", "init_device"),
        ("LoadModel", "load_model"),
        ("DetermineAvailableMemory", "determine_available_memory"),
        ("InitializeCache", "initialize_cache"),
        ("WarmUp", "warm_up"),
    ],
)
async def test_a_rank_that_fails_in_a_phase_is_named_and_not_those_that_waited_for_it(
    method: str, phase: str, failing: int
) -> None:
    """vllm #47415: the root cause of a failed start was swallowed, and what followed from it was told."""
    async with two_ranks() as (workers, starter):
        workers[failing].failures[method] = StepwireError("OUT_OF_MEMORY", "the device is full")
        if method != "InitDevice":
            # It is heard first.
            workers[1 - failing].failures[method] = StepwireError("PEER_LOST", "another rank was lost")
            workers[failing].delays[method] = 0.05
        with pytest.raises(StepwireError) as caught:
            await starter.start()
        error = caught.value
        assert (error.reason, error.metadata["phase"], error.metadata["rank"]) == ("OUT_OF_MEMORY", phase, str(failing))


async def test_no_rank_waits_for_one_whose_process_has_just_begun() -> None:
    """The imports of that one may take longer than a collective may: one kill then cost several epochs."""
    async with two_ranks() as (workers, starter):
        early, late = workers
        late.device_gate.clear()
        task = asyncio.create_task(starter.start())
        await until(lambda: early.phase == worker_pb2.PHASE_INITIALISED and late.meetings != [])
        assert early.meetings == [""]
        late.device_gate.set()
        started = await asyncio.wait_for(task, 30)
        assert early.meetings == late.meetings == ["", "fake:1"]
        assert started.epoch == 1


async def test_a_rank_that_lost_a_silent_one_says_so() -> None:
    """vllm #58290, #17167: a start over several nodes hung without an error."""
    async with two_ranks() as (workers, starter):
        workers[0].failures["WarmUp"] = StepwireError("PEER_LOST", "another rank was lost")
        workers[1].delays["WarmUp"] = 30.0
        with pytest.raises(StepwireError) as caught:
            await starter.start()
        assert (caught.value.reason, caught.value.metadata["rank"]) == ("PEER_LOST", "0")


async def test_a_start_that_is_cancelled_stops_all_ranks() -> None:
    async with two_ranks() as (workers, starter):
        for worker in workers:
            worker.load_delay_s = 60.0
        task = asyncio.create_task(starter.start())
        await until(lambda: all("LoadModel" in worker.calls for worker in workers))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: all("LoadModel cancelled" in worker.calls for worker in workers))
