"""Sleep and wake of a scheduler's workers over real gRPC, with a fake worker that checks every step."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from scheduler_service.engine.ports import SleepLevel
from scheduler_service.engine.sleep import SleepRule
from stepwire.client.admin import AdminClient
from stepwire.rpc.channel import create_channel
from stepwire.rpc.errors import StepwireError
from stepwire.v1 import admin_pb2, admin_pb2_grpc
from stepwire.v1 import inference_pb2 as pb
from tests.support.fake_worker import expected_tokens, letter_ids
from tests.support.scheduler_server import ADMIN_KEY, RunningScheduler, running_scheduler, tokens_of, until

PROMPT = list(range(10, 60))


def request(max_tokens: int = 9, **fields: Any) -> dict[str, Any]:
    sampling = pb.SamplingParams(max_tokens=max_tokens, seed=3, n=fields.pop("n", 1))
    return {"token_ids": pb.TokenIds(ids=PROMPT), "sampling": sampling, **fields}


def expected(scheduler: RunningScheduler, num: int = 9, index: int = 0) -> list[int]:
    return expected_tokens(PROMPT, num, letter_ids(scheduler.tokenizer), seed=3, index=index)


@asynccontextmanager
async def started(rule: SleepRule = SleepRule()) -> AsyncIterator[tuple[RunningScheduler, AdminClient]]:  # noqa: B008
    async with running_scheduler(admin_key=ADMIN_KEY, sleep_rule=rule) as scheduler:
        with AdminClient(scheduler.address, key=ADMIN_KEY) as client:
            yield scheduler, client


async def sleep(client: AdminClient, **options: Any) -> None:
    await asyncio.to_thread(lambda: client.sleep(**{"timeout": 20.0, **options}))


async def wake(client: AdminClient) -> None:
    await asyncio.to_thread(lambda: client.wake_up(timeout=20.0))


def state(scheduler: RunningScheduler) -> str:
    return scheduler.engine.model_info().state


@pytest.mark.parametrize("drop_weights", [False, True])
async def test_after_a_sleep_the_output_is_the_same_and_the_prefix_is_computed_anew(*, drop_weights: bool) -> None:
    async with started() as (scheduler, client):
        before = await scheduler.generate(**request())
        await sleep(client, drop_weights=drop_weights)
        assert state(scheduler) == "sleeping"
        assert scheduler.worker.sleep_level == 1 + drop_weights
        await wake(client)
        assert state(scheduler) == "ready"
        # The worker has forgotten all KV: a block taken from the prefix cache would change the tokens.
        after = await scheduler.generate(**request())
        assert tokens_of(after) == tokens_of(before) == expected(scheduler)
        assert after[-1].finished.usage.cached_token_count == 0
        assert [replica.group.epoch for replica in scheduler.engine.replicas if replica.group] == [1]


async def test_running_sequences_are_finished_first_and_others_wait() -> None:
    async with started() as (scheduler, client):
        scheduler.worker.gate.clear()
        running = asyncio.create_task(scheduler.generate(**request(100)))
        await until(lambda: scheduler.engine.model_info().num_running == 1)
        asleep = asyncio.create_task(sleep(client))
        await until(lambda: state(scheduler) == "sleeping")
        waiting = asyncio.create_task(scheduler.generate(**request(n=3)))
        await until(lambda: scheduler.engine.model_info().num_waiting == 3)
        scheduler.worker.gate.set()
        await asleep
        assert tokens_of(await running) == expected(scheduler, 100)
        assert not waiting.done() and scheduler.engine.is_healthy
        await wake(client)
        responses = await waiting
        assert [tokens_of(responses, i) for i in range(3)] == [expected(scheduler, index=i) for i in range(3)]
        await until(lambda: scheduler.free_blocks() == scheduler.engine.model_info().num_blocks)


async def test_running_sequences_are_preempted_and_come_back() -> None:
    async with started(SleepRule(preempts=True)) as (scheduler, client):
        scheduler.worker.step_delay_s = 0.002
        running = asyncio.create_task(scheduler.generate(**request(300, n=2)))
        await until(lambda: len(scheduler.worker.steps) > 20)
        await sleep(client)
        assert not running.done() and not scheduler.worker.sequences
        assert scheduler.engine.model_info().num_running == 0
        await wake(client)
        responses = await running
        assert [tokens_of(responses, i) for i in range(2)] == [expected(scheduler, 300, i) for i in range(2)]


async def test_arrivals_are_refused_as_set_and_health_says_so() -> None:
    async with started(SleepRule(refuses=True)) as (scheduler, client):
        await sleep(client)
        error = await scheduler.error_of(**request())
        assert (error.reason, error.code.name) == ("MODEL_ASLEEP", "UNAVAILABLE")
        assert error.retry_after_s is not None and not scheduler.engine.is_healthy
        await wake(client)
        assert scheduler.engine.is_healthy and tokens_of(await scheduler.generate(**request()))


async def test_what_waits_keeps_its_deadline() -> None:
    async with started() as (scheduler, client):
        await sleep(client)
        with pytest.raises(StepwireError) as caught:
            await scheduler.generate(timeout=0.2, **request())
        assert caught.value.reason == "DEADLINE_EXCEEDED"
        await until(lambda: scheduler.engine.model_info().num_waiting == 0)


async def test_sleep_may_go_deeper_and_repeats_change_nothing() -> None:
    async with started() as (scheduler, client):
        await wake(client)
        for drop_weights in (False, False, True, False):
            await sleep(client, drop_weights=drop_weights)
        assert scheduler.engine.sleeper.level is SleepLevel.DROP_WEIGHTS
        assert scheduler.worker.calls.count("Sleep") == 2
        await wake(client)
        await wake(client)
        assert scheduler.worker.calls.count("WakeUp") == 1
        assert tokens_of(await scheduler.generate(**request())) == expected(scheduler)


async def test_a_caller_that_leaves_before_it_sleeps_undoes_it() -> None:
    async with started() as (scheduler, client):
        scheduler.worker.gate.clear()
        running = asyncio.create_task(scheduler.generate(**request(20)))
        await until(lambda: scheduler.engine.model_info().num_running == 1)
        with pytest.raises(StepwireError) as caught:
            await sleep(client, timeout=0.2)
        assert caught.value.reason == "DEADLINE_EXCEEDED"
        await until(lambda: state(scheduler) == "ready")
        scheduler.worker.gate.set()
        assert tokens_of(await running) == expected(scheduler, 20)
        assert tokens_of(await scheduler.generate(**request())) == expected(scheduler)
        assert "Sleep" not in scheduler.worker.calls


async def test_a_worker_that_cannot_sleep_leaves_all_awake() -> None:
    async with started() as (scheduler, client):
        scheduler.worker.failures["Sleep"] = StepwireError("OUT_OF_MEMORY", "odd")
        with pytest.raises(StepwireError, match="odd"):
            await sleep(client)
        assert state(scheduler) == "ready"
        assert tokens_of(await scheduler.generate(**request())) == expected(scheduler)


async def test_a_worker_that_cannot_wake_up_sleeps_on_and_may_be_woken_again() -> None:
    async with started() as (scheduler, client):
        await sleep(client, drop_weights=True)
        scheduler.worker.failures["WakeUp"] = StepwireError("OUT_OF_MEMORY", "others hold it")
        with pytest.raises(StepwireError, match="others hold it"):
            await wake(client)
        waiting = asyncio.create_task(scheduler.generate(**request()))
        await until(lambda: scheduler.engine.model_info().num_waiting == 1)
        assert state(scheduler) == "sleeping"
        del scheduler.worker.failures["WakeUp"]
        await wake(client)
        assert tokens_of(await waiting) == expected(scheduler)


@pytest.mark.parametrize("is_new", [True, False])
async def test_a_worker_lost_in_its_sleep_comes_back_awake(*, is_new: bool) -> None:
    async with started() as (scheduler, client):
        await sleep(client)
        waiting = asyncio.create_task(scheduler.generate(timeout=60, **request()))
        await until(lambda: scheduler.engine.model_info().num_waiting == 1)
        if is_new:
            await scheduler.worker_server.replace()
        else:
            await scheduler.worker_server.kill()
            await scheduler.worker_server.start()
        assert tokens_of(await waiting) == expected(scheduler)
        assert state(scheduler) == "ready"
        # It may be put to sleep anew, in the new epoch.
        await sleep(client)
        await wake(client)
        assert tokens_of(await scheduler.generate(**request())) == expected(scheduler)


async def test_a_drain_ends_what_waits_for_a_sleeping_worker() -> None:
    async with started() as (scheduler, client):
        await sleep(client)
        waiting = asyncio.create_task(scheduler.error_of(**request()))
        await until(lambda: scheduler.engine.model_info().num_waiting == 1)
        await scheduler.engine.drain(30.0)
        assert (await waiting).reason == "DRAINING"


async def test_a_level_that_is_none_is_refused() -> None:
    async with started() as (scheduler, _):
        channel = create_channel(scheduler.address, max_message_bytes=1 << 20, key=ADMIN_KEY)
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        for level in (0, 3, -1):
            with pytest.raises(Exception, match="level is"):
                await stub.Sleep(admin_pb2.AdminServiceSleepRequest(level=level), timeout=5)  # type: ignore[arg-type]
        await channel.close()


async def test_all_replicas_sleep_and_wake_together() -> None:
    async with running_scheduler(num_replicas=2, sleep_rule=SleepRule(refuses=True)) as scheduler:
        replicas = list(scheduler.engine.replicas)
        before = [await scheduler.generate(**request()) for _ in range(4)]
        await scheduler.engine.sleeper.sleep(SleepLevel.DROP_WEIGHTS)
        assert [replica.sleep_level for replica in replicas] == [SleepLevel.DROP_WEIGHTS] * 2
        assert (await scheduler.error_of(**request())).reason == "MODEL_ASLEEP"
        await scheduler.engine.sleeper.wake_up()
        assert [replica.sleep_level for replica in replicas] == [SleepLevel.AWAKE] * 2
        after = [await scheduler.generate(**request()) for _ in range(4)]
        assert [tokens_of(one) for one in after] == [tokens_of(one) for one in before]
