"""ExecuteModel over gRPC: order, guard, displacement, errors, flow control, spans."""

import asyncio
import threading

import grpc
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from structlog.testing import capture_logs

from stepwire.rpc.errors import StepwireError, from_rpc_error
from stepwire.v1 import worker_pb2 as pb
from tests.support.fake_runtime import FakeRuntime, next_token
from tests.support.worker_server import RunningWorker, Stream, decode_step, first_step, new_sequence, running_worker
from worker_service.main import ExitCode
from worker_service.rpc.stream import MAX_STEPS_IN_FLIGHT
from worker_service.runtime.errors import RuntimeFailure

PROMPT = [5, 6, 7]


async def started(worker: RunningWorker) -> Stream:
    """A stream whose sequence 1 has executed step 1."""
    await worker.walk_to_ready()
    stream = await worker.open_stream()
    await stream.execute(first_step(1, new_sequence(1, PROMPT)))
    return stream


async def send_all(stream: Stream, steps: list[pb.Step]) -> None:
    for step in steps:
        await stream.send(step)


async def test_a_sequence_from_first_to_last_step() -> None:
    async with running_worker() as worker:
        await worker.walk_to_ready()
        stream = await worker.open_stream()
        assert stream.opened == pb.OpenStream(epoch=1, last_step_id=0)
        sampling = {"logprobs": 2}
        result = await stream.execute(first_step(1, new_sequence(1, PROMPT, sampling=sampling)))
        tokens = [*PROMPT, next_token(PROMPT)]
        assert (result.epoch, result.step_id) == (1, 1)
        assert (list(result.sequence_ids), list(result.token_ids)) == ([1], tokens[-1:])
        assert result.logprobs[0].logprobs.sampled.token_id == tokens[-1]
        assert len(result.logprobs[0].logprobs.top) == 2
        assert result.timings.forward_ns == 2000
        assert result.timings.queue_ns > 0 and result.timings.start_unix_ns > 0
        for step_id in (2, 3):
            result = await stream.execute(decode_step(step_id, {1: len(tokens) - 1}))
            tokens.append(next_token(tokens))
            assert list(result.token_ids) == tokens[-1:]
        result = await stream.execute(pb.Step(epoch=1, step_id=4, finished_sequence_ids=[1]))
        assert not result.sequence_ids
        status = await worker.status()
        assert (status.sequence_count, status.last_step_id) == (0, 4)


async def test_steps_are_pipelined_and_answered_in_order() -> None:
    runtime = FakeRuntime()
    async with running_worker(runtime=runtime) as worker:
        stream = await started(worker)
        runtime.gates["execute"] = threading.Event()
        for step_id in (2, 3, 4):
            await stream.send(decode_step(step_id, {1: step_id + 1}))
        runtime.gates["execute"].set()
        results = [await stream.receive() for _ in range(3)]
        assert [result.step_id for result in results] == [2, 3, 4]
        assert runtime.executed == [1, 2, 3, 4]
        tokens = list(PROMPT)
        for _ in range(4):
            tokens.append(next_token(tokens))
        assert [result.token_ids[0] for result in results] == tokens[-3:]
        assert results[1].timings.queue_ns > 0


async def test_a_sender_that_does_not_read_is_held_up() -> None:
    runtime = FakeRuntime()
    async with running_worker(runtime=runtime) as worker:
        stream = await started(worker)
        gate = runtime.gates["execute"] = threading.Event()
        sender = asyncio.create_task(send_all(stream, [decode_step(2 + i, {1: 3 + i}) for i in range(40)]))
        guard = worker.worker._lifecycle.session.guard
        while guard.last_accepted < 1 + MAX_STEPS_IN_FLIGHT:
            await worker.status()
        for _ in range(20):
            await worker.status()
        assert guard.last_accepted == 1 + MAX_STEPS_IN_FLIGHT
        gate.set()
        results = [await stream.receive() for _ in range(40)]
        await sender
        assert [result.step_id for result in results] == list(range(2, 42))


