"""A worker is lost: its group is made ready again in a new epoch, and requests go on where they were."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from scheduler_service.engine.causes import EpochEnd
from scheduler_service.engine.recovery import Epoch
from scheduler_service.engine.supervision import ProcessEnd, Unsupervised
from stepwire.rpc.errors import StepwireError
from stepwire.supervisor.ports import free_port
from stepwire.v1 import inference_pb2 as pb
from stepwire.v1 import worker_pb2
from tests.support.fake_worker import expected_tokens
from tests.support.scheduler_server import RunningScheduler, running_scheduler, tokens_of, until

NUM_TOKENS = 60


class Supervisor(Unsupervised):
    """Knows how processes end, and what is asked of it."""

    def __init__(self) -> None:
        self.ends: dict[int, ProcessEnd] = {}
        self.asked: list[tuple[str, int]] = []
        self.places: dict[str, str] = {}
        self.gone: dict[str, str] = {}

    async def end_of(self, address: str, process_id: int, timeout_s: float) -> ProcessEnd | None:
        return self.ends.get(process_id)

    def replace(self, address: str, process_id: int) -> None:
        self.asked.append((address, process_id))

    def place_of(self, worker: str) -> str:
        return self.places.get(worker, worker)

    def why_gone(self, worker: str) -> str | None:
        return self.gone.get(worker)


class Observer:
    """Sees epochs begin and end."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def epoch_began(self, epoch: Epoch) -> None:
        self.seen.append(f"{epoch.number} began" + (" after a fault" if epoch.follows_fault else ""))

    def epoch_ended(self, end: EpochEnd) -> None:
        self.seen.append(f"{end.epoch} ended by {end.root.kind.name.lower()}")


class Stream:
    """A request under way."""

    def __init__(self, scheduler: RunningScheduler, text: str, num: int = NUM_TOKENS, **fields: Any) -> None:
        self._scheduler, self._num = scheduler, num
        self.prompt = scheduler.tokenizer.encode(text).ids
        sampling = pb.SamplingParams(max_tokens=num, ignore_eos=True, seed=len(text), n=fields.pop("n", 1))
        self.seed, self.n = len(text), sampling.n
        self.task = asyncio.create_task(
            scheduler.generate(token_ids=pb.TokenIds(ids=self.prompt), sampling=sampling, **fields)
        )

    async def check(self) -> None:
        """It ends as if nothing had happened, with every position once. Raises AssertionError."""
        responses = await asyncio.wait_for(self.task, 60)
        for index in range(self.n):
            outputs = [r.output for r in responses if r.HasField("output") and r.output.sequence_index == index]
            positions = [o.position + i for o in outputs for i in range(len(o.token_ids))]
            assert positions == list(range(self._num))
            choices = self._scheduler.worker.choices
            wanted = expected_tokens(self.prompt, self._num, choices, seed=self.seed, index=index)
            assert tokens_of(responses, index) == wanted
        assert responses[-1].finished.usage.output_token_count == self._num * self.n


@asynccontextmanager
async def streaming(num: int = 3, **options: Any) -> AsyncIterator[tuple[RunningScheduler, list[Stream]]]:
    """A scheduler with streams that are in the middle of their outputs."""
    async with running_scheduler(**options) as scheduler:
        scheduler.worker.step_delay_s = 0.004
        streams = [Stream(scheduler, "x" * (i + 1), n=2 if i == 0 else 1) for i in range(num)]
        await until(lambda: len(scheduler.worker.steps) > 20)
        yield scheduler, streams


async def test_streams_go_on_when_their_worker_is_replaced() -> None:
    async with streaming() as (scheduler, streams):
        for _ in range(2):
            epoch = scheduler.worker.epoch
            await scheduler.worker_server.replace()
            await until(lambda epoch=epoch: scheduler.worker.epoch > epoch and scheduler.worker.last_step_id > 3)
        for stream in streams:
            await stream.check()
        assert scheduler.engine.is_healthy
        await until(lambda: scheduler.free_blocks() == scheduler.engine.model_info().num_blocks)


