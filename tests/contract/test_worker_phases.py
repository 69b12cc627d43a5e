"""WorkerService over gRPC: phases, epochs, repeats, errors."""

import asyncio
import threading
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from loader.errors import CheckpointError
from stepwire.rpc.channel import create_channel
from stepwire.rpc.errors import StepwireError, from_rpc_error
from stepwire.v1 import worker_pb2 as pb
from stepwire.v1.worker_pb2_grpc import WorkerServiceStub
from tests.support.fake_runtime import FakeRuntime
from tests.support.worker_server import MODEL, RunningWorker, decode_step, first_step, new_sequence, running_worker
from worker_service.main import ExitCode
from worker_service.runtime.errors import RuntimeFailure


async def refused(call: object) -> StepwireError:
    """The error that a call ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_rpc_error(caught.value)


async def health(worker: RunningWorker, service: str) -> int:
    stub = health_pb2_grpc.HealthStub(worker.channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)).status


async def test_walks_through_all_phases() -> None:
    async with running_worker() as worker:
        status = await worker.status()
        assert (status.phase, status.epoch) == (pb.PHASE_STARTING, 0)

        device = await worker.init_device()
        assert device.device == "fake"
        assert device.total_memory_bytes == 1 << 30
        assert (device.device_id, device.memory_limit_bytes) == ("GPU-1", 1 << 28)
        assert device.process_id > 0 and device.host

        messages = await worker.load_model()
        assert messages[-1].summary.fingerprint == "fingerprint of tiny"
        assert messages[-1].loaded_bytes == messages[-1].total_bytes == 1000
        assert not messages[-1].summary.already_loaded
        assert (await worker.measure()).available_bytes == 1 << 20
        assert (await worker.initialize_cache()).cache_bytes == 32 * 16 * 64
        done = await worker.warm_up()
        assert done[-1].done_count == done[-1].total_count == 3

        status = await worker.status()
        assert (status.phase, status.epoch) == (pb.PHASE_READY, 1)
        assert status.fingerprint == "fingerprint of tiny"
        assert (status.weight_bytes, status.cache_bytes) == (4096, 32 * 16 * 64)
        assert worker.runtime.calls == [
            "init_device",
            "load_model",
            "determine_available_memory",
            "initialize_cache",
            "warm_up",
        ]
        assert len(worker.runtime.threads) == 1
        assert threading.get_ident() not in worker.runtime.threads


async def test_each_call_out_of_its_phase_is_refused_and_changes_nothing() -> None:
    async with running_worker() as worker:
        error = await refused(worker.load_model(epoch=0))
        assert error.reason == "WRONG_PHASE"
        assert error.metadata["held"] == "STARTING"
        assert error.metadata["needed"] == "INITIALISED"
        assert "InitDevice" in error.message
        await worker.init_device()
        for call, needed in (
            (worker.measure(), "LOADED"),
            (worker.initialize_cache(), "LOADED"),
            (worker.warm_up(), "CACHED"),
        ):
            error = await refused(call)
            assert (error.reason, error.metadata["needed"]) == ("WRONG_PHASE", needed)
            assert (error.metadata["phase"], error.metadata["rank"]) == ("INITIALISED", "0")
            assert error.metadata["host"]
        error = await refused(worker.open_stream())
        assert (error.reason, error.metadata["needed"]) == ("WRONG_PHASE", "READY")
        assert (await worker.status()).phase == pb.PHASE_INITIALISED


async def test_another_epoch_is_refused_everywhere() -> None:
    async with running_worker() as worker:
        await worker.walk_to_ready(epoch=3)
        for call in (
            worker.load_model(2),
            worker.measure(4),
            worker.initialize_cache(2),
            worker.warm_up(4),
            worker.open_stream(2),
            worker.init_device(2),
            worker.reset(2),
            worker.init_device(3, "another"),
            worker.reset(3, scheduler_id="another"),
        ):
            error = await refused(call)
            assert error.reason == "STALE_EPOCH"
            assert error.code is grpc.StatusCode.FAILED_PRECONDITION
            assert error.metadata["held"] == "3"
            assert error.metadata["got"] in {"2", "3", "4"}
        assert (await worker.status()).phase == pb.PHASE_READY


async def test_repeats_are_answered_at_once() -> None:
    async with running_worker() as worker:
        await worker.walk_to_ready()
        calls = list(worker.runtime.calls)
        assert (await worker.init_device()).device == "fake"
        messages = await worker.load_model()
        assert len(messages) == 1
        assert messages[0].summary.already_loaded
        assert (await worker.load_model(dtype="float32"))[-1].summary.already_loaded
        assert (await worker.load_model(quantize="auto", kv="auto"))[-1].summary.already_loaded
        assert (await worker.measure()).available_bytes == 1 << 20
        assert (await worker.initialize_cache()).cache_bytes == 32 * 16 * 64
        done = await worker.warm_up()
        assert done[-1].done_count == done[-1].total_count
        assert worker.runtime.calls == calls


async def test_a_repeat_with_other_arguments_is_refused() -> None:
    async with running_worker() as worker:
        await worker.walk_to_ready()
        for call in (
            worker.init_device(tensor_parallel_size=2),
            worker.load_model(path="/models/other"),
            worker.load_model(dtype="bfloat16"),
            worker.load_model(quantize="int8"),
            worker.load_model(kv="int8"),
            worker.measure(tokens=32),
            worker.initialize_cache(blocks=16),
            worker.warm_up(tokens=32),
        ):
            assert (await refused(call)).reason == "WRONG_PHASE"


async def test_a_new_scheduler_adopts_a_worker_without_loading_again() -> None:
    async with running_worker() as worker:
        await worker.walk_to_ready()
        stream = await worker.open_stream()
        await stream.execute(first_step(1, new_sequence(1, [5, 6])))
        assert (await worker.status()).sequence_count == 1
        assert (await worker.reset(2, scheduler_id="another")).phase == pb.PHASE_CACHED
        assert from_rpc_error(await stream.error()).reason == "STALE_EPOCH"
        assert (await worker.reset(2, scheduler_id="another")).phase == pb.PHASE_CACHED
        assert (await worker.load_model(2))[-1].summary.already_loaded
        await worker.initialize_cache(2)
        await worker.warm_up(2)
        status = await worker.status()
        assert (status.phase, status.epoch, status.last_step_id) == (pb.PHASE_READY, 2, 0)
        assert status.sequence_count == 0
        assert [name for name in worker.runtime.calls if name in ("load_model", "warm_up")] == ["load_model", "warm_up"]
        stream = await worker.open_stream(2)
        assert (await stream.execute(first_step(1, new_sequence(1, [5, 6]), epoch=2))).step_id == 1


@pytest.mark.parametrize(
    ("to", "phase"), [(pb.PHASE_INITIALISED, "INITIALISED"), (pb.PHASE_LOADED, "LOADED"), (pb.PHASE_CACHED, "CACHED")]
)
async def test_reset_goes_back_to_the_phase_asked_for(to: pb.Phase.ValueType, phase: str) -> None:
    async with running_worker() as worker:
        await worker.walk_to_ready()
        assert (await worker.reset(2, to)).phase == to
        status = await worker.status()
        assert status.phase == to
        assert bool(status.fingerprint) == (to >= pb.PHASE_LOADED)
        assert bool(status.cache_bytes) == (to >= pb.PHASE_CACHED)


async def test_reset_never_goes_forward() -> None:
    async with running_worker() as worker:
        assert (await worker.reset(1)).phase == pb.PHASE_STARTING
        await worker.init_device(1)
        assert (await worker.reset(2)).phase == pb.PHASE_INITIALISED
        error = await refused(worker.reset(3, to=pb.PHASE_READY))
        assert (error.reason, error.metadata["field"]) == ("FIELD_INVALID", "to")
        assert (await worker.status()).epoch == 2


async def test_a_late_copy_of_a_reset_does_not_undo_what_followed() -> None:
    async with running_worker() as worker:
        await worker.walk_to_ready()
        await worker.reset(2)
        await worker.warm_up(2)
        assert (await refused(worker.reset(2))).reason == "WRONG_PHASE"
        assert (await worker.status()).phase == pb.PHASE_READY


async def test_health_follows_the_phase() -> None:
    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    async with running_worker() as worker:
        assert await health(worker, "") == serving
        assert await health(worker, "stepwire.v1.WorkerService") == not_serving
        await worker.walk_to_ready()
        assert await health(worker, "stepwire.v1.WorkerService") == serving
        await worker.reset(2)
        assert await health(worker, "stepwire.v1.WorkerService") == not_serving


async def test_reflection_names_the_service() -> None:
    async with running_worker() as worker:
        stub = reflection_pb2_grpc.ServerReflectionStub(worker.channel)
        call = stub.ServerReflectionInfo(timeout=10)
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        listed = {service.name for service in (await call.read()).list_services_response.service}
        assert {"stepwire.v1.WorkerService", "grpc.health.v1.Health"} <= listed
        await call.done_writing()


async def test_an_opening_stream_of_an_epoch_that_ends_is_told_so() -> None:
    runtime = FakeRuntime(entered={"execute": threading.Event()})
    async with running_worker(runtime=runtime) as worker:
        await worker.walk_to_ready()
        gate = runtime.gates["execute"] = threading.Event()
        stream = await worker.open_stream()
        await stream.send(first_step(1, new_sequence(1, [5, 6])))
        await asyncio.to_thread(runtime.entered["execute"].wait, 10)
        opening = asyncio.create_task(worker.open_stream())
        assert from_rpc_error(await stream.error()).reason == "STREAM_DISPLACED"
        resetting = asyncio.create_task(worker.reset(2))
        while worker.worker._lifecycle.session is not None:
            await worker.status()
        gate.set()
        assert (await resetting).phase == pb.PHASE_CACHED
        error = await refused(opening)
        assert (error.reason, error.metadata["held"]) == ("STALE_EPOCH", "2")


async def test_a_cancelled_load_stops_and_can_be_repeated() -> None:
    runtime = FakeRuntime(gates={"load_model": threading.Event()}, entered={"load_model": threading.Event()})
    async with running_worker(runtime=runtime) as worker:
        await worker.init_device()
        call = worker.stub.LoadModel(pb.LoadModelRequest(epoch=1, model_path=MODEL, dtype="auto"), timeout=10)
        progress = await call.read()
        assert (progress.stage, progress.loaded_bytes, progress.total_bytes) == ("read", 500, 1000)
        assert (await worker.status()).phase == pb.PHASE_INITIALISED
        call.cancel()
        del runtime.gates["load_model"]
        messages = await worker.load_model()
        assert not messages[-1].summary.already_loaded
        assert runtime.calls.count("load_model") == 2


async def test_a_new_epoch_ends_a_load_of_the_old_one() -> None:
    runtime = FakeRuntime(gates={"load_model": threading.Event()}, entered={"load_model": threading.Event()})
    async with running_worker(runtime=runtime) as worker:
        await worker.init_device()
        load = asyncio.create_task(worker.load_model())
        await asyncio.to_thread(runtime.entered["load_model"].wait, 10)
        await worker.init_device(2, "another")
        error = await refused(load)
        assert (error.reason, error.metadata["held"], error.metadata["got"]) == ("STALE_EPOCH", "2", "1")
        status = await worker.status()
        assert (status.phase, status.epoch) == (pb.PHASE_INITIALISED, 2)


async def test_status_and_health_answer_while_the_device_is_busy() -> None:
    runtime = FakeRuntime(gates={"warm_up": threading.Event()}, entered={"warm_up": threading.Event()})
    async with running_worker(runtime=runtime) as worker:
        walk = asyncio.create_task(worker.walk_to_ready())
        await asyncio.to_thread(runtime.entered["warm_up"].wait, 10)
        assert (await worker.status()).phase == pb.PHASE_CACHED
        assert await health(worker, "") == health_pb2.HealthCheckResponse.SERVING
        runtime.gates["warm_up"].set()
        await walk
        assert (await worker.status()).phase == pb.PHASE_READY


async def test_a_change_goes_on_when_its_caller_goes_away() -> None:
    runtime = FakeRuntime(
        gates={"initialize_cache": threading.Event()}, entered={"initialize_cache": threading.Event()}
    )
    async with running_worker(runtime=runtime) as worker:
        await worker.init_device()
        await worker.load_model()
        call = worker.stub.InitializeCache(
            pb.InitializeCacheRequest(epoch=1, block_count=32, block_size=16, max_model_len=256), timeout=10
        )
        pending = asyncio.ensure_future(call)
        await asyncio.to_thread(runtime.entered["initialize_cache"].wait, 10)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pending
        runtime.gates["initialize_cache"].set()
        assert (await worker.initialize_cache()).cache_bytes == 32 * 16 * 64
        assert runtime.calls.count("initialize_cache") == 1


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("not_found", "CHECKPOINT_NOT_FOUND"),
        ("invalid", "CHECKPOINT_INVALID"),
        ("unsupported", "CHECKPOINT_UNSUPPORTED"),
    ],
)
async def test_a_checkpoint_error_arrives_with_all_it_knows(code: str, reason: str) -> None:
    failure = CheckpointError(
        code, "tensor a is short", "copy the file again", Path("/m/a.safetensors"), "a", "[2, 3]", "[2, 2]"
    )
    async with running_worker(runtime=FakeRuntime(failures={"load_model": failure})) as worker:
        await worker.init_device(tensor_rank=1, tensor_parallel_size=2, rendezvous="h:1")
        error = await refused(worker.load_model())
        assert error.reason == reason
        assert error.message == "tensor a is short; copy the file again"
        expected = {
            "file": "/m/a.safetensors",
            "tensor": "a",
            "expected": "[2, 3]",
            "found": "[2, 2]",
            "remedy": "copy the file again",
            "phase": "INITIALISED",
            "rank": "1",
        }
        assert expected.items() <= error.metadata.items()
        assert (await worker.status()).phase == pb.PHASE_INITIALISED
        assert (await worker.load_model())[-1].HasField("summary")


async def test_runtime_failures_have_reasons() -> None:
    runtime = FakeRuntime()
    async with running_worker(runtime=runtime) as worker:
        runtime.failures["init_device"] = RuntimeFailure("device_unavailable", "no cuda:7", {"device": "cuda:7"})
        error = await refused(worker.init_device())
        assert (error.reason, error.metadata["device"]) == ("DEVICE_UNAVAILABLE", "cuda:7")
        assert (await worker.status()).epoch == 0
        await worker.init_device()
        await worker.load_model()
        runtime.failures["initialize_cache"] = RuntimeFailure("out_of_memory", "no room", {"needed_bytes": "9"})
        error = await refused(worker.initialize_cache())
        assert (error.reason, error.code) == ("OUT_OF_MEMORY", grpc.StatusCode.RESOURCE_EXHAUSTED)
        assert error.metadata["needed_bytes"] == "9"
        runtime.failures["determine_available_memory"] = ValueError("secret")
        error = await refused(worker.measure())
        assert error.reason == "INTERNAL"
        assert "secret" not in error.message
        assert (await worker.status()).phase == pb.PHASE_LOADED


async def test_a_fatal_error_is_told_and_ends_the_worker() -> None:
    runtime = FakeRuntime(failures={"warm_up": SystemExit("the driver is gone")})
    async with running_worker(runtime=runtime) as worker:
        await worker.init_device()
        await worker.load_model()
        await worker.initialize_cache()
        error = await refused(worker.warm_up())
        assert error.reason == "WORKER_FAILED"
        assert "the driver is gone" in error.metadata["cause"]
        assert await asyncio.wait_for(worker.worker.wait(), 10) is ExitCode.DEVICE_FAILED


async def test_a_cache_larger_than_what_was_measured_is_refused() -> None:
    async with running_worker() as worker:
        await worker.init_device()
        await worker.load_model()
        await worker.measure()
        error = await refused(worker.initialize_cache(blocks=2000))
        assert error.reason == "OUT_OF_MEMORY"
        assert error.metadata["needed_bytes"] == str(2000 * 16 * 64)
        assert "initialize_cache" not in worker.runtime.calls


@pytest.mark.parametrize("epoch", [0, -1])
async def test_epochs_count_from_one(epoch: int) -> None:
    async with running_worker() as worker:
        error = await refused(worker.init_device(epoch))
        assert (error.reason, error.metadata["field"]) == ("FIELD_OUT_OF_RANGE", "epoch")


async def test_absurd_numbers_are_refused_by_name() -> None:
    async with running_worker() as worker:
        assert (await refused(worker.init_device(1, ""))).metadata["field"] == "scheduler_id"
        assert (await refused(worker.init_device(tensor_rank=1))).metadata["field"] == "tensor_rank"
        assert (await refused(worker.init_device(tensor_parallel_size=0))).metadata["field"] == "tensor_parallel_size"
        assert (await refused(worker.init_device(pipeline_rank=-1))).metadata["field"] == "pipeline_rank"
        await worker.init_device()
        assert (await refused(worker.load_model(dtype="int3"))).metadata["field"] == "dtype"
        assert (await refused(worker.load_model(quantize="int3"))).metadata["field"] == "quantize"
        assert (await refused(worker.load_model(kv="int3"))).metadata["field"] == "kv_cache_dtype"
        for path in ("", "a\0b", "x" * 5000):
            assert (await refused(worker.load_model(path=path))).metadata["field"] == "model_path"
        await worker.load_model()
        assert (await refused(worker.measure(tokens=0))).metadata["field"] == "max_step_token_count"
        assert (await refused(worker.measure(sequences=2**30))).metadata["field"] == "max_sequence_count"
        await worker.measure()
        assert (await refused(worker.initialize_cache(blocks=-5))).metadata["field"] == "block_count"
        assert (await refused(worker.initialize_cache(block_size=0))).metadata["field"] == "block_size"
        assert (await refused(worker.initialize_cache(max_model_len=513))).metadata["field"] == "max_model_len"
        await worker.initialize_cache()
        assert (await refused(worker.warm_up(tokens=65))).metadata["field"] == "max_step_token_count"
        assert (await refused(worker.warm_up(sequences=-1))).metadata["field"] == "max_sequence_count"


async def test_models_are_loaded_from_the_roots_alone(tmp_path: Path) -> None:
    root, outside = tmp_path / "models", tmp_path / "outside"
    (root / "good").mkdir(parents=True)
    (root / "linked").mkdir()
    outside.mkdir()
    (outside / "model.gguf").touch()
    (root / "escape").symlink_to(outside)
    (root / "linked" / "model.gguf").symlink_to(outside / "model.gguf")
    async with running_worker(model_roots=[str(root)]) as worker:
        await worker.init_device()
        for path in (
            outside / "model.gguf",
            root / "escape",
            root / "linked",
            root / ".." / "outside",
            Path("/nowhere"),
        ):
            error = await refused(worker.load_model(path=str(path)))
            assert (error.reason, error.metadata["field"]) == ("FIELD_INVALID", "model_path")
            assert "model roots" in error.message
        assert "load_model" not in worker.runtime.calls
        assert (await worker.load_model(path=str(root / "good")))[-1].HasField("summary")


async def test_a_cluster_key_guards_every_call() -> None:
    async with running_worker(cluster_key="k3y") as worker:
        await worker.walk_to_ready()
        for key in (None, "wrong"):
            async with create_channel(f"127.0.0.1:{worker.port}", max_message_bytes=2**20, key=key) as channel:
                stub = WorkerServiceStub(channel)
                error = await refused(stub.GetStatus(pb.GetStatusRequest(), timeout=10))
                assert error.reason == "UNAUTHENTICATED"
                error = await refused(stub.ExecuteModel(timeout=10).read())
                assert error.reason == "UNAUTHENTICATED"


async def test_a_worker_without_a_scheduler_ends_when_told_to() -> None:
    """vllm #32136: nodes without the one that led them never ended."""
    async with running_worker(scheduler_timeout=0.05) as worker:
        assert await asyncio.wait_for(worker.worker.wait(), 10) is ExitCode.NO_SCHEDULER


async def test_an_open_stream_counts_as_a_scheduler() -> None:
    async with running_worker(scheduler_timeout=1.0) as worker:
        await worker.walk_to_ready()
        stream = await worker.open_stream()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(worker.worker.wait(), 1.5)
        await stream.execute(first_step(1, new_sequence(1, [5, 6])))
        assert (await stream.execute(decode_step(2, {1: 2}))).step_id == 2
