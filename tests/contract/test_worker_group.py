"""A group of workers: walked to readiness, adopted, refused, and lost."""

import asyncio
from typing import Any

import grpc
import pytest

from scheduler_service.engine.ports import Phase
from scheduler_service.engine.start import GroupStarter, decide_num_blocks
from scheduler_service.rpc.worker_client import WorkerClient
from stepwire.rpc.errors import StepwireError
from stepwire.telemetry.trace import get_tracer
from stepwire.v1 import inference_pb2 as pb
from stepwire.v1 import worker_pb2
from tests.support.fake_worker import FakeWorker, FakeWorkerServer, letter_ids
from tests.support.scheduler_server import running_scheduler, start_plan, tokens_of, until
from tests.support.tiny_checkpoint import tiny_tokenizer

PHASES = ["InitDevice", "LoadModel", "DetermineAvailableMemory", "InitializeCache", "WarmUp"]


@pytest.fixture
async def server() -> Any:
    server = FakeWorkerServer(FakeWorker(choices=letter_ids(tiny_tokenizer())))
    await server.start()
    yield server
    await server.kill()


async def start(server: FakeWorkerServer, **changes: Any) -> Any:
    client = WorkerClient(server.address, key=None, tracer=get_tracer(None))
    try:
        return await GroupStarter([client], start_plan(**changes), get_tracer(None)).start()
    finally:
        await client.close()


async def test_a_new_worker_is_walked_through_every_phase(server: FakeWorkerServer) -> None:
    started = await start(server)
    assert server.worker.calls == ["GetStatus", *PHASES]
    assert (server.worker.phase, server.worker.epoch, started.epoch) == (worker_pb2.PHASE_READY, 1, 1)
    assert started.num_blocks == server.worker.num_blocks == 8 * 32


async def test_an_adopted_worker_keeps_the_weights_of_our_model(server: FakeWorkerServer) -> None:
    await start(server)
    server.worker.calls.clear()
    started = await start(server)
    assert server.worker.calls == ["GetStatus", "Reset", "InitDevice", *PHASES[1:]]
    assert (started.epoch, started.summary.already_loaded) == (2, True)


@pytest.mark.parametrize(("changes", "kept"), [({}, "cached"), ({"block_size": 8}, "loaded")])
async def test_an_adopted_worker_keeps_a_cache_that_is_the_one_wanted(
    server: FakeWorkerServer, changes: dict[str, Any], kept: str
) -> None:
    await start(server)
    phases: list[int] = []
    server.worker.before = lambda method: phases.append(server.worker.phase) if method == "InitializeCache" else None
    await start(server, **changes)
    assert phases == [getattr(worker_pb2, f"PHASE_{kept.upper()}")]


async def test_an_adopted_worker_that_was_measured_for_other_steps_is_measured_again(server: FakeWorkerServer) -> None:
    await start(server)
    started = await start(server, max_step_tokens=128)
    assert (started.epoch, started.summary.already_loaded) == (3, True)
    assert server.worker.measured == (128, 8)


async def test_an_adopted_worker_drops_the_weights_of_another_model(server: FakeWorkerServer) -> None:
    await start(server)
    server.worker.fingerprint = "another"
    started = await start(server)
    assert (started.epoch, started.summary.already_loaded) == (2, False)


async def test_a_worker_that_holds_another_type_of_weights_is_taken_further_back(server: FakeWorkerServer) -> None:
    await start(server)
    server.worker.max_model_len = 0

    def refuse_once(method: str) -> None:
        if method == "LoadModel" and server.worker.phase == Phase.LOADED:
            raise StepwireError("WRONG_PHASE", "holds another dtype")

    server.worker.before = refuse_once
    started = await start(server)
    assert (started.epoch, server.worker.epoch, started.summary.already_loaded) == (3, 3, False)


@pytest.mark.parametrize("method", [*PHASES, "LoadModel at end"])
async def test_a_phase_that_fails_names_phase_rank_address_and_cause(server: FakeWorkerServer, method: str) -> None:
    server.worker.failures[method] = StepwireError("OUT_OF_MEMORY", "needs 3 bytes and has 2", {"needed": "3"})
    with pytest.raises(StepwireError) as caught:
        await start(server)
    error = caught.value
    assert error.reason == "OUT_OF_MEMORY"
    assert f"rank 0 at {server.address} on host fakehost: needs 3 bytes and has 2" in error.message
    assert error.metadata["phase"] in error.message
    assert error.metadata | {"rank": "0", "address": server.address, "needed": "3"} == error.metadata


async def test_a_worker_that_dies_during_load_is_one_error(server: FakeWorkerServer) -> None:
    server.worker.load_delay_s = 30
    task = asyncio.create_task(start(server))
    await until(lambda: "LoadModel" in server.worker.calls)
    await server.kill()
    with pytest.raises(StepwireError, match=r"load_model failed on rank 0 at 127.0.0.1:\d+ on host fakehost"):
        await asyncio.wait_for(task, 30)


async def test_an_unreachable_worker_is_waited_for_and_then_one_error() -> None:
    client = WorkerClient("127.0.0.1:1", key=None, tracer=get_tracer(None))
    with pytest.raises(StepwireError) as caught:
        await GroupStarter([client], start_plan(worker_timeout_s=0.3), get_tracer(None)).start()
    await client.close()
    assert "no worker answers at 127.0.0.1:1 within 0.3 s" in caught.value.message
    assert "--workers" in caught.value.message


