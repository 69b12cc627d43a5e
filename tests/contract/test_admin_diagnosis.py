"""AdminService over real gRPC: profiles and flight recordings."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from scheduler_service.rpc.flight_file import read
from scheduler_service.rpc.replay import ReplayPlan
from stepwire.grammars import grammar_key
from stepwire.rpc.errors import StepwireError
from stepwire.v1 import flight_pb2
from stepwire.v1 import inference_pb2 as pb
from tests.support.scheduler_server import ADMIN_KEY, RunningScheduler, running_scheduler, tokens_of, until


@pytest.fixture
async def scheduler() -> AsyncIterator[RunningScheduler]:
    async with running_scheduler(admin_key=ADMIN_KEY) as running:
        yield running


async def test_a_profile_has_the_ranks_times_and_one_timeline(scheduler: RunningScheduler) -> None:
    asked = asyncio.create_task(scheduler.operate(lambda client: client.profile(5, wait_s=20)))
    await until(lambda: "StartProfile" in scheduler.worker.calls)
    await scheduler.generate(text="a", sampling={"max_tokens": 12})
    profile = await asked
    (rank,) = profile.ranks
    (row,) = rank.rows
    assert rank.num_steps == 2
    assert (row.part, row.operator, row.num_calls, row.cpu_s) == ("layer 0", "aten::mm", 3, 0.003)
    names = [event["name"] for event in json.loads(gzip.decompress(profile.timeline))["traceEvents"]]
    assert "aten::mm" in names
    assert sum(name.startswith("step ") for name in names) >= 5


async def test_without_steps_there_is_no_profile(scheduler: RunningScheduler) -> None:
    with pytest.raises(StepwireError, match="profile while requests run"):
        await scheduler.operate(lambda client: client.profile(5, wait_s=0.1))
    assert scheduler.worker.calls[-1] == "StopProfile"


@pytest.mark.parametrize(("num_steps", "wait_s"), [(0, 1.0), (201, 1.0), (-1, 1.0), (5, 0.0), (5, -1.0), (5, 601.0)])
async def test_numbers_are_bounded(scheduler: RunningScheduler, num_steps: int, wait_s: float) -> None:
    with pytest.raises(StepwireError) as caught:
        await scheduler.operate(lambda client: client.profile(num_steps, wait_s=wait_s))
    assert caught.value.reason == "FIELD_OUT_OF_RANGE"


async def test_one_profile_at_a_time(scheduler: RunningScheduler) -> None:
    first = asyncio.create_task(scheduler.operate(lambda client: client.profile(1, wait_s=20)))
    await until(lambda: "StartProfile" in scheduler.worker.calls)
    with pytest.raises(StepwireError, match="another profile goes on"):
        await scheduler.operate(lambda client: client.profile(1))
    await scheduler.generate(text="a", sampling={"max_tokens": 3})
    assert (await first).timeline


async def test_the_flight_recording_holds_the_last_steps(scheduler: RunningScheduler, tmp_path: Path) -> None:
    responses = await scheduler.generate(text="abc", sampling={"max_tokens": 9, "ignore_eos": True})
    path = tmp_path / "steps.flight"
    path.write_bytes(await scheduler.operate(lambda client: client.get_flight()))
    recording = read(path)
    assert (recording.header.epoch, recording.header.reason) == (1, "asked for")
    answered = [step.result for step in recording.steps if step.HasField("result")]
    assert [token_id for result in answered for token_id in result.token_ids] == tokens_of(responses)
    assert all(0 < step.sent_unix_ns <= step.answered_unix_ns for step in recording.steps)
    assert len([step for step in ReplayPlan(recording).steps if step.recorded]) == len(recording.steps)


async def test_a_recording_has_the_grammars_of_requests_that_have_ended(scheduler: RunningScheduler) -> None:
    form = pb.SamplingParams(max_tokens=3, structured_output=pb.StructuredOutput(regex="[a-z]+"))
    await scheduler.generate(text="a", sampling=form)
    data = await scheduler.operate(lambda client: client.get_flight())
    (entry,) = flight_pb2.FlightRecording.FromString(data).grammars
    assert entry.grammar_key == grammar_key(entry.grammar) and list(scheduler.worker.grammars) == [entry.grammar_key]


def recordings(folder: Path) -> list[Path]:
    return list(folder.glob("flight/*.flight"))


async def test_the_steps_before_a_failure_are_written_down(tmp_path: Path) -> None:
    async with running_scheduler(flight_dir=str(tmp_path / "flight")) as scheduler:
        scheduler.worker.failures["step 5"] = StepwireError("OUT_OF_MEMORY", "needs 3 bytes and has 2")
        call = asyncio.create_task(scheduler.generate(text="abc", sampling={"max_tokens": 9, "ignore_eos": True}))
        await until(lambda: recordings(tmp_path) != [])
        scheduler.worker.failures.clear()
        tokens = tokens_of(await call)
    (path,) = recordings(tmp_path)
    assert path.stat().st_mode & 0o077 == 0
    recording = read(path)
    assert recording.header.epoch == 1 and "needs 3 bytes and has 2" in recording.header.reason
    recorded = [t for step in recording.steps if step.HasField("result") for t in step.result.token_ids]
    assert recorded == tokens[: len(recorded)] and 0 < len(recorded) < 9
    assert [step.step.step_id for step in recording.steps][:5] == [1, 2, 3, 4, 5]
    assert not recording.steps[4].HasField("result")


def test_what_is_no_recording_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "steps.flight"
    for content in (b"", b"\xff" * 100, b"\x0a\x00"):
        path.write_bytes(content)
        with pytest.raises(StepwireError, match="is no flight recording"):
            read(path)
