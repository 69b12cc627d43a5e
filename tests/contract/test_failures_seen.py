"""What a lost worker leaves to see: whole traces of its requests, a trace of the recovery, one error in the logs."""

import asyncio
import itertools

import grpc
import pytest
from google.protobuf.descriptor_pb2 import MethodOptions
from structlog.testing import capture_logs

from stepwire.rpc.errors import StepwireError
from stepwire.telemetry import names
from stepwire.telemetry.spans import SpanRecorder
from stepwire.v1 import admin_pb2
from stepwire.v1 import inference_pb2 as pb
from tests.support.scheduler_server import ADMIN_KEY, RunningScheduler, running_scheduler, until
from tests.support.spans import Kept
from tests.support.worker_server import first_step, new_sequence, running_worker

REQUEST_SPAN = "text_completion tiny"


async def generate(scheduler: RunningScheduler, request_id: str, max_tokens: int = 80) -> None:
    sampling = pb.SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    await scheduler.generate(text="hello", sampling=sampling, request_id=request_id)


async def test_requests_that_lose_their_worker_keep_whole_traces() -> None:
    kept = Kept()
    async with running_scheduler(tracer_provider=SpanRecorder(kept)) as scheduler:
        scheduler.worker.step_delay_s = 0.004
        tasks = [asyncio.create_task(generate(scheduler, f"r{number}")) for number in range(3)]
        await until(lambda: len(scheduler.worker.steps) > 20)
        await scheduler.worker_server.replace()
        await asyncio.gather(*tasks)
    known = {span.context.span_id for span in kept.spans}
    assert all(span.parent_id in known for span in kept.spans if span.parent_id)
    requests = kept.named(REQUEST_SPAN)
    assert len(requests) == 3
    for request in requests:
        below = [span for span in kept.spans if span.parent_id == request.context.span_id]
        parts = [span for span in below if span.name in names.REQUEST_PARTS]
        assert [part.name for part in parts] == [
            "queue", "prefill", "decode", "recovery", "prefill", "decode", "stream",
        ]  # fmt: skip
        assert (parts[0].start_ns, parts[-1].end_ns) == (request.start_ns, request.end_ns)
        assert all(one.end_ns == other.start_ns for one, other in itertools.pairwise(parts))
        attempts = [
            (span.attributes[names.EPOCH], span.attributes[names.OUTCOME]) for span in below if span.name == "attempt"
        ]
        assert attempts == [(1, "epoch_ended"), (2, "finished")]
        events = [name for name, _, _ in request.events]
        assert events == [names.EVENT_FIRST_TOKEN, names.EVENT_WORKER_LOST, names.EVENT_RECOVERED, names.EVENT_RESUMED]
        assert request.attributes[names.NUM_EPOCHS] == 2


async def test_a_recovery_is_a_trace_that_is_always_kept() -> None:
    kept = Kept()
    async with running_scheduler(tracer_provider=SpanRecorder(kept, sample_ratio=0.0)) as scheduler:
        await generate(scheduler, "before")
        await scheduler.worker_server.replace()
        await until(lambda: scheduler.worker.epoch == 2)
        await generate(scheduler, "after")
    (recovery,) = kept.named(names.SPAN_GROUP_RECOVERY)
    phases = [span.name for span in kept.spans if span.parent_id == recovery.context.span_id]
    assert {names.startup_span_name(phase) for phase in ("connect", "init_device", "load_model")} <= set(phases)
    assert not kept.named(REQUEST_SPAN)


async def test_what_an_operator_does_is_a_trace_that_is_always_kept_and_what_one_looks_at_is_not() -> None:
    kept = Kept()
    async with running_scheduler(
        admin_key=ADMIN_KEY, tracer_provider=SpanRecorder(kept, sample_ratio=0.0)
    ) as scheduler:
        await scheduler.operate(lambda client: client.get_state())
        await scheduler.operate(lambda client: client.sleep())
    assert [span.name for span in kept.spans if "Admin" in span.name] == ["stepwire.v1.AdminService/Sleep"]
    methods = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].methods
    doing = [method for method in methods if method.GetOptions().idempotency_level != MethodOptions.NO_SIDE_EFFECTS]
    assert {f"stepwire.v1.AdminService/{method.name}" for method in doing} == names.KEPT_METHODS


async def test_what_a_worker_calls_an_error_the_scheduler_calls_a_warning() -> None:
    """The root cause stands at ERROR once: where it is known best."""
    async with running_scheduler() as scheduler:
        failures = scheduler.worker.failures
        failures["step 1"] = StepwireError("OUT_OF_MEMORY", "the device is full")
        scheduler.worker.before = lambda call: failures.clear() if call == "Reset" else None
        with capture_logs() as logs:
            # One token: no other step is being written while the first one fails.
            await generate(scheduler, "r1", max_tokens=1)
        assert scheduler.worker.epoch == 2
    assert not [log for log in logs if log["log_level"] in ("error", "critical")]
    (ended,) = [log for log in logs if log["event"] == "epoch_ended"]
    assert ended["log_level"] == "warning" and "the device is full" in ended["error"]


async def test_a_worker_says_once_why_its_step_failed() -> None:
    with capture_logs() as logs:
        async with running_worker() as worker:
            await worker.walk_to_ready()
            stream = await worker.open_stream()
            worker.runtime.failures["execute"] = RuntimeError("a sum went wrong")
            with pytest.raises(grpc.aio.AioRpcError):
                await stream.execute(first_step(1, new_sequence(1, [5, 6])))
    errors = [log for log in logs if log["log_level"] == "error"]
    assert [log["event"] for log in errors] == ["step_failed"]
    assert "a sum went wrong" in repr(errors[0]["exc_info"])


async def test_the_last_line_of_a_request_tells_its_story() -> None:
    async with running_scheduler() as scheduler:
        scheduler.worker.step_delay_s = 0.004
        with capture_logs() as logs:
            task = asyncio.create_task(generate(scheduler, "r1"))
            await until(lambda: len(scheduler.worker.steps) > 20)
            await scheduler.worker_server.replace()
            await task
            await scheduler.error_of(text="", request_id="r2")
            request = pb.GenerateRequest(
                text="a", request_id="r3", priority=-1, sampling=pb.SamplingParams(max_tokens=1)
            )
            assert [answer async for answer in scheduler.stub.Generate(request, metadata=[("stepwire-tenant", "blue")])]
    last = {log["request_id"]: log for log in logs if log["event"].startswith("request_")}
    story = last["r1"]
    assert (story["event"], story["epochs"], story["preemptions"]) == ("request_finished", 2, 0)
    assert (story["prompt_tokens"], story["output_tokens"], story["finish_reasons"]) == (4, 80, ["length"])
    parts = sum(story[f"{part}_s"] for part in ("queue", "prefill", "decode", "recovery", "stream"))
    assert parts == pytest.approx(story["seconds"], abs=0.05)
    assert (last["r2"]["event"], last["r2"]["reason"]) == ("request_failed", "PROMPT_EMPTY")
    assert (last["r3"]["tenant"], last["r3"]["priority"], last["r3"]["moves"]) == ("blue", -1, 0)
    assert not {"tenant", "priority", "adapter_fingerprint"} & story.keys(), "what was not said is not told"
    assert len([log for log in logs if log["event"].startswith("request_")]) == 3