async def test_a_load_may_take_longer_than_workers_are_waited_for(server: FakeWorkerServer) -> None:
    """vllm #35616, #35547: a load that took longer than a limit nobody had named was ended."""
    server.worker.load_delay_s = 0.6
    started = await start(server, worker_timeout_s=0.2)
    assert started.epoch == 1


async def test_a_worker_that_comes_late_is_found(server: FakeWorkerServer) -> None:
    await server.kill()
    task = asyncio.create_task(start(server))
    await asyncio.sleep(0.3)
    await server.start()
    assert (await asyncio.wait_for(task, 30)).epoch == 1


async def test_a_wrong_key_is_an_error_at_once() -> None:
    server = FakeWorkerServer(FakeWorker(choices=[5]), key="k" * 20)
    await server.start()
    client = WorkerClient(server.address, key="w" * 20, tracer=get_tracer(None))
    with pytest.raises(StepwireError) as caught:
        await GroupStarter([client], start_plan(), get_tracer(None)).start()
    assert caught.value.reason == "UNAUTHENTICATED"
    await client.close()
    await server.kill()


@pytest.mark.parametrize(
    ("changes", "available", "expected"),
    [({}, 1000, 256), ({}, 100, 100), ({"num_blocks": 50}, 100, 50), ({"num_blocks": 1000}, 2000, 256)],
)
async def test_the_number_of_blocks_is_what_fits_and_can_be_used(
    server: FakeWorkerServer, changes: dict[str, Any], available: int, expected: int
) -> None:
    server.worker.available_blocks = available
    assert (await start(server, **changes)).num_blocks == expected


@pytest.mark.parametrize(
    ("changes", "available", "words"),
    [
        ({}, 31, ["max_model_len = 512", "needs 32 KV blocks", "holds 31", "at most 496"]),
        ({}, -5, ["needs 32 KV blocks", "holds 0"]),
        ({"num_blocks": 31}, 100, ["num_kv_blocks asks for 31"]),
        ({"num_blocks": 101}, 100, ["num_kv_blocks asks for 101", "holds 100", "memory_fraction"]),
    ],
)
async def test_a_cache_that_holds_no_whole_sequence_is_refused(
    server: FakeWorkerServer, changes: dict[str, Any], available: int, words: list[str]
) -> None:
    server.worker.available_blocks = available
    with pytest.raises(StepwireError) as caught:
        await start(server, **changes)
    assert caught.value.reason == "OUT_OF_MEMORY"
    assert all(word in caught.value.message for word in words), caught.value.message


@pytest.mark.parametrize(
    ("changes", "available", "blocks", "context"),
    [
        ({}, 31, 31, 496),
        ({"num_blocks": 20}, 100, 20, 320),
        ({}, 1, 1, 16),
        # What fits as it is stays so.
        ({}, 100, 100, 512),
        ({"max_model_len": 40}, 3, 3, 40),
    ],
)
async def test_a_context_is_fitted_to_the_memory_on_request(
    server: FakeWorkerServer, changes: dict[str, Any], available: int, blocks: int, context: int
) -> None:
    server.worker.available_blocks = available
    started = await start(server, fit_max_model_len=True, **changes)
    assert (started.num_blocks, started.max_model_len) == (blocks, context)


async def test_no_context_fits_where_not_even_a_block_does(server: FakeWorkerServer) -> None:
    server.worker.available_blocks = 0
    with pytest.raises(StepwireError, match="needs 32 KV blocks"):
        await start(server, fit_max_model_len=True)


def test_the_rank_with_least_memory_decides() -> None:
    from scheduler_service.engine.ports import LoadSummary, MemoryReport

    summaries = [LoadSummary("f", "a", 0, "float32", size, 320, 512, False, 0.0) for size in (64, 128)]
    memory = [MemoryReport(64 * 16 * 200, 0, 0, 0), MemoryReport(128 * 16 * 100, 0, 0, 0)]
    assert decide_num_blocks(start_plan(), summaries, memory) == 100


async def test_a_drain_lets_running_requests_end_and_takes_no_new_ones() -> None:
    async with running_scheduler() as scheduler:
        scheduler.worker.step_delay_s = 0.005
        running = asyncio.create_task(
            scheduler.generate(text="x", sampling=pb.SamplingParams(max_tokens=60, ignore_eos=True))
        )
        await until(lambda: scheduler.engine.model_info().num_running == 1)
        drain = asyncio.create_task(scheduler.engine.drain(20))
        await until(lambda: scheduler.engine.model_info().state == "draining")
        error = await scheduler.error_of(text="x")
        assert (error.reason, error.code) == ("DRAINING", grpc.StatusCode.UNAVAILABLE)
        await drain
        assert running.done() or len(tokens_of(await asyncio.wait_for(running, 20))) == 60
        assert not scheduler.engine.is_healthy


async def test_a_drain_that_takes_too_long_ends_what_is_left() -> None:
    async with running_scheduler() as scheduler:
        scheduler.worker.step_delay_s = 0.05
        running = asyncio.create_task(scheduler.error_of(text="x"))
        await until(lambda: scheduler.engine.model_info().num_running == 1)
        await scheduler.engine.drain(0.1)
        assert (await running).reason == "DRAINING"