async def test_a_repeated_step_is_answered_and_not_executed() -> None:
    runtime = FakeRuntime()
    async with running_worker(runtime=runtime) as worker:
        stream = await started(worker)
        first = await stream.execute(decode_step(2, {1: 3}))
        assert await stream.execute(decode_step(2, {1: 3})) == first
        runtime.gates["execute"] = threading.Event()
        await stream.send(decode_step(3, {1: 4}))
        await stream.send(decode_step(3, {1: 4}))
        await stream.send(decode_step(2, {1: 3}))
        runtime.gates["execute"].set()
        third = await stream.receive()
        assert await stream.receive() == third
        assert await stream.receive() == first
        assert runtime.executed == [1, 2, 3]


@pytest.mark.parametrize("step_id", [4, 0, -1, 2**62])
async def test_gaps_and_old_ids_end_the_stream_with_what_is_held(step_id: int) -> None:
    async with running_worker() as worker:
        stream = await started(worker)
        await stream.execute(decode_step(2, {1: 3}))
        await stream.send(decode_step(step_id, {1: 4}))
        error = await stream.error()
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
        failure = from_rpc_error(error)
        assert failure.reason == "STEP_OUT_OF_ORDER"
        expected = {"got": str(step_id), "last_executed": "2", "expected": "3", "phase": "READY", "rank": "0"}
        assert expected.items() <= failure.metadata.items()
        stream = await worker.open_stream(last_step_id=2)
        assert stream.opened.last_step_id == 2
        assert (await stream.execute(decode_step(3, {1: 4}))).step_id == 3


async def test_ids_older_than_the_kept_results_are_refused() -> None:
    async with running_worker() as worker:
        stream = await started(worker)
        for step_id in range(2, 30):
            await stream.execute(decode_step(step_id, {1: step_id + 1}))
        for step_id in range(26, 30):
            assert (await stream.execute(decode_step(step_id, {1: 0}))).step_id == step_id
        await stream.send(decode_step(1, {1: 0}))
        assert from_rpc_error(await stream.error()).metadata["oldest_kept"] == "14"


async def test_a_step_of_another_epoch_is_refused() -> None:
    async with running_worker() as worker:
        stream = await started(worker)
        await stream.send(decode_step(2, {1: 3}, epoch=2))
        failure = from_rpc_error(await stream.error())
        assert (failure.reason, failure.metadata["held"], failure.metadata["got"]) == ("STALE_EPOCH", "1", "2")


async def test_a_stream_goes_on_where_it_broke() -> None:
    runtime = FakeRuntime(entered={"execute": threading.Event()})
    async with running_worker(runtime=runtime) as worker:
        stream = await started(worker)
        gate = runtime.gates["execute"] = threading.Event()
        runtime.entered["execute"].clear()
        await stream.send(decode_step(2, {1: 3}))
        await asyncio.to_thread(runtime.entered["execute"].wait, 10)
        stream.call.cancel()
        opening = asyncio.create_task(worker.open_stream(last_step_id=1))
        await asyncio.sleep(0.05)
        assert not opening.done()
        gate.set()
        stream = await opening
        assert stream.opened.last_step_id == 2
        result = await stream.execute(decode_step(2, {1: 3}))
        assert list(result.token_ids) == [next_token([*PROMPT, next_token(PROMPT)])]
        assert (await stream.execute(decode_step(3, {1: 4}))).step_id == 3
        assert runtime.executed == [1, 2, 3]


async def test_a_newer_stream_displaces_the_older() -> None:
    async with running_worker() as worker:
        older = await started(worker)
        newer = await worker.open_stream(last_step_id=1)
        error = await older.error()
        assert error.code() is grpc.StatusCode.ABORTED
        assert from_rpc_error(error).reason == "STREAM_DISPLACED"
        assert newer.opened.last_step_id == 1
        assert (await newer.execute(decode_step(2, {1: 3}))).step_id == 2


async def test_a_refused_stream_displaces_nothing() -> None:
    async with running_worker() as worker:
        older = await started(worker)
        for epoch, last_step_id in ((2, 0), (1, -1)):
            with pytest.raises(grpc.aio.AioRpcError):
                await worker.open_stream(epoch, last_step_id)
        assert (await older.execute(decode_step(2, {1: 3}))).step_id == 2


async def test_an_opening_that_knows_more_than_was_executed_is_refused() -> None:
    async with running_worker() as worker:
        await started(worker)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await worker.open_stream(last_step_id=2)
        failure = from_rpc_error(caught.value)
        assert (failure.reason, failure.metadata["last_executed"]) == ("STEP_OUT_OF_ORDER", "1")


