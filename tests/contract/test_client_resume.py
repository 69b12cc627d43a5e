"""Requests that go on from what a client holds: what the service checks, and that no position or text is lost."""

import asyncio
from typing import Any

import pytest

from scheduler_service.engine.engine import EngineState
from stepwire.client import AsyncClient, Client, Completion, Finished, Output, Started, StepwireError
from stepwire.v1 import inference_pb2 as pb
from tests.support.scheduler_server import RunningScheduler, running_scheduler, text_of, tokens_of, until

NUM = 40


def sampling(**fields: Any) -> pb.SamplingParams:
    return pb.SamplingParams(**{"max_tokens": NUM, "ignore_eos": True, "seed": 5, **fields})


def lists(*priors: list[int]) -> list[pb.TokenIds]:
    return [pb.TokenIds(ids=prior) for prior in priors]


async def test_output_goes_on_with_positions_and_text_at_every_seam() -> None:
    async with running_scheduler() as scheduler:
        whole = await scheduler.generate(text="hello", sampling=sampling())
        # Every token is one letter.
        tokens, text = tokens_of(whole), text_of(whole)
        assert len(text) == NUM
        for held in range(NUM + 1):
            rest = await scheduler.generate(
                text="hello", sampling=sampling(), prior_output_token_ids=lists(tokens[:held])
            )
            assert tokens_of(rest) == tokens[held:]
            assert text_of(rest) == text[held:]
            outputs = [r.output for r in rest if r.HasField("output")]
            positions = [o.position + i for o in outputs for i in range(len(o.token_ids))]
            assert positions == list(range(held, NUM))
            assert rest[-1].finished.usage.output_token_count == NUM
            assert rest[0].started.seed == 5


async def test_characters_and_stop_strings_that_lie_across_the_seam_are_whole() -> None:
    async with running_scheduler() as scheduler:
        # So slow that each token has a message of its own.
        scheduler.worker.step_delay_s = 0.003
        script = scheduler.tokenizer.encode("ab é 漢 stop here").ids
        for stop in ([], ["stop h"], ["漢 s"]):
            params = sampling(max_tokens=len(script), stop=stop)
            scheduler.worker.scripts["whole"] = script
            whole = await scheduler.generate(text="x", request_id="whole", sampling=params)
            texts = [
                (r.output.position + len(r.output.token_ids), r.output.text) for r in whole if r.HasField("output")
            ]
            for held in range(len(tokens_of(whole)) + 1):
                scheduler.worker.scripts["rest"] = script
                rest = await scheduler.generate(
                    text="x",
                    request_id="rest",
                    sampling=params,
                    prior_output_token_ids=lists(tokens_of(whole)[:held]),
                )
                assert text_of(rest) == "".join(text for end, text in texts if end > held)


async def test_of_several_sequences_those_that_ended_do_not_come_again() -> None:
    async with running_scheduler() as scheduler:
        whole = await scheduler.generate(text="hello", sampling=sampling(n=3))
        held = [tokens_of(whole, 0)[:10], tokens_of(whole, 1), []]
        rest = await scheduler.generate(text="hello", sampling=sampling(n=3), prior_output_token_ids=lists(*held))
        assert [tokens_of(rest, index) for index in range(3)] == [
            tokens_of(whole, 0)[10:],
            [],
            tokens_of(whole, 2),
        ]
        assert rest[-1].finished.usage.output_token_count == 3 * NUM
        await until(lambda: scheduler.engine.model_info().num_running == 0)


@pytest.mark.parametrize(
    ("priors", "fields", "reason", "words"),
    [
        ([[5], [5]], {}, "FIELD_INVALID", "2 lists and n is 1"),
        ([[5]] * 100, {}, "FIELD_INVALID", "65 lists"),
        ([[5] * (NUM + 1)], {}, "FIELD_OUT_OF_RANGE", "max_tokens"),
        ([[320]], {}, "TOKEN_ID_OUT_OF_VOCABULARY", "320"),
        ([[-1]], {}, "TOKEN_ID_OUT_OF_VOCABULARY", "-1"),
        ([[5]], {"seed": None}, "FIELD_INVALID", "seed"),
        ([[5]], {"best_of": 2}, "FIELD_INVALID", "best_of"),
        ([[5]], {"prompt_logprobs": 1}, "FIELD_INVALID", "prompt_logprobs"),
        ([[5, 6]], {"stop_token_ids": [5]}, "FIELD_INVALID", "after token 1"),
    ],
)
async def test_what_cannot_be_gone_on_from_is_refused(
    priors: list[list[int]], fields: dict[str, Any], reason: str, words: str
) -> None:
    async with running_scheduler() as scheduler:
        error = await scheduler.error_of(text="x", sampling=sampling(**fields), prior_output_token_ids=lists(*priors))
        assert (error.reason, error.metadata["field"]) == (reason, "prior_output_token_ids")
        assert words in error.message


