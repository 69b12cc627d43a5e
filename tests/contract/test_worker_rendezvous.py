"""How the ranks of a group meet, and what one says that is not the output: a real service, a fake runtime."""

from collections.abc import Awaitable
from typing import Any

import grpc
import pytest

from stepwire.rpc.errors import StepwireError, from_rpc_error
from stepwire.v1 import worker_pb2 as pb
from tests.support.worker_server import RunningWorker, decode_step, first_step, new_sequence, running_worker
from worker_service.rpc.stream import ACKNOWLEDGE_EVERY
from worker_service.runtime.report import Meeting

FIRST = {"tensor_parallel_size": 2}
SECOND = {"tensor_rank": 1, "tensor_parallel_size": 2}


async def refused(call: Awaitable[Any]) -> StepwireError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_rpc_error(caught.value)


async def walk_on(worker: RunningWorker, epoch: int = 1) -> None:
    await worker.load_model(epoch)
    await worker.measure(epoch)
    await worker.initialize_cache(epoch)
    await worker.warm_up(epoch)


async def test_rank_0_says_where_and_then_comes_too() -> None:
    async with running_worker() as worker:
        where = (await worker.init_device(**FIRST)).rendezvous
        assert where
        assert (await worker.init_device(**FIRST)).rendezvous == where
        error = await refused(worker.measure())
        assert error.reason == "WRONG_PHASE"
        for _ in range(2):
            assert (await worker.init_device(rendezvous=where, **FIRST)).rendezvous == where
        assert worker.runtime.meetings == [Meeting(1), Meeting(1), Meeting(1, where)]
        await walk_on(worker)


async def test_no_rank_measures_before_its_group_has_met() -> None:
    async with running_worker() as worker:
        await worker.init_device(**FIRST)
        await worker.load_model()
        error = await refused(worker.measure())
        assert (error.reason, error.metadata["needed"]) == ("WRONG_PHASE", "rendezvous")
        assert "InitDevice" in error.message


async def test_other_ranks_have_their_devices_before_they_are_told_where() -> None:
    async with running_worker() as worker:
        await worker.init_device(**SECOND)
        error = await refused(worker.measure())
        assert error.reason == "WRONG_PHASE"
        assert (await worker.init_device(rendezvous="h:1", **SECOND)).rendezvous == "h:1"
        assert worker.runtime.meetings == [Meeting(1), Meeting(1, "h:1")]
        await walk_on(worker)


async def test_a_group_of_one_meets_nowhere() -> None:
    async with running_worker() as worker:
        error = await refused(worker.init_device(rendezvous="h:1"))
        assert (error.reason, error.metadata["field"]) == ("FIELD_INVALID", "rendezvous")


@pytest.mark.parametrize("to", [pb.PHASE_INITIALISED, pb.PHASE_LOADED, pb.PHASE_CACHED])
async def test_a_new_epoch_leaves_the_group_and_meets_again_with_what_is_held(to: int) -> None:
    async with running_worker() as worker:
        await worker.init_device(rendezvous="h:1", **SECOND)
        await walk_on(worker)
        assert worker.runtime.num_left == 0
        await worker.reset(2, to)
        assert worker.runtime.num_left == 1
        await worker.init_device(2, rendezvous="h:2", **SECOND)
        assert worker.runtime.meetings[-1] == Meeting(2, "h:2")
        assert (await worker.status()).phase == to
        error = await refused(worker.init_device(2, rendezvous="h:3", **SECOND))
        assert error.reason == "WRONG_PHASE"


@pytest.mark.parametrize("others_are_warm", [True, False])
async def test_a_rank_warms_up_again_when_another_one_has_to(*, others_are_warm: bool) -> None:
    async with running_worker() as worker:
        await worker.init_device(rendezvous="h:1", **SECOND)
        await walk_on(worker)
        await worker.reset(2, pb.PHASE_CACHED)
        await worker.init_device(2, rendezvous="h:2", **SECOND)
        worker.runtime.others_are_warm = others_are_warm
        await worker.warm_up(2)
        assert worker.runtime.calls.count("warm_up") == (1 if others_are_warm else 2)


async def test_another_place_gives_up_the_shard_that_is_held() -> None:
    async with running_worker() as worker:
        await worker.init_device(rendezvous="h:1", **SECOND)
        await walk_on(worker)
        await worker.reset(2, pb.PHASE_CACHED)
        await worker.init_device(2)
        status = await worker.status()
        assert (status.phase, status.fingerprint) == (pb.PHASE_INITIALISED, "")


async def test_only_the_output_rank_answers_with_tokens() -> None:
    async with running_worker() as worker:
        await worker.init_device(rendezvous="h:1", **SECOND)
        await walk_on(worker)
        stream = await worker.open_stream()
        await stream.send(first_step(1, new_sequence(1, [5, 6, 7])))
        # More than may be unanswered at once: those that are not acknowledged take no place.
        num_steps = 3 * ACKNOWLEDGE_EVERY
        for step_id in range(2, num_steps + 1):
            await stream.send(decode_step(step_id, {1: step_id + 1}))
        for step_id in range(ACKNOWLEDGE_EVERY, num_steps + 1, ACKNOWLEDGE_EVERY):
            answer = await stream.receive()
            assert (answer.epoch, answer.step_id, len(answer.token_ids)) == (1, step_id, 0)
        assert len(worker.runtime.executed) == num_steps


async def test_every_rank_answers_a_traced_step_with_its_timings() -> None:
    async with running_worker() as worker:
        await worker.init_device(rendezvous="h:1", **SECOND)
        await walk_on(worker)
        stream = await worker.open_stream()
        await stream.send(first_step(1, new_sequence(1, [5, 6, 7])))
        await stream.send(decode_step(2, {1: 3}))
        await stream.send(decode_step(3, {1: 4}, traced=True))
        answer = await stream.receive()
    timings = answer.timings
    assert (answer.step_id, len(answer.token_ids)) == (3, 0)
    assert timings.answered_unix_ns >= timings.start_unix_ns > 0
    assert timings.total_forward_ns > timings.forward_ns >= 0
