"""Several worker groups of one model behind one door: chosen, lost, added, drained."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from stepwire.rpc.errors import StepwireError
from stepwire.v1 import inference_pb2 as pb
from tests.support.fake_worker import FakeWorker, FakeWorkerServer, expected_tokens, letter_ids
from tests.support.scheduler_server import ADMIN_KEY, RunningScheduler, running_scheduler, tokens_of, until

NUM_TOKENS = 60


@pytest.fixture
async def two() -> AsyncIterator[RunningScheduler]:
    async with running_scheduler(admin_key=ADMIN_KEY, num_replicas=2) as running:
        for server in running.worker_servers:
            server.worker.step_delay_s = 0.005
        yield running


class Stream:
    """A request under way; `check` holds it against an undisturbed one. `form` is a regex that its output follows."""

    def __init__(self, scheduler: RunningScheduler, text: str, *, n: int = 1, form: str = "", **fields: Any) -> None:
        self._scheduler, self._seed, self._n = scheduler, len(text), n
        self._prompt = scheduler.tokenizer.encode(text).ids
        sampling = pb.SamplingParams(max_tokens=NUM_TOKENS, seed=self._seed, n=n)
        if form:
            sampling.structured_output.regex = form
        self.task = asyncio.create_task(
            scheduler.generate(token_ids=pb.TokenIds(ids=self._prompt), sampling=sampling, **fields)
        )

    async def check(self) -> None:
        responses = await asyncio.wait_for(self.task, 60)
        for index in range(self._n):
            outputs = [r.output for r in responses if r.HasField("output") and r.output.sequence_index == index]
            positions = [o.position + i for o in outputs for i in range(len(o.token_ids))]
            assert positions == list(range(NUM_TOKENS))
            choices = self._scheduler.worker.choices
            expected = expected_tokens(self._prompt, NUM_TOKENS, choices, seed=self._seed, index=index)
            assert tokens_of(responses, index) == expected


with_and_without_form = pytest.mark.parametrize("form", ["", "[a-zA-Z]+"])


def workers(scheduler: RunningScheduler) -> list[FakeWorker]:
    return [server.worker for server in scheduler.worker_servers]


async def test_both_serve_and_each_stream_is_whole(two: RunningScheduler) -> None:
    streams = [Stream(two, "x" * i, n=1 + i % 2) for i in range(1, 9)]
    for stream in streams:
        await stream.check()
    assert all(worker.last_step_id > NUM_TOKENS / 2 for worker in workers(two))
    info = two.engine.model_info()
    assert info.num_blocks == info.num_free_blocks == 2 * workers(two)[0].num_blocks


@with_and_without_form
async def test_a_lost_replicas_requests_go_on_at_once_elsewhere(two: RunningScheduler, form: str) -> None:
    streams = [Stream(two, "x" * i, n=1 + i % 2, form=form) for i in range(1, 9)]
    await until(lambda: all(worker.last_step_id > 8 for worker in workers(two)))
    await two.worker_servers[0].kill()
    for stream in streams:
        await stream.check()
    assert two.engine.model_info().state == "ready"
    assert two.engine.is_healthy
    assert all(replica.grammars.num_live == 0 for replica in two.engine.replicas)


async def test_a_replica_that_is_back_serves_again(two: RunningScheduler) -> None:
    streams = [Stream(two, "x" * i) for i in range(1, 5)]
    await until(lambda: all(worker.last_step_id > 8 for worker in workers(two)))
    await two.worker_servers[0].kill()
    for stream in streams:
        await stream.check()
    await two.worker_servers[0].start()
    await until(lambda: all(replica.is_healthy for replica in two.engine.replicas))
    assert two.worker.epoch == 2
    streams = [Stream(two, "y" * i) for i in range(1, 5)]
    for stream in streams:
        await stream.check()
    assert two.worker.last_step_id > 8


async def test_the_last_replica_recovers_as_a_single_one_does(two: RunningScheduler) -> None:
    streams = [Stream(two, "x" * i) for i in range(1, 5)]
    await until(lambda: all(worker.last_step_id > 8 for worker in workers(two)))
    for server in two.worker_servers:
        await server.kill()
    await until(lambda: two.engine.model_info().state == "recovering")
    await two.worker_servers[1].start()
    for stream in streams:
        await stream.check()


@pytest.mark.parametrize(("first", "form"), [(0, ""), (1, ""), (0, "[a-zA-Z]+")])
async def test_requests_wait_for_whichever_replica_recovers_first(two: RunningScheduler, first: int, form: str) -> None:
    """Both replicas had requests, and only one of them comes back."""
    streams = [Stream(two, "x" * i, form=form) for i in range(1, 7)]
    await until(lambda: all(worker.last_step_id > 8 for worker in workers(two)))
    for server in two.worker_servers:
        await server.kill()
    await until(lambda: two.engine.model_info().state == "recovering")
    lost, back = list(two.engine.replicas)[1 - first], two.worker_servers[first]
    await back.start()
    for stream in streams:
        await stream.check()
    assert len(lost.loop.live) == 0


async def test_who_waits_for_its_form_to_compile_goes_on_where_it_can(two: RunningScheduler) -> None:
    two.worker.grammar_gate.clear()
    streams = [Stream(two, "x" * i, form=f"[a-zA-Z]{{{i},}}") for i in range(1, 5)]
    await until(lambda: all("PrepareGrammar" in worker.calls for worker in workers(two)))
    await two.worker_servers[0].kill()
    for stream in streams:
        await stream.check()


async def test_who_waits_for_its_form_waits_for_whichever_replica_comes_back(two: RunningScheduler) -> None:
    for worker in workers(two):
        worker.grammar_gate.clear()
    stream = Stream(two, "x", form="[a-zA-Z]+")
    await until(lambda: any("PrepareGrammar" in worker.calls for worker in workers(two)))
    chosen = next(i for i, worker in enumerate(workers(two)) if "PrepareGrammar" in worker.calls)
    for server in two.worker_servers:
        await server.kill()
    await until(lambda: two.engine.model_info().state == "recovering")
    other = two.worker_servers[1 - chosen]
    other.worker.grammar_gate.set()
    await other.start()
    await stream.check()


async def test_a_form_that_the_other_workers_refuse_stays(two: RunningScheduler) -> None:
    streams = [Stream(two, "x" * i, form=f"[a-zA-Z]{{{i},}}") for i in range(1, 5)]
    await until(lambda: all(worker.last_step_id > 8 for worker in workers(two)))
    # Each has its grammar where it runs: one that has not would be refused by now.
    await until(lambda: sum(len(worker.grammars) for worker in workers(two)) == len(streams))
    workers(two)[1].failures["PrepareGrammar"] = StepwireError("GRAMMARS_FULL", "full", retry_after_s=1.0)
    draining = asyncio.create_task(two.operate(lambda client: client.drain_replica(0)))
    for stream in streams:
        await stream.check()
    await draining
    assert workers(two)[0].last_step_id >= NUM_TOKENS


async def test_a_replica_that_is_lost_for_good_leaves_the_others(two: RunningScheduler) -> None:
    await two.worker_servers[0].kill()
    stream = Stream(two, "abc")
    await stream.check()
    assert two.engine.is_healthy and len(two.engine.replicas) >= 1


async def test_an_id_is_taken_wherever_it_lives(two: RunningScheduler) -> None:
    stream = Stream(two, "abc", request_id="same")
    await until(lambda: any(worker.last_step_id > 2 for worker in workers(two)))
    with pytest.raises(StepwireError) as caught:
        await two.generate(text="another", request_id="same")
    assert caught.value.reason == "REQUEST_ALREADY_EXISTS"
    await stream.check()


@with_and_without_form
async def test_a_drained_replicas_requests_go_on_and_its_workers_stay(two: RunningScheduler, form: str) -> None:
    streams = [Stream(two, "x" * i, n=1 + i % 2, form=form) for i in range(1, 7)]
    await until(lambda: all(worker.last_step_id > 8 for worker in workers(two)))
    await two.operate(lambda client: client.drain_replica(0))
    steps = two.worker.last_step_id
    for stream in streams:
        await stream.check()
    await Stream(two, "later").check()
    assert two.worker.last_step_id <= steps + 1
    assert [replica.number for replica in two.engine.replicas] == [1]
    state = await two.operate(lambda client: client.get_state())
    assert [worker.replica for worker in state.workers] == [1]
    for number in (0, 1, 7):
        with pytest.raises(StepwireError, match="cannot be drained"):
            await two.operate(lambda client, number=number: client.drain_replica(number))


async def test_a_replica_that_is_added_serves() -> None:
    async with running_scheduler(admin_key=ADMIN_KEY) as one:
        server = FakeWorkerServer(FakeWorker(choices=letter_ids(one.tokenizer)))
        await server.start()
        try:
            number = await one.operate(lambda client: client.add_replica([server.address]))
            assert number == 1
            with pytest.raises(StepwireError, match="serve already"):
                await one.operate(lambda client: client.add_replica([server.address]))
            await one.operate(lambda client: client.drain_replica(0))
            await Stream(one, "abc").check()
            assert server.worker.last_step_id > NUM_TOKENS / 2
        finally:
            await server.kill()


@pytest.mark.parametrize("addresses", [[], ["nowhere"], ["host:0"], ["host:99999"], ["a:1", "a:1"], ["x" * 600 + ":1"]])
async def test_addresses_that_are_none_are_refused(two: RunningScheduler, addresses: list[str]) -> None:
    with pytest.raises(StepwireError) as caught:
        await two.operate(lambda client: client.add_replica(addresses))
    assert caught.value.reason == "FIELD_INVALID"
    assert len(two.engine.replicas) == 2


async def test_requests_that_begin_alike_share_a_replicas_cache(two: RunningScheduler) -> None:
    beginnings = ["The first long beginning of many. " * 6, "Another beginning, as long as that. " * 6]
    for i in range(12):
        await two.generate(text=beginnings[i % 2] + f"question {i}", sampling={"max_tokens": 2})
    stats = [replica.scheduler.stats for replica in two.engine.replicas]
    found = sum(each.prefix_hit_tokens for each in stats) / sum(each.prefix_query_tokens for each in stats)
    assert found > 0.7


async def test_an_idle_replica_goes_on_where_timers_come_early(
    two: RunningScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    later = loop.call_later
    monkeypatch.setattr(loop, "call_later", lambda delay, *rest, **how: later(max(0.0, delay - 0.002), *rest, **how))
    monkeypatch.setattr("scheduler_service.engine.loop._STALLED_AFTER_S", 1.2)
    await asyncio.sleep(2.5)
    assert [replica.is_healthy for replica in two.engine.replicas] == [True, True]