class Interrupted:
    """A scheduler whose streams break now and then, as when its process is lost."""

    def __init__(self, scheduler: RunningScheduler) -> None:
        self._scheduler = scheduler
        self.num_breaks = 0

    async def break_streams(self, num: int, reason: str = "DRAINING") -> None:
        engine = self._scheduler.engine
        for _ in range(num):
            seen = len(self._scheduler.worker.steps)
            await until(lambda seen=seen: len(self._scheduler.worker.steps) > seen + 6)
            engine._state = EngineState.DRAINING
            engine.replicas.end_all(StepwireError(reason, "the service is lost", retry_after_s=0.05))
            await asyncio.sleep(0.15)
            engine._state = EngineState.READY
            self.num_breaks += 1


@pytest.mark.parametrize("n", [1, 3])
async def test_an_async_client_goes_on_after_each_loss(n: int) -> None:
    async with running_scheduler() as scheduler, AsyncClient(scheduler.address) as client:
        keywords: Any = {"max_tokens": NUM, "ignore_eos": True, "n": n, "logprobs": 1, "stop": ["zzzz"]}
        whole = await client.complete("hello", seed=3, **keywords)
        scheduler.worker.step_delay_s = 0.005
        interrupted = Interrupted(scheduler)
        breaking = asyncio.create_task(interrupted.break_streams(2))
        events = [event async for event in client.generate("hello", seed=3, **keywords)]
        await breaking
        assert [type(event) for event in events if not isinstance(event, Output)] == [Started, Finished]
        for index in range(n):
            outputs = [e for e in events if isinstance(e, Output) and e.sequence_index == index]
            assert [p for output in outputs for p in output.positions] == list(range(NUM))
            assert tuple(t for output in outputs for t in output.token_ids) == whole.sequences[index].token_ids
            assert "".join(output.text for output in outputs) == whole.sequences[index].text
            assert tuple(entry for o in outputs for entry in o.logprobs) == whole.sequences[index].logprobs
        assert isinstance(events[-1], Finished)
        assert events[-1].usage.num_output_tokens == whole.usage.num_output_tokens


async def test_a_sync_client_goes_on_with_a_seed_that_the_service_drew() -> None:
    async with running_scheduler() as scheduler:
        scheduler.worker.step_delay_s = 0.005

        def complete() -> Completion:
            with Client(scheduler.address) as client:
                return client.complete("hello", max_tokens=NUM, ignore_eos=True)

        task = asyncio.create_task(asyncio.to_thread(complete))
        await Interrupted(scheduler).break_streams(2)
        disturbed = await task
        with Client(scheduler.address) as client:
            again = await asyncio.to_thread(
                client.complete, "hello", max_tokens=NUM, ignore_eos=True, seed=disturbed.seed
            )
        assert disturbed.sequences == again.sequences


@pytest.mark.parametrize("fields", [{"best_of": 2}, {"prompt_logprobs": 1}])
async def test_what_cannot_go_on_fails_at_once(fields: dict[str, Any]) -> None:
    async with running_scheduler() as scheduler, AsyncClient(scheduler.address) as client:
        scheduler.worker.step_delay_s = 0.005
        breaking = asyncio.create_task(Interrupted(scheduler).break_streams(1))
        with pytest.raises(StepwireError, match="the service is lost"):
            await client.complete("hello", max_tokens=NUM, ignore_eos=True, **fields)
        await breaking


async def test_a_service_that_stays_away_is_given_up_with_the_first_error() -> None:
    async with running_scheduler() as scheduler, AsyncClient(scheduler.address, resume_s=0.5) as client:
        scheduler.worker.step_delay_s = 0.005
        stream = client.generate("hello", max_tokens=NUM, ignore_eos=True)
        await anext(stream)
        scheduler.engine._state = EngineState.DRAINING
        scheduler.engine.replicas.end_all(StepwireError("DRAINING", "the first error", retry_after_s=0.05))
        with pytest.raises(StepwireError, match="the first error"):
            [event async for event in stream]


async def test_a_request_that_had_not_begun_and_one_without_retry_fail_at_once() -> None:
    async with running_scheduler() as scheduler, AsyncClient(scheduler.address) as client:
        scheduler.worker.step_delay_s = 0.005
        stream = client.generate("hello", max_tokens=NUM, ignore_eos=True)
        await anext(stream)
        scheduler.engine.replicas.end_all(StepwireError("WORKER_FAILED", "for good"))
        with pytest.raises(StepwireError, match="for good"):
            [event async for event in stream]
        scheduler.engine._state = EngineState.DRAINING
        with pytest.raises(StepwireError) as caught:
            await client.complete("hello")
        assert caught.value.reason == "DRAINING"
