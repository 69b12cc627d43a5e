"""AdminService over real gRPC: who may call it, and what GetState tells."""

from collections.abc import AsyncIterator

import pytest

from stepwire.client.types import ModelState
from stepwire.rpc.errors import StepwireError
from stepwire.v1 import inference_pb2 as pb
from tests.support.scheduler_server import ADMIN_KEY, MODEL, RunningScheduler, running_scheduler, until


@pytest.fixture
async def scheduler() -> AsyncIterator[RunningScheduler]:
    async with running_scheduler(admin_key=ADMIN_KEY) as running:
        yield running


async def test_the_state_of_a_server_that_serves(scheduler: RunningScheduler) -> None:
    scheduler.worker.gate.clear()
    call = scheduler.stub.Generate(pb.GenerateRequest(text="a"))
    await until(lambda: scheduler.engine.model_info().num_running == 1)
    state = await scheduler.operate(lambda client: client.get_state())
    call.cancel()
    assert (state.model.name, state.model.state, state.model.num_running) == (MODEL, ModelState.READY, 1)
    assert (state.epoch, state.num_calls) == (1, 1)
    (worker,) = state.workers
    assert (worker.rank, worker.address) == (0, scheduler.worker_server.address)
    assert worker.host and worker.process_id > 0
    assert 0 <= worker.silent_s <= state.uptime_s


@pytest.mark.parametrize("key", ["", "wrong", f"{ADMIN_KEY} ", ADMIN_KEY[:-1]])
async def test_another_key_is_refused_and_the_door_of_clients_needs_none(scheduler: RunningScheduler, key: str) -> None:
    with pytest.raises(StepwireError) as caught:
        await scheduler.operate(lambda client: client.get_state(), key)
    assert caught.value.reason == "UNAUTHENTICATED"
    assert await scheduler.generate(text="a", sampling={"max_tokens": 1})


async def test_without_a_key_there_is_no_such_service() -> None:
    async with running_scheduler() as scheduler:
        with pytest.raises(StepwireError) as caught:
            await scheduler.operate(lambda client: client.get_state())
    assert caught.value.metadata["grpc_code"] == "UNIMPLEMENTED"