async def test_an_opening_without_results_that_are_gone_is_refused() -> None:
    async with running_worker() as worker:
        stream = await started(worker)
        for step_id in range(2, 30):
            await stream.execute(decode_step(step_id, {1: step_id + 1}))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await worker.open_stream(last_step_id=3)
        assert from_rpc_error(caught.value).metadata["oldest_kept"] == "14"


async def test_a_step_that_disagrees_is_refused_and_changes_nothing() -> None:
    runtime = FakeRuntime()
    async with running_worker(runtime=runtime) as worker:
        stream = await started(worker)
        runtime.gates["execute"] = threading.Event()
        await stream.send(decode_step(2, {1: 9}))
        await stream.send(decode_step(3, {1: 10}))
        runtime.gates["execute"].set()
        error = await stream.error()
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
        failure = from_rpc_error(error)
        assert (failure.reason, failure.metadata["step_id"]) == ("STATE_MISMATCH", "2")
        assert "3 computed tokens, not 9" in failure.message
        assert runtime.executed == [1]
        stream = await worker.open_stream(last_step_id=1)
        assert (await stream.execute(decode_step(2, {1: 3}))).step_id == 2


async def test_earlier_results_precede_the_error_of_a_later_step() -> None:
    runtime = FakeRuntime()
    async with running_worker(runtime=runtime) as worker:
        stream = await started(worker)
        runtime.gates["execute"] = threading.Event()
        await stream.send(decode_step(2, {1: 3}))
        await stream.send(decode_step(7, {1: 4}))
        runtime.gates["execute"].set()
        assert (await stream.receive()).step_id == 2
        assert from_rpc_error(await stream.error()).reason == "STEP_OUT_OF_ORDER"


async def test_a_failed_step_ends_the_epoch_with_its_cause() -> None:
    runtime = FakeRuntime()
    async with running_worker(runtime=runtime) as worker:
        stream = await started(worker)
        runtime.failures["execute"] = ZeroDivisionError("in a kernel")
        runtime.gates["execute"] = threading.Event()
        await stream.send(decode_step(2, {1: 3}))
        await stream.send(decode_step(3, {1: 4}))
        runtime.gates["execute"].set()
        failure = from_rpc_error(await stream.error())
        assert (failure.reason, failure.code) == ("WORKER_FAILED", grpc.StatusCode.UNAVAILABLE)
        expected = {"cause": "ZeroDivisionError: in a kernel", "step_id": "2", "phase": "READY", "rank": "0"}
        assert expected.items() <= failure.metadata.items()
        assert failure.metadata["host"]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await worker.open_stream(last_step_id=1)
        assert from_rpc_error(caught.value).metadata["cause"] == "ZeroDivisionError: in a kernel"
        assert runtime.executed == [1]
        await worker.reset(2)
        await worker.warm_up(2)
        stream = await worker.open_stream(2)
        assert (await stream.execute(first_step(1, new_sequence(1, PROMPT), epoch=2))).step_id == 1


async def test_a_step_without_memory_says_so() -> None:
    runtime = FakeRuntime()
    async with running_worker(runtime=runtime) as worker:
        stream = await started(worker)
        runtime.failures["execute"] = RuntimeFailure("out_of_memory", "12 bytes short", {"needed_bytes": "12"})
        await stream.send(decode_step(2, {1: 3}))
        failure = from_rpc_error(await stream.error())
        assert (failure.reason, failure.metadata["needed_bytes"]) == ("OUT_OF_MEMORY", "12")


async def test_a_broken_device_is_told_on_the_stream_and_ends_the_worker() -> None:
    class AcceleratorError(RuntimeError):
        """Stands for torch's."""

    runtime = FakeRuntime()
    async with running_worker(runtime=runtime) as worker:
        stream = await started(worker)
        runtime.failures["execute"] = AcceleratorError("illegal address")
        await stream.send(decode_step(2, {1: 3}))
        failure = from_rpc_error(await stream.error())
        assert failure.metadata["cause"] == "AcceleratorError: illegal address"
        # Who begins a new epoch is to wait for the process that comes, and not to walk this one to its end.
        with pytest.raises(grpc.aio.AioRpcError) as ending:
            await worker.status()
        assert from_rpc_error(ending.value).reason == "MODEL_NOT_READY"
        assert await asyncio.wait_for(worker.worker.wait(), 10) is ExitCode.DEVICE_FAILED
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await worker.reset(2)
        assert "illegal address" in from_rpc_error(caught.value).metadata["cause"]


