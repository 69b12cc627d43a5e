"""The runner against transformers, and what it does when things go wrong."""

import random
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.support.tiny_checkpoint import make_tiny_llama
from tests.support.tiny_runner import Driver, load_tiny, make_runner, reference_tokens
from worker_service.models.decoder import Decoder
from worker_service.runtime.step import Sampling

LENGTHS = (1, 2, 3, 4, 5, 8, 17, 31, 64, 101, 150)
NUM_OUTPUTS = 24
VOCAB = 320


def prompts(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(length)] for length in lengths]


@pytest.fixture(scope="session")
def reference(tiny_path: Path) -> list[list[int]]:
    return reference_tokens(tiny_path, prompts(), NUM_OUTPUTS)


def outputs(driver: Driver) -> list[list[int]]:
    return [driven.output for driven in driver.sequences.values()]


@pytest.mark.parametrize("chunk", [1000, 7, 1])
def test_greedy_tokens_equal_transformers(driver: Driver, reference: list[list[int]], chunk: int) -> None:
    for i, prompt in enumerate(prompts()):
        driver.add(i, prompt)
    driver.run(NUM_OUTPUTS, chunk)
    assert outputs(driver) == reference


def test_chunks_of_any_size_beside_decodes_equal_transformers(driver: Driver, reference: list[list[int]]) -> None:
    rng = random.Random(5)
    todo = prompts()
    while any(len(s.output) < NUM_OUTPUTS for s in driver.sequences.values()) or todo:
        if todo:
            driver.add(len(LENGTHS) - len(todo), todo.pop(0))
        waiting = [s for s in driver.sequences.values() if len(s.output) < NUM_OUTPUTS]
        driver.step({s.sequence_id: rng.choice((1, 3, 11, 29)) for s in waiting})
    assert outputs(driver) == reference


def test_a_preempted_sequence_goes_on_as_if_nothing_had_happened(driver: Driver, reference: list[list[int]]) -> None:
    rng = random.Random(6)
    for i, prompt in enumerate(prompts()):
        driver.add(i, prompt)
    while waiting := [s for s in driver.sequences.values() if len(s.output) < NUM_OUTPUTS]:
        victim = rng.choice(waiting)
        if victim.known and rng.random() < 0.5:
            driver.preempt(victim.sequence_id)
        driver.step({s.sequence_id: 50 for s in waiting})
    assert outputs(driver) == reference


def test_steps_may_be_planned_before_the_answers(driver: Driver, reference: list[list[int]]) -> None:
    """Two steps in flight: the worker finds the sampled ids itself."""
    sequence = driver.add(1, prompts()[6])
    plans = [driver.plan({1: 1000})]
    for _ in range(NUM_OUTPUTS - 1):
        sequence.token_ids.append(-1)  # the scheduler does not know it yet
        plans.append(driver.plan({1: 1}))
    assert [driver.runner.execute(plan).token_ids[0] for plan in plans] == reference[6]


def test_a_shared_prefix_is_not_computed_again(driver: Driver, reference: list[list[int]]) -> None:
    prompt = prompts()[7]
    first = driver.add(1, prompt)
    driver.step({1: 1000})
    sibling = driver.add(2, prompt)
    num_shared = (len(prompt) - 1) // driver.block_size
    sibling.blocks, sibling.computed = first.blocks[:num_shared], num_shared * driver.block_size
    driver.run(NUM_OUTPUTS)
    assert first.output == sibling.output == reference[7]


def test_only_own_blocks_are_written(tiny_model: Decoder) -> None:
    runner, cache = make_runner(tiny_model)
    driver = Driver(runner, cache)
    cache._data.fill_(7.0)
    for i, prompt in enumerate(prompts((5, 1, 30))):
        driver.add(i, prompt)
    driver.run(12, chunk=6)
    owned = sorted(block for s in driver.sequences.values() for block in s.blocks)
    others = [block for block in range(cache.num_blocks) if block not in owned]
    assert bool((cache._data[others] == 7.0).all())
    # Positions past a sequence's end hold nothing of whoever had the block before.
    for s in driver.sequences.values():
        tail = cache._data[s.blocks[-1], :, :, :, s.computed % cache.block_size or cache.block_size :]
        assert bool((tail == 0.0).all())