async def test_streams_go_on_with_a_worker_that_came_back_at_another_address() -> None:
    supervisor = Supervisor()
    async with streaming(supervision=supervisor) as (scheduler, streams):
        server = scheduler.worker_server
        for _ in range(2):
            epoch, named = scheduler.worker.epoch, next(iter(supervisor.places), server.address)
            await server.kill()
            server.worker.forget()
            server.port = free_port()
            await server.start()
            supervisor.places[named] = server.address
            await until(lambda epoch=epoch: scheduler.worker.epoch > epoch and scheduler.worker.last_step_id > 3)
        for stream in streams:
            await stream.check()
        assert supervisor.asked == []


async def test_a_worker_is_walked_through_all_phases_with_the_blocks_it_had() -> None:
    async with streaming(1) as (scheduler, streams):
        num_blocks = scheduler.worker.num_blocks
        scheduler.worker.available_blocks //= 2
        scheduler.worker.calls.clear()
        await scheduler.worker_server.replace()
        await streams[0].check()
        assert scheduler.worker.num_blocks == num_blocks
        calls = [call for call in scheduler.worker.calls if call not in ("GetStatus", "ListAdapters")]
        assert calls == ["InitDevice", "LoadModel", "InitializeCache", "WarmUp", "ExecuteModel"]


async def test_a_worker_that_stands_keeps_weights_and_cache_after_a_failed_step() -> None:
    async with streaming() as (scheduler, streams):
        failing = f"step {scheduler.worker.last_step_id + 3}"
        scheduler.worker.failures[failing] = StepwireError("OUT_OF_MEMORY", "the device is full", {"needed": "7"})
        scheduler.worker.calls.clear()
        await until(lambda: scheduler.worker.epoch == 2)
        del scheduler.worker.failures[failing]
        for stream in streams:
            await stream.check()
        calls = scheduler.worker.calls
        assert calls.index("Reset") < calls.index("InitDevice"), "it was taken for a new process"


async def test_the_end_of_an_epoch_is_told_with_its_cause() -> None:
    supervisor, observer = Supervisor(), Observer()
    async with streaming(2, supervision=supervisor, observers=[observer]) as (scheduler, streams):
        supervisor.ends[scheduler.worker.process_id] = ProcessEnd(-9, "worker 0 was killed by SIGKILL")
        await scheduler.worker_server.replace()
        await until(lambda: len(observer.seen) == 3)
        supervisor.ends[scheduler.worker.process_id] = ProcessEnd(-11, "worker 0 was killed by SIGSEGV")
        await scheduler.worker_server.replace()
        for stream in streams:
            await stream.check()
    assert observer.seen == ["1 began", "1 ended by exit", "2 began", "2 ended by exit", "3 began after a fault"]


async def test_the_log_has_one_error_with_the_root_cause(capsys: pytest.CaptureFixture[str]) -> None:
    supervisor = Supervisor()
    async with streaming(2, supervision=supervisor) as (scheduler, streams):
        supervisor.ends[scheduler.worker.process_id] = ProcessEnd(-9, "worker 0 was killed by SIGKILL")
        await scheduler.worker_server.replace()
        for stream in streams:
            await stream.check()
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "[error" in line]
    assert "epoch_ended" in line
    for part in ("execute_model failed on rank 0", "worker 0 was killed by SIGKILL", "error_exit_status=-9"):
        assert part in line


async def test_a_defect_of_the_recovery_ends_requests_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: object, worker: str) -> str | None:
        raise LookupError(worker)

    supervisor = Supervisor()
    monkeypatch.setattr(Supervisor, "why_gone", fails)
    async with streaming(1, supervision=supervisor) as (scheduler, streams):
        await scheduler.worker_server.kill()
        with pytest.raises(StepwireError, match="the recovery failed: LookupError"):
            await streams[0].check()
        assert not scheduler.engine.is_healthy


