"""What a replay brings to a worker before its steps, over real gRPC."""

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from scheduler_service.engine.start import GroupStarter
from scheduler_service.rpc.replay import ReplayPlan, prepare, replay
from scheduler_service.rpc.worker_client import WorkerClient
from stepwire.grammars import grammar_key
from stepwire.rpc.errors import StepwireError
from stepwire.telemetry.trace import get_tracer
from stepwire.v1 import flight_pb2 as pb
from stepwire.v1 import worker_pb2
from tests.support.fake_worker import FakeWorker, FakeWorkerServer, letter_ids
from tests.support.scheduler_server import start_plan
from tests.support.tiny_checkpoint import tiny_tokenizer

# What the fake worker calls an adapter with the content "warm".
FINGERPRINT = hashlib.sha256(b"warm").hexdigest()
GRAMMAR = '{"grammars": [{"json_schema": {}}]}'


@asynccontextmanager
async def worker(**facts: Any) -> AsyncIterator[tuple[FakeWorker, WorkerClient, int]]:
    """A fake worker that is ready, its client and its epoch."""
    server = FakeWorkerServer(FakeWorker(choices=letter_ids(tiny_tokenizer()), **facts))
    await server.start()
    client = WorkerClient(server.address, key=None, tracer=get_tracer(None))
    started = await GroupStarter([client], start_plan(), get_tracer(None)).start()
    yield server.worker, client, started.epoch
    await client.close()
    await server.kill()


def recorded(path: str = "/adapters/warm", grammar: str = GRAMMAR) -> pb.FlightRecording:
    """One step of a sequence with an adapter and a grammar."""
    new = worker_pb2.NewSequence(
        sequence_id=1,
        token_ids=[1, 2],
        prompt_token_count=2,
        block_ids=[5],
        adapter=FINGERPRINT,
        grammar_key=grammar_key(GRAMMAR),
        sampling=worker_pb2.SequenceSampling(temperature=1.0, top_p=1.0, typical_p=1.0, repetition_penalty=1.0),
    )
    columns = {name: [0] for name in ("computed_token_counts", "new_block_counts")}
    step = worker_pb2.Step(step_id=9, new_sequences=[new], sequence_ids=[1], scheduled_token_counts=[2], **columns)
    return pb.FlightRecording(
        header=pb.FlightHeader(block_size=4, max_step_token_count=16),
        steps=[pb.FlightStep(step=step)],
        adapters=[pb.FlightAdapter(fingerprint=FINGERPRINT, name="warm", path=path, rank=4)] if path else [],
        grammars=[pb.FlightGrammar(grammar_key=grammar_key(GRAMMAR), grammar=grammar)] if grammar else [],
    )


@pytest.mark.parametrize(("place", "given"), [("/adapters/warm", []), ("/elsewhere", ["/other", "/elsewhere"])])
async def test_adapters_and_grammars_are_there_before_the_steps(place: str, given: list[str]) -> None:
    contents = {place: "warm", "/other": "another"}
    async with worker(adapter_contents=contents) as (fake, client, epoch):
        plan = ReplayPlan(recorded())
        await prepare(client, epoch, plan, given)
        report = await replay(client, epoch, plan)
        assert FINGERPRINT in fake.adapters and list(fake.grammars) == [grammar_key(GRAMMAR)]
        assert (report.num_steps, report.num_left_out) == (1, 0)


@pytest.mark.parametrize(
    ("path", "contents", "told"),
    [
        ("/adapters/warm", {}, "'warm' .* which is not at /adapters/warm any more .*--adapter"),
        ("/adapters/warm", {"/adapters/warm": "another"}, "which is not at /adapters/warm any more .*another adapter"),
        ("", {}, f"{FINGERPRINT}, and does not say where it lay: .*--adapter"),
    ],
)
async def test_an_adapter_that_is_not_at_hand_is_named(path: str, contents: dict[str, str], told: str) -> None:
    async with worker(adapter_contents=contents) as (_, client, epoch):
        with pytest.raises(StepwireError, match=told) as caught:
            await prepare(client, epoch, ReplayPlan(recorded(path)), [])
        assert caught.value.reason == "ADAPTER_NOT_FOUND"


def test_a_sequence_whose_grammar_is_not_known_is_left_out() -> None:
    plan = ReplayPlan(recorded(grammar=""))
    assert plan.num_left_out == 1 and not plan.steps[0].step.sequence_ids


def test_a_grammar_under_another_ones_key_is_refused() -> None:
    with pytest.raises(StepwireError, match="has another text"):
        ReplayPlan(recorded(grammar="{}"))