def test_logprobs_are_those_of_the_raw_logits(driver: Driver, tiny_path: Path) -> None:
    sampling = Sampling(
        temperature=3.0, top_k=40, top_p=0.9, repetition_penalty=1.5, frequency_penalty=0.5, seed=3, logprobs=5
    )
    prompt = prompts()[6]
    sequence = driver.add(1, prompt, sampling)
    plain = driver.add(2, prompt, Sampling(logprobs=0))
    driver.run(6)
    model = LlamaForCausalLM.from_pretrained(tiny_path, dtype=torch.float32)
    with torch.no_grad():
        expected = model(torch.tensor([sequence.token_ids])).logits[0].log_softmax(-1)
    for i, got in enumerate(sequence.logprobs):
        row = expected[len(prompt) - 1 + i]
        assert got.token_id == sequence.output[i]
        assert got.logprob == pytest.approx(row[got.token_id].item(), abs=1e-4)
        top = row.topk(5)
        assert [token for token, _ in got.top] == top.indices.tolist()
        assert [value for _, value in got.top] == pytest.approx(top.values.tolist(), abs=1e-4)
    assert [len(got.top) for got in plain.logprobs] == [0] * 6


def test_draws_do_not_depend_on_batch_or_preemption(tiny_model: Decoder) -> None:
    samplings = [
        Sampling(temperature=1.0, seed=7),
        Sampling(temperature=1.0, seed=7, sequence_index=1),
        Sampling(temperature=1.3, top_k=20, seed=2**64 - 1),
        Sampling(temperature=0.8, top_p=0.7, frequency_penalty=0.6, presence_penalty=0.2, seed=1),
        Sampling(temperature=1.0, min_p=0.05, repetition_penalty=1.3, seed=0),
        Sampling(),
    ]
    alone = []
    for i, sampling in enumerate(samplings):
        driver = Driver(*make_runner(tiny_model))
        driver.add(i, prompts()[6], sampling)
        driver.run(20)
        alone += outputs(driver)
    driver = Driver(*make_runner(tiny_model), seed=1)
    for i, sampling in enumerate(samplings):
        driver.add(i, prompts()[6], sampling)
    for s in list(driver.sequences.values()):
        driver.run(3 * s.sequence_id, chunk=5)
        driver.preempt(s.sequence_id)
    driver.run(20, chunk=5)
    assert outputs(driver) == alone
    assert len({tuple(output) for output in alone}) == len(alone)


def test_a_stop_token_ends_the_sequence_and_steps_in_flight_pass(driver: Driver, reference: list[list[int]]) -> None:
    expected, prompt = reference[6], prompts()[6]
    stop = next(token for token in expected if expected.index(token) >= 2)
    place = expected.index(stop)
    sequence = driver.add(1, prompt, Sampling(stop_token_ids=(stop,)))
    other = driver.add(2, prompts()[5])
    for _ in range(place + 1):
        output = driver.step({1: 1000, 2: 1000})
    assert output.stopped_sequence_ids == [1]
    assert sequence.output == expected[: place + 1]
    # Two steps planned before the answer was known.
    for _ in range(2):
        output = driver.step({1: 1, 2: 1})
        assert output.sequence_ids == [2]
        sequence.token_ids.append(-1)
    driver.finish(1)
    driver.step({2: 1})
    assert driver.runner.num_sequences == 1
    assert other.output == reference[5][: len(other.output)]


def test_edited_logits_keep_to_their_own_sequence(driver: Driver, reference: list[list[int]]) -> None:
    """Also after a preemption, and when another sequence takes the row."""
    first, second = reference[0][0], reference[1][0]
    driver.add(0, prompts()[0], Sampling(allowed_token_ids=(3, 9, 40)))
    driver.add(1, prompts()[1], Sampling(banned_token_ids=(second,)))
    driver.add(2, prompts()[0], Sampling(biased_token_ids=(77,), biases=(1e4,)))
    driver.add(3, prompts()[0])
    driver.run(3)
    driver.preempt(0)
    driver.run(6)
    allowed, banned, biased, plain = outputs(driver)
    assert set(allowed) <= {3, 9, 40}
    assert banned[0] != second
    assert biased == [77] * 6
    assert plain == reference[0][:6]
    for sequence_id in range(4):
        driver.finish(sequence_id)
    driver.add(9, prompts()[0])
    driver.run(1)
    assert outputs(driver) == [[first]]


def test_min_tokens_masks_stop_tokens(driver: Driver, reference: list[list[int]]) -> None:
    expected, prompt = reference[6], prompts()[6]
    sequence = driver.add(1, prompt, Sampling(stop_token_ids=(expected[0], expected[1], VOCAB + 5), min_tokens=2))
    driver.step({1: 1000})
    output = driver.step({1: 1})
    assert not {expected[0], expected[1]} & set(sequence.output)
    assert output.stopped_sequence_ids == []