async def test_a_bad_sequence_ends_alone() -> None:
    runtime = FakeRuntime()
    async with running_worker(runtime=runtime) as worker:
        await worker.walk_to_ready()
        stream = await worker.open_stream()
        bad = new_sequence(2, [5, 1000, 7], request_id="bad")
        strange = new_sequence(3, [1], sampling={"temperature": float("nan")})
        await stream.send(first_step(1, new_sequence(1, PROMPT), bad, strange))
        # Planned before the error was known.
        await stream.send(decode_step(2, {1: 3, 2: 3, 3: 1}))
        await stream.send(decode_step(3, {1: 4}, finished_sequence_ids=[2, 3]))
        first, second, third = [await stream.receive() for _ in range(3)]
        errors = {error.sequence_id: error.message for error in first.errors}
        assert "token id 1000 is not below the vocabulary size 1000" in errors[2]
        assert "not a finite number" in errors[3]
        for result in (first, second, third):
            assert list(result.sequence_ids) == [1]
        assert set(runtime.sequences) == {1}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"sequence_ids": [1, 1]}, "scheduled_token_counts"),
        ({"sequence_ids": [-1]}, "sequence_ids"),
        ({"scheduled_token_counts": [0]}, "scheduled_token_counts"),
        ({"scheduled_token_counts": [65]}, "scheduled_token_counts"),
        ({"scheduled_token_counts": [2**31 - 1]}, "scheduled_token_counts"),
        ({"computed_token_counts": [-1]}, "computed_token_counts"),
        ({"computed_token_counts": [256]}, "computed_token_counts"),
        ({"computed_token_counts": []}, "computed_token_counts"),
        ({"new_block_counts": [1]}, "new_block_ids"),
        ({"new_block_counts": [1], "new_block_ids": [32]}, "new_block_ids"),
        ({"new_block_counts": [1], "new_block_ids": [-1]}, "new_block_ids"),
        ({"new_block_counts": [-1]}, "new_block_counts"),
        ({"new_sequences": [new_sequence(7, PROMPT)]}, "new_sequences"),
        ({"finished_sequence_ids": [-3]}, "finished_sequence_ids"),
        (
            {
                "sequence_ids": range(9),
                "scheduled_token_counts": [1] * 9,
                "computed_token_counts": [0] * 9,
                "new_block_counts": [0] * 9,
            },
            "sequence_ids",
        ),
    ],
)
async def test_numbers_out_of_bounds_never_reach_the_device(changes: dict[str, object], field: str) -> None:
    runtime = FakeRuntime()
    async with running_worker(runtime=runtime) as worker:
        stream = await started(worker)
        step = decode_step(2, {1: 3})
        for name, value in changes.items():
            step.ClearField(name)
            getattr(step, name).extend(value)
        await stream.send(step)
        error = await stream.error()
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert from_rpc_error(error).metadata["field"] == field
        assert runtime.executed == [1]
        stream = await worker.open_stream(last_step_id=1)
        assert (await stream.execute(decode_step(2, {1: 3}))).step_id == 2


async def test_the_stream_must_open_once_and_first() -> None:
    async with running_worker() as worker:
        await worker.walk_to_ready()
        stream = Stream(worker.stub.ExecuteModel(timeout=10))
        await stream.send(decode_step(1, {}))
        assert from_rpc_error(await stream.error()).metadata["field"] == "message"
        stream = await worker.open_stream()
        await stream.call.write(pb.ExecuteModelRequest(open=pb.OpenStream(epoch=1)))
        assert from_rpc_error(await stream.error()).metadata["field"] == "message"


