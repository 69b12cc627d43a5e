"""Everything that one request can ask for, on the demo model in float32."""

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from loader.checkpoint import open_checkpoint
from loader.tokenizer import load_tokenizer
from stepwire.client import AsyncClient, Client, Completion, FinishReason, Message
from tests.support.reference import Reference
from tests.support.stack import Server

CAPITAL = [Message("user", "What is the capital of France?")]
STORY = "Once upon a time, in a small village by the sea, there lived"


@pytest.fixture
def client(demo: Server) -> Iterator[Client]:
    with demo.client() as client:
        yield client


@pytest.fixture(scope="module")
def pieces(demo_model: Path) -> "Pieces":
    return Pieces(demo_model)


class Pieces:
    """The texts of token ids by the model's own tokenizer."""

    def __init__(self, path: Path) -> None:
        self._tokenizer = load_tokenizer(open_checkpoint(path)).tokenizer

    def text(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def of(self, token_ids: Sequence[int]) -> list[str]:
        return [self.text([token_id]) for token_id in token_ids]


def greedy(client: Client, prompt: str | list[Message], max_tokens: int, **fields: object) -> Completion:
    return client.complete(prompt, temperature=0.0, max_tokens=max_tokens, timeout=120, **fields)  # type: ignore[arg-type]


def test_a_chat_answer_is_right_and_ends_by_itself(client: Client) -> None:
    answer = greedy(client, CAPITAL, 64)
    assert "Paris" in answer.text
    assert answer.finish_reason is FinishReason.STOP
    assert answer.sequences[0].stop_token_id in client.get_model().eos_token_ids
    assert "<|im_end|>" not in answer.text


def test_a_prompt_seen_before_is_found_in_the_prefix_cache(client: Client) -> None:
    prompt = "The quick brown fox jumps over the lazy dog, and the dog does not mind at all. " * 3
    first, again = (greedy(client, prompt, 4) for _ in range(2))
    block_size = client.get_model().block_size
    # All full blocks, but for the last token, which is computed to have something to sample from.
    expected = (first.usage.num_prompt_tokens - 1) // block_size * block_size
    assert (first.usage.num_cached_tokens, again.usage.num_cached_tokens) == (0, expected)
    assert again.token_ids == first.token_ids


async def test_three_seeded_sequences_repeat_whatever_runs_beside_them(demo: Server) -> None:
    async with AsyncClient(demo.target) as client:

        async def ask() -> Completion:
            return await client.complete(STORY, n=3, seed=7, temperature=1.0, max_tokens=12, timeout=120)

        async with asyncio.TaskGroup() as group:
            beside = group.create_task(client.complete("Beside", seed=1, max_tokens=40, ignore_eos=True, timeout=120))
            first = group.create_task(ask())
        again = await ask()
    assert len(beside.result().token_ids) == 40
    assert [sequence.index for sequence in again.sequences] == [0, 1, 2]
    assert again.sequences == first.result().sequences
    assert len({sequence.token_ids for sequence in again.sequences}) == 3
    assert again.usage.num_output_tokens == sum(len(sequence.token_ids) for sequence in again.sequences)


async def test_seeds_differ_unless_given(demo: Server) -> None:
    async with AsyncClient(demo.target) as client:
        answers = await asyncio.gather(*(client.complete(STORY, max_tokens=8, timeout=120) for _ in range(2)))
        assert answers[0].seed != answers[1].seed
        repeated = await client.complete(STORY, max_tokens=8, seed=answers[1].seed, timeout=120)
    assert repeated.token_ids == answers[1].token_ids


def test_a_stop_string_across_tokens_ends_the_text_before_it(client: Client, pieces: Pieces) -> None:
    whole = greedy(client, STORY, 32, ignore_eos=True)
    texts = pieces.of(whole.token_ids)
    assert "".join(texts) == whole.text
    index = next(i for i in range(4, 28) if len(texts[i]) > 2 and len(texts[i + 1]) > 2)
    stop = texts[index][-2:] + texts[index + 1][:2]
    cut = greedy(client, STORY, 32, ignore_eos=True, stop=[stop, "never in the text"])
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert (cut.finish_reason, cut.sequences[0].stop) == (FinishReason.STOP, stop)
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    assert cut.usage.num_output_tokens == len(cut.token_ids) <= index + 2


def test_a_stop_token_ends_the_sequence(client: Client) -> None:
    whole = greedy(client, STORY, 16, ignore_eos=True)
    stop_token_id = whole.token_ids[5]
    cut = greedy(client, STORY, 16, stop_token_ids=[stop_token_id])
    assert cut.token_ids == whole.token_ids[: whole.token_ids.index(stop_token_id) + 1]
    assert (cut.finish_reason, cut.sequences[0].stop_token_id) == (FinishReason.STOP, stop_token_id)


def test_logprobs_are_those_of_the_raw_logits(client: Client, reference: Reference) -> None:
    prompt = client.tokenize(STORY)
    answer = client.complete(STORY, logprobs=5, max_tokens=12, seed=11, temperature=0.8, repetition_penalty=1.3)
    expected = torch.log_softmax(reference.logits(prompt, answer.token_ids).double(), dim=-1)
    entries = answer.sequences[0].logprobs
    assert [entry.sampled.token_id for entry in entries] == list(answer.token_ids)
    for row, entry in zip(expected, entries, strict=True):
        values, ids = row.topk(5)
        assert entry.sampled.logprob == pytest.approx(float(row[entry.sampled.token_id]), abs=1e-3)
        assert [top.logprob for top in entry.top] == pytest.approx(values.tolist(), abs=1e-3)
        assert {top.token_id for top in entry.top} == set(ids.tolist())


def test_min_tokens_keeps_the_end_away(client: Client) -> None:
    short = greedy(client, CAPITAL, 64)
    eos_token_ids = set(client.get_model().eos_token_ids)
    wanted = len(short.token_ids) + 8
    longer = greedy(client, CAPITAL, 64, min_tokens=wanted)
    assert len(longer.token_ids) >= wanted
    assert eos_token_ids.isdisjoint(longer.token_ids[:wanted])
    assert longer.token_ids[: len(short.token_ids) - 1] == short.token_ids[:-1]


def test_ignore_eos_goes_on_to_the_limit(client: Client) -> None:
    answer = greedy(client, CAPITAL, 24, ignore_eos=True)
    assert (len(answer.token_ids), answer.finish_reason) == (24, FinishReason.LENGTH)
    assert answer.token_ids[: len(greedy(client, CAPITAL, 24).token_ids)] == greedy(client, CAPITAL, 24).token_ids


@pytest.mark.parametrize(
    "penalty", [{"repetition_penalty": 1.5}, {"frequency_penalty": 2.0}, {"presence_penalty": 2.0}]
)
def test_penalties_keep_from_repeating(client: Client, penalty: dict[str, float]) -> None:
    prompt = "one two three one two three one two three one two three"
    plain = greedy(client, prompt, 24, ignore_eos=True)
    penalised = greedy(client, prompt, 24, ignore_eos=True, **penalty)
    assert len(set(penalised.token_ids)) > len(set(plain.token_ids))


def test_the_text_of_a_stream_is_that_of_its_tokens(client: Client, pieces: Pieces) -> None:
    answer = client.complete(
        "日本語と絵文字 👩‍👩‍👧 に", temperature=1.5, seed=5, max_tokens=40, ignore_eos=True, timeout=120
    )
    assert answer.text == pieces.text(answer.token_ids)


def test_tokenize_and_detokenize_are_inverse(client: Client) -> None:
    text = "Grüße aus 東京: 12345 don't 👋"
    assert client.detokenize(client.tokenize(text)) == text