@pytest.mark.parametrize("bad", [VOCAB, -1, 2**40])
def test_a_bad_token_id_ends_its_own_sequence_only(driver: Driver, reference: list[list[int]], bad: int) -> None:
    driver.add(1, [3, bad, 4])
    good = driver.add(2, prompts()[4])
    output = driver.step({1: 1000, 2: 1000})
    assert output.sequence_ids == [2]
    assert list(output.errors) == [1]
    assert "position 1" in output.errors[1] and str(bad) in output.errors[1]
    driver.sequences[1].token_ids.append(-1)
    assert not driver.step({1: 1, 2: 1}).errors
    driver.finish(1)
    driver.run(NUM_OUTPUTS)
    assert good.output == reference[4]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=float("nan")),
        Sampling(temperature=-1.0),
        Sampling(top_k=-1),
        Sampling(top_p=0.0),
        Sampling(top_p=float("nan")),
        Sampling(min_p=1.5),
        Sampling(repetition_penalty=0.0),
        Sampling(repetition_penalty=float("inf")),
        Sampling(frequency_penalty=float("inf")),
        Sampling(presence_penalty=float("nan")),
        Sampling(min_tokens=-1),
        Sampling(seed=-1),
        Sampling(seed=2**64),
        Sampling(sequence_index=-1),
        Sampling(logprobs=-1),
        Sampling(logprobs=VOCAB + 1),
    ],
)
def test_absurd_sampling_ends_its_own_sequence_only(driver: Driver, sampling: Sampling) -> None:
    driver.add(1, [3, 4], sampling)
    driver.add(2, [3, 4])
    output = driver.step({1: 1000, 2: 1000})
    assert list(output.errors) == [1]
    assert output.sequence_ids == [2]


def test_logits_that_are_not_finite_end_their_own_sequence_only(tmp_path: Path) -> None:
    """And the blocks that it leaves behind do not harm whoever gets them next."""
    model = load_tiny(make_tiny_llama(tmp_path))
    runner, cache = make_runner(model, num_blocks=24)
    broken = 319
    model._embedding.weight[broken] = float("nan")
    lengths = (5, 6, 30)
    expected = reference_tokens(tmp_path, prompts(lengths, seed=9), 8)
    driver = Driver(runner, cache)
    for i, prompt in enumerate(prompts(lengths, seed=9)):
        driver.add(i, prompt)
        assert broken not in prompt and broken not in expected[i]
    driver.add(9, [broken] * 40)
    output = driver.step(dict.fromkeys(driver.sequences, 1000))
    assert list(output.errors) == [9] and "finite" in output.errors[9]
    assert bool(cache._data.isnan().any())
    driver.finish(9)
    driver.run(8)
    driver.free.reverse()  # the blocks of the broken one first
    for i, prompt in enumerate(prompts(lengths, seed=9)):
        driver.finish(i)
        driver.add(10 + i, prompt)
    driver.run(8)
    assert outputs(driver) == expected


def test_random_rows_with_logits_that_are_not_finite_fail_too(tmp_path: Path) -> None:
    model = load_tiny(make_tiny_llama(tmp_path))
    driver = Driver(*make_runner(model))
    model._embedding.weight[5] = float("nan")
    for i, token in enumerate((5, 6)):
        driver.add(i, [token], Sampling(temperature=1.0, top_p=0.9, seed=1, logprobs=1))
    output = driver.step({0: 1, 1: 1})
    assert list(output.errors) == [0]
    assert output.sequence_ids == [1] and list(output.logprobs) == [1]


def test_the_context_can_be_filled_to_its_last_token(tiny_model: Decoder) -> None:
    driver = Driver(*make_runner(tiny_model, max_model_len=10))
    sequence = driver.add(1, list(range(8)))
    for _ in range(3):
        driver.step({1: 100})
    assert len(sequence.token_ids) == 11


def test_rows_are_reused_and_the_table_grows(driver: Driver) -> None:
    expected = []
    for turn in range(3):
        for i in range(70):
            driver.add(100 * turn + i, [i, i + 1, i + 2])
        driver.run(2)
        expected.append(outputs(driver))
        for sequence_id in list(driver.sequences):
            driver.finish(sequence_id)
    assert expected[0] == expected[1] == expected[2]
    assert len(driver.runner._table.num_tokens) == 128


def test_dropping_sequences_forgets_them_all(driver: Driver, reference: list[list[int]]) -> None:
    driver.add(1, prompts()[6], Sampling(frequency_penalty=1.0))
    driver.run(5)
    driver.runner.drop_sequences()
    assert driver.runner.num_sequences == 0
    fresh = Driver(driver.runner, driver.runner._executor._cache)
    sequence = fresh.add(1, prompts()[6])
    fresh.run(NUM_OUTPUTS)
    assert sequence.output == reference[6]


def test_times_are_filled_in(driver: Driver) -> None:
    driver.add(1, prompts()[6])
    output = driver.step({1: 1000})
    assert output.start_unix_ns > 1_600_000_000 * 10**9
    assert min(output.prepare_ns, output.forward_ns, output.sample_ns) > 0
