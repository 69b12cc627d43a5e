"""best_of over real gRPC, with a fake worker that checks every step."""

import asyncio
from typing import Any

import grpc
import pytest

from stepwire.v1 import inference_pb2 as pb
from tests.support.scheduler_server import RunningScheduler, last_output, running_scheduler, text_of, tokens_of, until

PROMPT = list(range(10, 50))


def request(**sampling: Any) -> dict[str, Any]:
    return {"token_ids": pb.TokenIds(ids=PROMPT), "sampling": pb.SamplingParams(seed=5, **sampling)}


async def ranked(scheduler: RunningScheduler, num: int, **sampling: Any) -> list[tuple[list[int], str, Any]]:
    """Tokens, text and last message of so many sequences, the greatest sum of log-probabilities first."""
    responses = await scheduler.generate(**request(n=num, logprobs=0, **sampling))
    scores = [0.0] * num
    for response in responses:
        scores[response.output.sequence_index] += sum(entry.sampled.logprob for entry in response.output.logprobs)
    order = sorted(range(num), key=lambda i: -scores[i])
    return [(tokens_of(responses, i), text_of(responses, i), last_output(responses, i)) for i in order]


@pytest.mark.parametrize("stop", [[], ["a", "b", "c", "d"]])
async def test_the_best_come_first_and_are_those_that_all_sequences_would_show(stop: list[str]) -> None:
    async with running_scheduler() as scheduler:
        best = (await ranked(scheduler, 9, max_tokens=30, stop=stop))[:3]
        responses = await scheduler.generate(**request(n=3, best_of=9, max_tokens=30, stop=stop))
        for place, (tokens, text, last) in enumerate(best):
            assert (tokens_of(responses, place), text_of(responses, place)) == (tokens, text)
            ours = last_output(responses, place)
            assert (ours.finish_reason, ours.stop) == (last.finish_reason, last.stop)
        assert not any(response.output.logprobs for response in responses)
        assert {r.output.sequence_index for r in responses} == {0, 1, 2}
        assert responses[-1].finished.usage.output_token_count == sum(len(tokens) for tokens, _, _ in best)
        await until(lambda: not scheduler.worker.sequences)


async def test_beaten_sequences_end_early() -> None:
    async with running_scheduler() as scheduler:
        num_steps = []
        for best_of in (None, 8):
            before = len(scheduler.worker.steps)
            await scheduler.generate(**request(n=8 if best_of is None else 1, best_of=best_of, stop=["a", "b", "c"]))
            await until(lambda: not scheduler.worker.sequences)
            steps = scheduler.worker.steps[before:]
            num_steps.append(sum(sum(step.scheduled_token_counts) for step in steps))
        assert num_steps[1] < num_steps[0]


async def test_log_probabilities_are_delivered_when_asked_for() -> None:
    async with running_scheduler() as scheduler:
        responses = await scheduler.generate(**request(best_of=4, logprobs=2, max_tokens=6))
        entries = [entry for response in responses for entry in response.output.logprobs]
        assert [entry.sampled.token_id for entry in entries] == tokens_of(responses)
        assert len(entries) == 6 and all(len(entry.top) == 2 for entry in entries)


async def test_nothing_is_delivered_before_all_sequences_have_ended() -> None:
    async with running_scheduler() as scheduler:
        call = scheduler.stub.Generate(pb.GenerateRequest(**request(best_of=4, max_tokens=8)), timeout=20)
        assert (await call.read()).HasField("started")
        scheduler.worker.gate.clear()
        first = asyncio.ensure_future(call.read())
        # The gate lets nothing through: what has been sampled until now is a part of the sequences.
        done, _ = await asyncio.wait([first], timeout=0.1)
        assert not done
        scheduler.worker.gate.set()
        assert len((await first).output.token_ids) == 8
        assert (await call.read()).HasField("finished")


async def test_equal_to_n_it_streams() -> None:
    async with running_scheduler() as scheduler:
        plain = await scheduler.generate(**request(n=2, max_tokens=9))
        same = await scheduler.generate(**request(n=2, best_of=2, max_tokens=9))
        assert [tokens_of(same, i) for i in range(2)] == [tokens_of(plain, i) for i in range(2)]
        assert sum(response.HasField("output") for response in same) > 2


async def test_preempted_sequences_are_judged_like_others() -> None:
    async with running_scheduler() as scheduler:
        expected = await ranked(scheduler, 8, max_tokens=60)
    async with running_scheduler(num_blocks=14, max_model_len=128) as scheduler:
        responses = await scheduler.generate(**request(n=2, best_of=8, max_tokens=60))
        assert [tokens_of(responses, i) for i in range(2)] == [tokens for tokens, _, _ in expected[:2]]
        assert any(step.preempted_sequence_ids for step in scheduler.worker.steps)
        await until(lambda: scheduler.free_blocks() == 14)


@pytest.mark.parametrize("how", ["cancel", "deadline"])
async def test_an_early_end_delivers_nothing_and_frees_everything(how: str) -> None:
    async with running_scheduler() as scheduler:
        free = scheduler.free_blocks()
        fields = pb.GenerateRequest(**request(best_of=8, max_tokens=400))
        call = scheduler.stub.Generate(fields, timeout=1.0 if how == "deadline" else 60)
        assert (await call.read()).HasField("started")
        await until(lambda: len(scheduler.worker.sequences) == 8)
        scheduler.worker.gate.clear()
        if how == "cancel":
            call.cancel()
        with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
            await call.read()
        await until(lambda: scheduler.free_blocks() == free)
        scheduler.worker.gate.set()
        await until(lambda: not scheduler.worker.sequences)