async def test_a_scheduler_that_is_done_gets_its_last_results() -> None:
    runtime = FakeRuntime()
    async with running_worker(runtime=runtime) as worker:
        stream = await started(worker)
        runtime.gates["execute"] = threading.Event()
        await stream.send(decode_step(2, {1: 3}))
        await stream.call.done_writing()
        runtime.gates["execute"].set()
        assert (await stream.receive()).step_id == 2
        assert await stream.call.read() is grpc.aio.EOF
        assert await stream.call.code() is grpc.StatusCode.OK


async def test_shutting_down_answers_the_step_in_hand_and_no_more() -> None:
    runtime = FakeRuntime(entered={"execute": threading.Event()})
    async with running_worker(runtime=runtime) as worker:
        stream = await started(worker)
        gate = runtime.gates["execute"] = threading.Event()
        runtime.entered["execute"].clear()
        for step_id in (2, 3, 4):
            await stream.send(decode_step(step_id, {1: step_id + 1}))
        await asyncio.to_thread(runtime.entered["execute"].wait, 10)
        reason = StepwireError("DRAINING", "the worker is shutting down")
        with capture_logs() as logs:
            ending = asyncio.create_task(worker.worker._lifecycle.shut_down(reason))
            await asyncio.sleep(0)
            assert not ending.done()
            gate.set()
            assert (await stream.receive()).step_id == 2
            assert from_rpc_error(await stream.error()).reason == "DRAINING"
            await ending
        assert runtime.executed == [1, 2]
        # That was asked for: nobody is to be warned of it.
        assert [log["log_level"] for log in logs if log["event"] == "call_failed"] == ["info"]


async def test_spans_of_sampled_requests_alone() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    async with running_worker(tracer_provider=provider) as worker:
        await worker.walk_to_ready()
        stream = await worker.open_stream()
        sampled = new_sequence(1, PROMPT, traceparent=f"00-{trace_id}-b7ad6b7169203331-01")
        unsampled = new_sequence(2, PROMPT, traceparent=f"00-{trace_id}-b7ad6b7169203331-00")
        broken = new_sequence(3, PROMPT, traceparent="x" * 200)
        await stream.execute(first_step(1, sampled, unsampled, broken))
        for step_id in range(2, 8):
            await stream.execute(decode_step(step_id, {i: step_id + 1 for i in (1, 2, 3)}))
        await stream.execute(pb.Step(epoch=1, step_id=8, finished_sequence_ids=[1, 2, 3]))
    spans = [span for span in exporter.get_finished_spans() if span.name.startswith("worker.")]
    assert [span.name for span in spans] == ["worker.prefill", "worker.decode"]
    prefill, decode = spans
    for span in spans:
        assert f"{span.context.trace_id:032x}" == trace_id
        assert f"{span.parent.span_id:016x}" == "b7ad6b7169203331"
        assert span.attributes["stepwire.request_id"] == "r1"
        assert span.end_time > span.start_time
    assert prefill.attributes["stepwire.num_tokens"] == 3
    assert decode.attributes["stepwire.num_steps"] == 6
    assert (decode.attributes["stepwire.first_step_id"], decode.attributes["stepwire.last_step_id"]) == (2, 7)
    assert prefill.end_time <= decode.start_time
    rpcs = {span.name for span in exporter.get_finished_spans()}
    assert "stepwire.v1.WorkerService/LoadModel" in rpcs
    assert "stepwire.v1.WorkerService/ExecuteModel" not in rpcs  # It lasts as long as the worker serves.


@pytest.mark.parametrize("num_before", [0, 1])
async def test_bytes_that_are_no_message_are_the_callers_error_and_end_no_epoch(num_before: int) -> None:
    async with running_worker() as worker:
        await worker.walk_to_ready()
        opening = pb.ExecuteModelRequest(open=pb.OpenStream(epoch=1)).SerializeToString()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{worker.port}") as channel:
            method = channel.stream_stream("/stepwire.v1.WorkerService/ExecuteModel")
            with capture_logs() as logs, pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in method(iter([*[opening] * num_before, b"\xff\xff"]), timeout=5):
                    pass
        error = from_rpc_error(caught.value)
        assert (error.reason, error.code) == ("FIELD_INVALID", grpc.StatusCode.INVALID_ARGUMENT)
        assert not [entry for entry in logs if entry["log_level"] == "error"]
        stream = await worker.open_stream()
        await stream.execute(first_step(1, new_sequence(1, PROMPT)))