async def test_a_worker_that_is_not_started_again_is_told_with_the_reason() -> None:
    supervisor = Supervisor()
    async with streaming(1, supervision=supervisor) as (scheduler, streams):
        await scheduler.worker_server.kill()
        await until(lambda: scheduler.engine.model_info().state == "recovering")
        supervisor.gone[scheduler.worker_server.address] = "the machine is lost"
        with pytest.raises(StepwireError, match="is not started again: the machine is lost") as caught:
            await streams[0].check()
        assert (caught.value.reason, caught.value.retry_after_s) == ("WORKER_FAILED", None)


async def test_a_hung_step_asks_for_another_process_and_goes_on() -> None:
    """vllm #17965, #19668: a step that took too long was the end of the engine."""
    supervisor = Supervisor()
    async with streaming(2, supervision=supervisor, step_timeout_s=0.5) as (scheduler, streams):
        process_id = scheduler.worker.process_id
        scheduler.worker.gate.clear()
        await until(lambda: supervisor.asked != [])
        assert supervisor.asked == [(scheduler.worker_server.address, process_id)]
        await scheduler.worker_server.kill()
        scheduler.worker.gate.set()
        await scheduler.worker_server.replace()
        for stream in streams:
            await stream.check()


async def test_a_silent_worker_that_comes_back_is_taken_into_a_new_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler_service.engine.group.HEARTBEAT_EVERY_S", 0.1)
    async with streaming(2) as (scheduler, streams):
        scheduler.worker.gate.clear()
        scheduler.worker.is_mute = True
        # No longer than that: a worker that is only slow, on a busy machine, is not meant.
        with monkeypatch.context() as soon:
            soon.setattr("scheduler_service.engine.group.LOST_AFTER_S", 0.4)
            await until(lambda: scheduler.engine.model_info().state == "recovering")
        assert not scheduler.engine.is_healthy
        scheduler.worker.is_mute = False
        scheduler.worker.gate.set()
        for stream in streams:
            await stream.check()
        assert scheduler.worker.epoch == 2


async def test_another_scheduler_that_takes_the_worker_fences_this_one_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler_service.engine.group.HEARTBEAT_EVERY_S", 0.05)
    async with running_scheduler() as scheduler:
        scheduler.worker.gate.clear()
        task = asyncio.create_task(scheduler.error_of(text="x"))
        await until(lambda: scheduler.engine.model_info().num_running == 1)
        scheduler.worker.epoch, scheduler.worker.scheduler_id = 7, "the-other"
        error = await asyncio.wait_for(scheduler.engine.failed, 30)
        assert (error.reason, error.metadata["held_by"], error.metadata["held"]) == ("FENCED", "the-other", "7")
        assert (await task).reason == "FENCED"
        assert "Reset" not in scheduler.worker.calls
        assert scheduler.engine.model_info().state == "failed"
        assert (await scheduler.error_of(text="x")).retry_after_s is None


async def test_a_worker_taken_while_it_was_away_fences_this_one_off() -> None:
    async with running_scheduler() as scheduler:
        await scheduler.worker_server.kill()
        await until(lambda: scheduler.engine.model_info().state == "recovering")
        scheduler.worker.forget()
        scheduler.worker.epoch, scheduler.worker.scheduler_id = 9, "the-other"
        await scheduler.worker_server.start()
        assert (await asyncio.wait_for(scheduler.engine.failed, 30)).reason == "FENCED"


async def test_requests_fail_with_the_cause_when_the_restart_budget_is_spent() -> None:
    """TGI #3317: all that a user was told of a shard that had crashed was that a connection failed."""
    supervisor = Supervisor()
    async with streaming(2, restart_budget=2, supervision=supervisor) as (scheduler, streams):
        supervisor.ends[scheduler.worker.process_id] = ProcessEnd(-9, "worker 0 was killed by SIGKILL")
        scheduler.worker.failures["LoadModel"] = StepwireError("CHECKPOINT_INVALID", "the file is gone", {"file": "f"})
        await scheduler.worker_server.replace()
        for stream in streams:
            with pytest.raises(StepwireError, match="the file is gone") as caught:
                await asyncio.wait_for(stream.task, 60)
            assert f"rank 0 at {scheduler.worker_server.address} on host fakehost" in caught.value.message
            assert "worker 0 was killed by SIGKILL" in caught.value.message
            assert caught.value.metadata["file"] == "f"
            assert caught.value.metadata["rank"] == "0"
        assert scheduler.worker.calls.count("LoadModel") == 4
        assert not scheduler.engine.is_healthy
        assert scheduler.engine.failed.done()
        assert scheduler.engine.model_info().state == "failed"


