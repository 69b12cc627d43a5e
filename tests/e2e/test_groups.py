"""Groups of ranks as they are served: `stepwire serve --tp --pp`, real processes, greedy and in float32."""

import asyncio
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from stepwire.client import AsyncClient, Completion
from tests.support.processes import run
from tests.support.stack import MARK_VARIABLE, Server, marked, processes_of, serve, tiny_limits
from tests.support.tiny_checkpoint import make_tiny_llama

pytestmark = pytest.mark.timeout(300)

NUM_TOKENS = 40 if os.environ.get("STEPWIRE_TEST_FULL") else 12
SIZES = ("--max-model-len=1024", "--num-kv-blocks=768", "--max-num-seqs=24", "--max-num-batched-tokens=512")


def prompts(seed: int = 3) -> list[list[int]]:
    """Of all lengths, some longer than a step; those of one half begin alike."""
    rng = random.Random(seed)
    shared = [rng.randrange(3, 300) for _ in range(70)]
    alone = [[rng.randrange(3, 300) for _ in range(length)] for length in (1, 17, 40, 90, 120)]
    return alone + [[*shared, *(rng.randrange(3, 300) for _ in range(length))] for length in (1, 9, 30, 50, 80)]


# One of each thing that a request may ask of the sampler, with the prompt that it is asked for.
SPECIAL: list[dict[str, Any]] = [
    {"temperature": 1.0, "seed": 5, "n": 2, "top_p": 0.9},
    {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "logprobs": 2},
    {"temperature": 0.0, "prompt_logprobs": 1},
    {"temperature": 0.0, "max_draft_tokens": 4},
    {"temperature": 0.8, "seed": 6, "max_draft_tokens": 3, "repetition_penalty": 1.1},
    {"temperature": 0.0, "regex": "[a-e]{30,40}"},
    {"temperature": 1.0, "seed": 7, "json_object": True},
    {"temperature": 1.0, "seed": 8, "regex": "[a-z]{10,60}", "n": 2, "best_of": 4},
    {"temperature": 0.0, "regex": "([a-e]{4} ){20}", "max_draft_tokens": 4, "logprobs": 1},
    {"temperature": 0.0, "banned_token_ids": [5, 6, 7], "logit_bias": {9: 2.0}, "min_tokens": 8},
]


async def ask_special(server: Server) -> list[Completion]:
    """All of them at once, on a prompt that repeats itself."""
    prompt = [5, 9, 14, 30, 31, 32, 5, 9, 14, 30, 31, 32, 5, 9, 14, 30]
    async with AsyncClient(server.target) as client:
        return await asyncio.gather(
            *(client.complete(prompt, max_tokens=NUM_TOKENS, timeout=120, **keywords) for keywords in SPECIAL)
        )


async def continue_all(server: Server, inputs: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    async with AsyncClient(server.target) as client:
        done = await asyncio.gather(
            *(
                client.complete(token_ids, temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, timeout=120)
                for token_ids in inputs
            )
        )
    return [completion.sequences[0].token_ids for completion in done]


def served(model: Path, folder: Path, *flags: str) -> tuple[list[tuple[int, ...]], list[Completion]]:
    """What a server with few KV blocks, so that sequences are preempted, makes of all prompts at once."""
    with serve(model, folder, "--dtype=float32", *tiny_limits(256, 28), *flags) as server:
        return asyncio.run(continue_all(server, prompts())), asyncio.run(ask_special(server))


def assert_same(ours: Completion, theirs: Completion) -> None:
    """The same tokens; log-probabilities as near as sums in another order are."""
    assert [s.token_ids for s in ours.sequences] == [s.token_ids for s in theirs.sequences]
    for mine, other in zip(ours.sequences, theirs.sequences, strict=True):
        values = [entry.sampled.logprob for entry in mine.logprobs]
        assert values == pytest.approx([entry.sampled.logprob for entry in other.logprobs], abs=1e-4)
    scores = [entry.sampled.logprob for entry in ours.prompt_logprobs]
    assert scores == pytest.approx([entry.sampled.logprob for entry in theirs.prompt_logprobs], abs=1e-4)


def test_two_by_two_ranks_say_what_one_says(tmp_path: Path) -> None:
    """With a vocabulary that must be padded, in chunks, with shared prefixes and preemption.

    DeepSpeed-MII #424, #185: with two ranks the first request ended the service.
    """
    model = make_tiny_llama(tmp_path / "model", num_layers=3, vocab_size=321, tie=True)
    alone, special = served(model, tmp_path / "alone")
    assert all(len(output) == NUM_TOKENS for output in alone)
    outputs, answers = served(model, tmp_path / "group", "--tp", "2", "--pp", "2")
    assert outputs == alone
    for answer, expected in zip(answers, special, strict=True):
        assert_same(answer, expected)
    logs = sorted(path.name.partition(".")[0] for path in (tmp_path / "group").glob("worker-*.log"))
    assert logs == ["worker-0", "worker-1", "worker-2", "worker-3"]


@pytest.mark.parametrize("sizes", [("--tp", "3"), ("--pp", "2")])
def test_the_demo_model_says_the_same_in_parts(
    demo: Server, demo_model: Path, tmp_path: Path, sizes: tuple[str, str]
) -> None:
    alone = asyncio.run(continue_all(demo, prompts()))
    with serve(demo_model, tmp_path, "--dtype=float32", *SIZES, *sizes) as server:
        assert asyncio.run(continue_all(server, prompts())) == alone


@pytest.mark.parametrize(
    ("flags", "texts"),
    [
        (("--tp", "2"), ("number of heads, 9", "use one of tp 1, 3")),
        (("--pp", "31"), ("30 layers",)),
    ],
)
def test_what_cannot_be_split_is_refused_before_anything_starts(
    demo_model: Path, tmp_path: Path, flags: tuple[str, str], texts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vllm #596, #2652: numbers of heads that ranks do not divide failed in the workers, after they were started."""
    with marked() as mark:
        monkeypatch.setenv(MARK_VARIABLE, mark)
        done = run("serve", "--model", str(demo_model), "--log-dir", str(tmp_path), *flags)
        assert not processes_of(mark)
    assert done.returncode == 1
    assert all(text in done.stderr for text in texts), done.stderr
    assert not list(tmp_path.glob("*.log"))
