"""Log-probabilities of prompts against transformers' float32 log-softmax, by both executors."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from loader.checkpoint import open_checkpoint
from loader.layout import weight_slices
from loader.shares import RankPlace
from loader.weights import load_weights
from tests.support.tiny_runner import Driven, Driver, load_tiny, make_runner
from worker_service.kernels import native
from worker_service.runtime import prompt_logprobs
from worker_service.runtime.dummy import prefill_step
from worker_service.runtime.native import NativeEngine
from worker_service.runtime.runner import NOT_FINITE, ModelRunner
from worker_service.runtime.step import Sampling

LENGTHS = (1, 2, 5, 33, 64, 97, 150)
VOCAB = 320
TOLERANCE = 2e-5


def prompts() -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(VOCAB) for _ in range(length)] for length in LENGTHS]


@pytest.fixture(scope="module")
def expected(tiny_path: Path) -> list[torch.Tensor]:
    """For each prompt the log-softmax [length - 1, vocab] that foretells its tokens from the second on."""
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_path, dtype=torch.float32)
    with torch.inference_mode():
        return [torch.log_softmax(model(torch.tensor([prompt])).logits[0, :-1], -1) for prompt in prompts()]


@pytest.fixture(params=["torch", "compiled"])
def driver(request: pytest.FixtureRequest, tiny_path: Path) -> Iterator[Driver]:
    if request.param == "torch":
        yield Driver(*make_runner(load_tiny(tiny_path)))
        return
    library = native.load()
    if library is None:
        pytest.skip("the kernels cannot be compiled here")
    checkpoint = open_checkpoint(tiny_path)
    wanted = weight_slices(checkpoint.config, RankPlace())
    tensors = load_weights(checkpoint, wanted, dtype=torch.float32, progress=lambda _: None, cancelled=lambda: False)
    with native.Pool(library, 2) as pool:
        engine = NativeEngine(checkpoint.config, torch.float32, pool)
        engine.attach(engine.pack(tensors))
        executor = engine.executor(64, 16, 256)
        yield Driver(ModelRunner(executor, max_model_len=256), executor)  # type: ignore[arg-type]


def check(driven: Driven, expected: torch.Tensor, num_top: int) -> None:
    """Every position once and in order, with values and alternatives of the reference."""
    prompt = driven.token_ids[: driven.prompt_token_count]
    assert [part.position for part in driven.prompt] == [
        1 + sum(len(part.token_ids) for part in driven.prompt[:i]) for i in range(len(driven.prompt))
    ]
    assert [token_id for part in driven.prompt for token_id in part.token_ids] == prompt[1:]
    own = torch.tensor([value for part in driven.prompt for value in part.logprobs])
    reference = expected.gather(1, torch.tensor(prompt[1:], dtype=torch.int64)[:, None])[:, 0]
    torch.testing.assert_close(own, reference, atol=TOLERANCE, rtol=0)
    ids = [token_id for part in driven.prompt for token_id in part.top_token_ids]
    values = torch.tensor([value for part in driven.prompt for value in part.top_logprobs]).reshape(len(own), num_top)
    torch.testing.assert_close(values, expected.topk(num_top, -1).values, atol=TOLERANCE, rtol=0)
    # Equally likely ones may change places, so each is held against its own value.
    chosen = expected.gather(1, torch.tensor(ids, dtype=torch.int64).reshape(len(own), num_top))
    torch.testing.assert_close(values, chosen, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("chunk", [1000, 70, 7, 1])
def test_they_equal_transformers_however_prompts_are_cut(
    driver: Driver, expected: list[torch.Tensor], chunk: int
) -> None:
    counts = [0, 1, 5, 20, 3, 20, 7]
    for i, prompt in enumerate(prompts()):
        driver.add(i, prompt, Sampling(prompt_logprobs=counts[i], logprobs=1 if i % 2 else None))
    driver.add(99, prompts()[4])
    driver.run(5, chunk)
    for i, reference in enumerate(expected):
        check(driver.sequences[i], reference, counts[i])
    assert not driver.sequences[99].prompt
    # What is sampled beside it is what is sampled without it.
    assert driver.sequences[99].output == driver.sequences[4].output


def test_a_preempted_prompt_goes_on_where_it_was(driver: Driver, expected: list[torch.Tensor]) -> None:
    rng = random.Random(8)
    for i, prompt in enumerate(prompts()):
        driver.add(i, prompt, Sampling(prompt_logprobs=4))
    while waiting := [s for s in driver.sequences.values() if len(s.output) < 3]:
        victim = rng.choice(waiting)
        if victim.known and rng.random() < 0.3:
            driver.preempt(victim.sequence_id)
        # Resumed ones compute from the start, and tell only of what is left.
        driver.step({s.sequence_id: rng.choice((7, 50, 200)) for s in waiting})
    for i, reference in enumerate(expected):
        check(driver.sequences[i], reference, 4)


def test_no_more_rows_of_logits_than_the_memory_profile_makes(
    driver: Driver, expected: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    executor: Any = driver.runner._executor
    logits, seen = executor.logits, []

    def counted(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(len(hidden))
        return logits(hidden)  # type: ignore[no-any-return]

    monkeypatch.setattr(executor, "logits", counted)
    for i, prompt in enumerate(prompts()):
        driver.add(i, prompt, Sampling(prompt_logprobs=2))
    driver.run(1)
    assert max(seen) == prompt_logprobs.MAX_ROWS
    # And perhaps those that are sampled from.
    assert sum(seen) - sum(LENGTHS) in (-len(LENGTHS), 0)
    for i, reference in enumerate(expected):
        check(driver.sequences[i], reference, 2)
    # The step by which memory is measured makes one slice of full size.
    seen.clear()
    driver.runner.drop_sequences()
    driver.runner.execute(prefill_step([150], driver.block_size, Sampling(prompt_logprobs=1)))
    assert seen[0] == prompt_logprobs.MAX_ROWS and sum(seen[1:]) <= 1


def test_a_prompt_without_finite_logits_fails_alone(driver: Driver, expected: list[torch.Tensor]) -> None:
    executor: Any = driver.runner._executor
    forward = executor.forward

    def spoiled(batch: Any) -> torch.Tensor:
        hidden = forward(batch).clone()
        hidden[torch.from_numpy(batch.hidden_tokens == 40)] = float("nan")
        return hidden  # type: ignore[no-any-return]

    executor.forward = spoiled
    for i in (3, 4, 5):
        driver.add(i, prompts()[i], Sampling(prompt_logprobs=1))
    output = driver.step({3: 1000, 4: 1000, 5: 1000})
    failed = next(iter(output.errors))
    # With decodes first or not, token 40 of the batch is one of the second sequence.
    assert output.errors == {failed: NOT_FINITE} and failed == 4
    assert sorted(output.sequence_ids) == [3, 5]
    for i in (3, 5):
        check(driver.sequences[i], expected[i], 1)
    assert not driver.sequences[4].prompt


def test_long_parts_come_in_pieces(
    driver: Driver, expected: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_logprobs, "MAX_PROMPT_POSITIONS", 40)
    driven = driver.add(1, prompts()[5], Sampling(prompt_logprobs=3))
    driver.step({1: 1000})
    assert [len(part.token_ids) for part in driven.prompt] == [40, 40, 16]
    check(driven, expected[5], 3)


@pytest.mark.parametrize(("start", "computed"), [(0, 0), (-1, 0), (34, 0), (4, 4)])
def test_a_start_that_cannot_be_is_the_sequences_own_error(driver: Driver, start: int, computed: int) -> None:
    driver.add(1, prompts()[3], Sampling(prompt_logprobs=1))
    plan = driver.plan({1: 20})
    object.__setattr__(plan.new_sequences[0], "prompt_logprob_start", start)
    object.__setattr__(plan, "computed_token_counts", [computed])
    object.__setattr__(plan, "scheduled_token_counts", [16 - computed])
    assert "prompt_logprob_start" in driver.runner.execute(plan).errors[1]
