"""PrepareGrammar over gRPC, and steps with grammars."""

import asyncio
import threading

import grpc
import pytest

from stepwire.grammars import MAX_GRAMMAR_BYTES, MAX_LIVE_GRAMMARS, grammar_key
from stepwire.rpc.errors import StepwireError, from_rpc_error
from stepwire.v1 import worker_pb2 as pb
from tests.support.fake_runtime import FakeRuntime
from tests.support.worker_server import RunningWorker, first_step, new_sequence, running_worker
from worker_service.runtime.errors import RuntimeFailure

TEXT = 'start: "a"'
KEY = grammar_key(TEXT)


async def prepare(worker: RunningWorker, **changes: object) -> pb.PrepareGrammarResponse:
    fields = {"epoch": 1, "grammar_key": KEY, "grammar": TEXT, "live_grammar_keys": [KEY], "revision": 1, **changes}
    return await worker.stub.PrepareGrammar(pb.PrepareGrammarRequest(**fields), timeout=20)  # type: ignore[arg-type]


async def refusal(worker: RunningWorker, **changes: object) -> StepwireError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await prepare(worker, **changes)
    return from_rpc_error(caught.value)


async def test_a_grammar_is_prepared_once_and_a_repeat_is_answered() -> None:
    async with running_worker() as worker:
        await worker.walk_to_ready()
        first, again = await prepare(worker), await prepare(worker, revision=2)
        assert (first.already_held, again.already_held) == (False, True)
        assert first.duration_ns == 1000
        assert worker.runtime.grammars == {KEY: TEXT}


async def test_a_grammar_needs_a_model_and_the_workers_epoch() -> None:
    async with running_worker() as worker:
        await worker.init_device()
        assert (await refusal(worker)).reason == "WRONG_PHASE"
        await worker.load_model()
        await prepare(worker)
        assert (await refusal(worker, epoch=2)).reason == "STALE_EPOCH"


@pytest.mark.parametrize(
    ("changes", "reason", "field"),
    [
        ({"grammar": ""}, "FIELD_OUT_OF_RANGE", "grammar"),
        ({"grammar": "x" * (MAX_GRAMMAR_BYTES + 1)}, "FIELD_OUT_OF_RANGE", "grammar"),
        ({"grammar": "é" * (MAX_GRAMMAR_BYTES // 2 + 1)}, "FIELD_OUT_OF_RANGE", "grammar"),
        ({"grammar": TEXT + " "}, "FIELD_INVALID", "grammar_key"),
        ({"grammar_key": b""}, "FIELD_INVALID", "grammar_key"),
        ({"live_grammar_keys": [KEY] * (MAX_LIVE_GRAMMARS + 1)}, "FIELD_OUT_OF_RANGE", "live_grammar_keys"),
        ({"live_grammar_keys": [b"x"]}, "FIELD_INVALID", "live_grammar_keys"),
        ({"revision": -1}, "FIELD_OUT_OF_RANGE", "revision"),
    ],
)
async def test_what_cannot_be_is_refused(changes: dict[str, object], reason: str, field: str) -> None:
    async with running_worker() as worker:
        await worker.walk_to_ready()
        error = await refusal(worker, **changes)
        assert (error.reason, error.metadata["field"]) == (reason, field)
        assert not worker.runtime.grammars


@pytest.mark.parametrize(
    ("code", "reason"), [("grammar_invalid", "GRAMMAR_INVALID"), ("grammars_full", "GRAMMARS_FULL")]
)
async def test_what_the_runtime_says_of_a_grammar_reaches_the_caller(code: str, reason: str) -> None:
    runtime = FakeRuntime(failures={"prepare_grammar": RuntimeFailure(code, "it is so")})
    async with running_worker(runtime=runtime) as worker:
        await worker.walk_to_ready()
        error = await refusal(worker)
        assert (error.reason, error.message) == (reason, "it is so")
        assert not (await prepare(worker)).already_held


async def test_steps_go_on_while_a_grammar_compiles() -> None:
    runtime = FakeRuntime()
    async with running_worker(runtime=runtime) as worker:
        await worker.walk_to_ready()
        stream = await worker.open_stream()
        gate = runtime.gates["prepare_grammar"] = threading.Event()
        entered = runtime.entered["prepare_grammar"] = threading.Event()
        compiling = asyncio.create_task(prepare(worker))
        assert await asyncio.to_thread(entered.wait, 20)
        result = await stream.execute(first_step(1, new_sequence(1, [5, 6, 7])))
        assert list(result.sequence_ids) == [1] and not compiling.done()
        gate.set()
        assert not (await compiling).already_held


async def test_a_sequence_names_its_grammar_and_one_that_cannot_be_fails_alone() -> None:
    async with running_worker() as worker:
        await worker.walk_to_ready()
        stream = await worker.open_stream()
        good = new_sequence(1, [5, 6], grammar_key=KEY)
        bad = new_sequence(2, [5, 6], grammar_key=b"x")
        result = await stream.execute(first_step(1, good, bad))
        assert list(result.sequence_ids) == [1]
        assert [(error.sequence_id, "grammar_key" in error.message) for error in result.errors] == [(2, True)]
        assert worker.runtime.sequences[1].new.grammar_key == KEY
