"""Greedy answers of a running server against transformers, on the demo model in float32."""

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from stepwire.client import AsyncClient, Completion, Message
from stepwire.telemetry import names
from stepwire.traces import Trace
from tests.support.collector import Collector
from tests.support.reference import Reference
from tests.support.stack import Server, serve

# Minutes on a busy machine.
pytestmark = pytest.mark.timeout(600)

MODEL = "SmolLM2-135M-Instruct.Q4_1"
NUM_TOKENS = 64
SMALL_STEP = 48
SMALL_CACHE_BLOCKS = 40
BLOCK_SIZE = 16


async def ask_all(server: Server, questions: Sequence[str], run: str) -> list[Completion]:
    """All questions at once."""
    async with AsyncClient(server.target) as client:
        return await asyncio.gather(
            *(
                client.complete(
                    [Message("user", question)],
                    temperature=0.0,
                    max_tokens=NUM_TOKENS,
                    ignore_eos=True,
                    request_id=f"{run}-{number}",
                    timeout=150,
                )
                for number, question in enumerate(questions)
            )
        )


async def prompts_of(server: Server, questions: Sequence[str]) -> list[tuple[int, ...]]:
    async with AsyncClient(server.target) as client:
        return await asyncio.gather(*(client.tokenize([Message("user", question)]) for question in questions))


@pytest.fixture(scope="module")
def small_server(demo_model: Path, collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """So few blocks that not even half of the requests fit, and steps smaller than most prompts."""
    flags = [
        f"--max-num-batched-tokens={SMALL_STEP}",
        f"--num-kv-blocks={SMALL_CACHE_BLOCKS}",
        f"--max-model-len={SMALL_CACHE_BLOCKS * BLOCK_SIZE}",
        "--max-num-seqs=16",
        "--dtype=float32",
        f"--otlp-endpoint={collector.endpoint}",
    ]
    with serve(demo_model, tmp_path_factory.mktemp("small"), *flags) as server:
        yield server
        server.wait_idle()


@pytest.fixture(scope="module")
def answers(demo: Server, questions: Sequence[str]) -> list[Completion]:
    return asyncio.run(ask_all(demo, questions, "greedy"))


async def test_all_tokens_equal_those_of_transformers(
    demo: Server, questions: list[str], answers: list[Completion], reference: Reference
) -> None:
    prompts = await prompts_of(demo, questions)
    assert len(questions) == 20
    lengths = {len(prompt) for prompt in prompts}
    assert len(lengths) > 10
    assert max(lengths) > 4 * min(lengths)
    for question, prompt, answer in zip(questions, prompts, answers, strict=True):
        assert answer.usage.num_prompt_tokens == len(prompt)
        assert len(answer.token_ids) == NUM_TOKENS
        logits = reference.logits(prompt, answer.token_ids)
        expected = tuple(logits.argmax(dim=-1).tolist())
        assert answer.token_ids == expected, f"{question!r}: {first_difference(answer.token_ids, logits)}"


def first_difference(token_ids: Sequence[int], logits: torch.Tensor) -> str:
    """Where tokens leave the reference, and how near a tie the reference was there."""
    position = next(i for i, token_id in enumerate(token_ids) if token_id != int(logits[i].argmax()))
    top = logits[position].topk(2)
    margin = float(top.values[0] - top.values[1])
    return f"position {position} holds {token_ids[position]}, not {int(top.indices[0])} (by {margin:.6f})"


async def test_a_cache_that_is_too_small_changes_no_token(
    small_server: Server, collector: Collector, questions: list[str], answers: list[Completion]
) -> None:
    again = await ask_all(small_server, questions, "small")
    assert [answer.token_ids for answer in again] == [answer.token_ids for answer in answers]
    assert [answer.text for answer in again] == [answer.text for answer in answers]
    traces = [collector.wait_for(answer.request_id, is_finished) for answer in again]
    assert_chunked(traces, again)
    assert_waited(again)
    assert_preempted(traces)


def is_finished(trace: Trace) -> bool:
    return any(span.name == names.request_span_name(names.OPERATION_CHAT, MODEL) for span in trace.spans)


def assert_chunked(traces: Sequence[Trace], answers: Sequence[Completion]) -> None:
    """Prompts longer than a step took several."""
    for trace, answer in zip(traces, answers, strict=True):
        if answer.usage.num_prompt_tokens > SMALL_STEP + answer.usage.num_cached_tokens:
            assert sum(span.name == names.SPAN_WORKER_PREFILL for span in trace.spans) > 1


def assert_waited(answers: Sequence[Completion]) -> None:
    """Some requests began only when others had ended: the last queued longest, by far."""
    queued = sorted(answer.queue_s for answer in answers)
    assert queued[-1] > 10 * queued[0]


def assert_preempted(traces: Sequence[Trace]) -> None:
    """Sequences lost their blocks, and each of them came back unless an answer in flight was its last token."""
    counts = [
        (
            sum(event.name == names.EVENT_PREEMPTED for span in trace.spans for event in span.events),
            sum(event.name == names.EVENT_RESUMED for span in trace.spans for event in span.events),
        )
        for trace in traces
    ]
    assert sum(resumed for _, resumed in counts) > 0
    assert all(resumed <= preempted <= resumed + 1 for preempted, resumed in counts)