async def test_kills_of_epochs_that_applied_steps_neither_spend_the_budget_nor_blame_anybody() -> None:
    supervisor = Supervisor()
    async with streaming(1, restart_budget=1, supervision=supervisor) as (scheduler, streams):
        for _ in range(4):
            epoch = scheduler.worker.epoch
            supervisor.ends[scheduler.worker.process_id] = ProcessEnd(-9, "worker 0 was killed by SIGKILL")
            await scheduler.worker_server.replace()
            await until(lambda epoch=epoch: scheduler.worker.epoch > epoch and scheduler.worker.last_step_id > 4)
        for stream in streams:
            await stream.check()


async def test_a_recovery_that_fails_is_begun_again() -> None:
    async with streaming(2) as (scheduler, streams):
        scheduler.worker.failures["WarmUp"] = StepwireError("WORKER_FAILED", "not yet")
        await scheduler.worker_server.replace()
        await until(lambda: scheduler.worker.calls.count("WarmUp") == 2)
        del scheduler.worker.failures["WarmUp"]
        for stream in streams:
            await stream.check()


async def test_requests_come_wait_are_cancelled_and_expire_during_a_recovery() -> None:
    async with streaming(1) as (scheduler, streams):
        await scheduler.worker_server.kill()
        await until(lambda: scheduler.engine.model_info().state == "recovering")
        late = Stream(scheduler, "late")
        cancelled = Stream(scheduler, "cancelled")
        await until(lambda: scheduler.engine.model_info().num_waiting >= 2)
        cancelled.task.cancel()
        error = await scheduler.error_of(text="x", timeout=0.3)
        assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED
        scheduler.worker.forget()
        await scheduler.worker_server.start()
        for stream in (*streams, late):
            await stream.check()


async def test_a_drain_waits_for_a_recovery() -> None:
    async with streaming(2) as (scheduler, streams):
        await scheduler.worker_server.kill()
        drain = asyncio.create_task(scheduler.engine.drain(20))
        scheduler.worker.forget()
        await scheduler.worker_server.start()
        for stream in streams:
            await stream.check()
        await drain
        assert scheduler.engine.model_info().state == "draining"


async def test_a_request_that_breaks_its_worker_each_time_fails_alone() -> None:
    observer = Observer()
    async with running_scheduler(observers=[observer]) as scheduler:
        worker = scheduler.worker
        worker.step_delay_s = 0.002
        good = [Stream(scheduler, "x" * (i + 1)) for i in range(3)]
        await until(lambda: len(worker.steps) > 10)
        worker.step_failures["poison"] = StepwireError("WORKER_FAILED", "SIGILL or the like")
        error = await asyncio.wait_for(scheduler.error_of(text="y", request_id="poison"), 60)
        assert (error.reason, error.metadata["request_id"]) == ("REQUEST_ENDS_WORKERS", "poison")
        for stream in good:
            await stream.check()
        assert worker.epoch == 4
        assert scheduler.engine.is_healthy


async def test_hooks_bring_back_what_else_workers_held_before_any_sequence_comes() -> None:
    async with streaming(2) as (scheduler, streams):
        seen: list[tuple[int, int]] = []

        async def bring(ports: Any) -> None:
            seen.append((scheduler.worker.phase, scheduler.worker.last_step_id))
            assert [port.address for port in ports] == [scheduler.worker_server.address]

        scheduler.starter.hooks.append(bring)
        await scheduler.worker_server.replace()
        for stream in streams:
            await stream.check()
        assert seen == [(worker_pb2.PHASE_READY, 0)]
