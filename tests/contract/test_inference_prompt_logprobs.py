"""Prompt log-probabilities over real gRPC, with a fake worker that checks every step."""

import asyncio
from typing import Any

import pytest

from stepwire.client import AsyncClient, PromptLogprobs
from stepwire.v1 import inference_pb2 as pb
from tests.support.fake_worker import expected_scores, expected_tokens, letter_ids
from tests.support.scheduler_server import running_scheduler, tokens_of, until

PROMPT = list(range(10, 160))


def request(prompt: list[int], **sampling: Any) -> dict[str, Any]:
    return {"token_ids": pb.TokenIds(ids=prompt), "sampling": pb.SamplingParams(seed=5, **sampling)}


def scores_of(responses: list[pb.GenerateResponse]) -> list[float]:
    """All prompt log-probabilities, which must come in order and before any output."""
    parts = [response.prompt_logprobs for response in responses if response.HasField("prompt_logprobs")]
    kinds = [response.WhichOneof("event") for response in responses]
    assert kinds[1 : 1 + len(parts)] == ["prompt_logprobs"] * len(parts)
    scores: list[float] = []
    for part in parts:
        assert part.position == len(scores) + 1
        scores += part.logprobs
    return scores


async def test_each_position_comes_once_and_before_the_first_output() -> None:
    async with running_scheduler() as scheduler:
        for _ in range(2):  # The second time the prefix cache holds the prompt.
            responses = await scheduler.generate(**request(PROMPT, prompt_logprobs=2, max_tokens=5, n=4))
            assert scores_of(responses) == expected_scores(PROMPT)
            for index in range(4):
                tokens = expected_tokens(PROMPT, 5, letter_ids(scheduler.tokenizer), seed=5, index=index)
                assert tokens_of(responses, index) == tokens
            assert responses[-1].finished.usage.cached_token_count == 0
        plain = await scheduler.generate(**request(PROMPT, max_tokens=5))
        assert plain[-1].finished.usage.cached_token_count == 144
        assert not any(response.HasField("prompt_logprobs") for response in plain)


async def test_a_prompt_of_one_token_has_none() -> None:
    async with running_scheduler() as scheduler:
        responses = await scheduler.generate(**request([7], prompt_logprobs=2, max_tokens=3, n=2))
        assert scores_of(responses) == []
        assert len(tokens_of(responses, 1)) == 3


@pytest.mark.parametrize("chunk", [64, 16])
async def test_preempted_and_crowded_prompts_are_told_of_once(chunk: int) -> None:
    # 20 blocks: prompts wait for each other and are preempted; a resumed one may take several chunks to get to where
    # it had been told of.
    async with running_scheduler(num_blocks=20, max_model_len=256, max_step_tokens=chunk) as scheduler:

        async def one(i: int) -> None:
            prompt = [10 + (i * 3 + j) % 200 for j in range(2 + 9 * i)]
            fields = request(prompt, prompt_logprobs=i % 3, max_tokens=40, n=1 + i % 2)
            responses = await scheduler.generate(timeout=60, priority=i % 5, **fields)
            assert scores_of(responses) == expected_scores(prompt)
            assert tokens_of(responses) == expected_tokens(prompt, 40, letter_ids(scheduler.tokenizer), seed=5)

        await asyncio.gather(*(one(i) for i in range(16)))
        assert any(step.preempted_sequence_ids for step in scheduler.worker.steps)
        await until(lambda: scheduler.free_blocks() == 20)


async def test_with_best_of_they_come_first() -> None:
    async with running_scheduler() as scheduler:
        responses = await scheduler.generate(**request(PROMPT, prompt_logprobs=1, best_of=3, max_tokens=5))
        assert scores_of(responses) == expected_scores(PROMPT)
        assert len(tokens_of(responses)) == 5


async def test_the_client_makes_values_of_them() -> None:
    async with running_scheduler() as scheduler, AsyncClient(scheduler.address) as client:
        completion = await client.complete(PROMPT, prompt_logprobs=2, max_tokens=3, seed=5)
        assert [entry.sampled.token_id for entry in completion.prompt_logprobs] == PROMPT[1:]
        assert [entry.sampled.logprob for entry in completion.prompt_logprobs] == expected_scores(PROMPT)
        letters = letter_ids(scheduler.tokenizer)[:2]
        assert all([top.token_id for top in entry.top] == letters for entry in completion.prompt_logprobs)
        events = [event async for event in client.generate(PROMPT, prompt_logprobs=0, max_tokens=1)]
        parts = [event for event in events if isinstance(event, PromptLogprobs)]
        assert sum(len(part.logprobs) for part in parts) == len(PROMPT) - 1
        assert not any(entry.top for part in parts for entry in part.logprobs)
