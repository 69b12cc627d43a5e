"""Sampled frequencies against the exact distribution: every parameter, all pairs of them, more of them at once, every
way a draw is made, and whole models. Seeds are fixed."""

import itertools
import random
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.sampling import Rows, chi_square_excess, reference_scores, reference_weights
from tests.support.tiny_runner import Driver
from worker_service.runtime.draws import FAR, NEAR
from worker_service.runtime.step import Sampling

VOCAB = 16
# Prompt and output so far of every row.
PAST = ([0, 3, 7], [0, 0, 5])

PARAMETERS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.6},
    "hot": {"temperature": 3.0},
    "top_k": {"top_k": 6},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.2},
    "typical_p": {"typical_p": 0.6},
    "repetition_penalty": {"repetition_penalty": 1.8},
    "repetition_reward": {"repetition_penalty": 0.5},
    "presence_penalty": {"presence_penalty": 0.9},
    "frequency_penalty": {"frequency_penalty": 0.73},
    "frequency_reward": {"frequency_penalty": -0.73},
    "logit_bias": {"biased_token_ids": (1, 15), "biases": (-2.0, 3.5)},
    "allowed": {"allowed_token_ids": (0, 2, 4, 5, 7, 9, 11, 15)},
    "banned": {"banned_token_ids": (0, 2, 3)},
    "min_tokens": {"stop_token_ids": (1, 4), "min_tokens": 1 << 30},
    "stop tokens": {"stop_token_ids": (1, 4)},
}
NOT_OF_THE_DISTRIBUTION = {"seed", "sequence_index", "logprobs", "prompt_logprobs"}
PAIRS = [
    (first, second)
    for first, second in itertools.combinations(PARAMETERS, 2)
    if not PARAMETERS[first].keys() & PARAMETERS[second].keys()
]


def excess(sampling: Sampling, logits: torch.Tensor, num_draws: int, past: tuple[list[int], list[int]] = PAST) -> float:
    """How far the frequencies of so many draws of one row, at as many output positions, are off."""
    rows, vocab, counts = Rows([sampling], len(logits), [past]), len(logits), Counter[int]()
    for begin in range(0, num_draws, 4000):
        positions = np.arange(begin, min(begin + 4000, num_draws))
        batch = logits.expand(len(positions), -1)
        sampled = rows.sampler.sample(batch, np.zeros_like(positions), positions, rows.columns)
        counts.update(sampled.token_ids.tolist())
    weights = reference_weights(reference_scores(logits.double().tolist(), sampling, *past), sampling)
    return chi_square_excess([counts[token] for token in range(vocab)], weights)


@pytest.mark.parametrize("name", PARAMETERS)
def test_each_parameter(name: str) -> None:
    sampling = Sampling(**{"temperature": 1.0, **PARAMETERS[name]})
    assert excess(sampling, torch.linspace(2.0, -2.0, VOCAB), 20_000) < 0


def test_each_parameter_changes_something_and_none_is_forgotten() -> None:
    logits, plain = torch.linspace(2.0, -2.0, VOCAB), Sampling(temperature=1.0)
    for name, values in PARAMETERS.items():
        if name != "stop tokens":
            sampling = Sampling(**{"temperature": 1.0, **values})
            assert reference_weights(reference_scores(logits.tolist(), sampling, *PAST), sampling) != (
                reference_weights(reference_scores(logits.tolist(), plain, *PAST), plain)
            ), name
    tested = {field for values in PARAMETERS.values() for field in values}
    assert tested <= {field.name for field in fields(Sampling)} - NOT_OF_THE_DISTRIBUTION


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_each_pair(first: str, second: str) -> None:
    sampling = Sampling(**{"temperature": 1.0, **PARAMETERS[first], **PARAMETERS[second]})
    assert excess(sampling, torch.linspace(1.5, -1.5, VOCAB), 5_000) < 0


@pytest.mark.parametrize("seed", range(40))
def test_many_at_once(seed: int) -> None:
    rng = random.Random(seed)
    chosen: dict[str, Any] = {"temperature": rng.choice((0.7, 1.0, 1.6))}
    for values in rng.sample(list(PARAMETERS.values()), 6):
        chosen |= values
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))
    assert excess(Sampling(**chosen), logits, 5_000) < 0


@pytest.mark.parametrize(
    ("width", "values"),
    [
        # Few of many, more than the first look takes in, and more than the second.
        (NEAR // 2, {"top_k": NEAR // 2}),
        (NEAR * 4, {"top_k": NEAR * 4}),
        (FAR + 200, {"top_k": FAR + 200}),
        (0, {"top_p": 0.5}),
        (0, {"top_p": 0.97}),
        (0, {"min_p": 0.3}),
        (0, {"typical_p": 0.7}),
        (0, {"top_p": 0.9, "typical_p": 0.8, "frequency_penalty": 1.0}),
        (0, {}),
    ],
)
def test_each_way_through_a_large_vocabulary(width: int, values: dict[str, Any]) -> None:
    vocab = 2000
    logits = torch.linspace(3.0, -1.0, vocab)[torch.randperm(vocab, generator=torch.Generator().manual_seed(1))]
    sampling, past = Sampling(temperature=1.0, **values), ([1, 2], [3, 3, 4])
    weights = reference_weights(reference_scores(logits.double().tolist(), sampling, *past), sampling)
    assert width in (0, sum(weight > 0 for weight in weights))
    assert excess(sampling, logits, 12_000, past) < 0


def test_sequences_and_positions_of_one_seed_are_as_good_as_seeds() -> None:
    """The draws of a request differ in sequence index and position alone."""
    sampling, logits = Sampling(temperature=1.0, seed=9), torch.linspace(2.0, -2.0, VOCAB)
    samplings = [replace(sampling, sequence_index=index) for index in range(64)]
    weights = reference_weights(logits.double().tolist(), sampling)
    counts: Counter[int] = Counter()
    pairs: Counter[tuple[int, int]] = Counter()
    before = np.zeros(0, np.int64)
    for position in range(400):
        rows = Rows(samplings, VOCAB, [([], [0] * position)] * 64)
        token_ids = rows.sample(logits.expand(64, -1)).token_ids
        counts.update(token_ids.tolist())
        pairs.update(zip(before.tolist(), token_ids.tolist(), strict=False))
        before = token_ids
    assert chi_square_excess([counts[token] for token in range(VOCAB)], weights) < 0
    both = list(itertools.product(range(VOCAB), repeat=2))
    assert chi_square_excess([pairs[pair] for pair in both], [weights[a] * weights[b] for a, b in both]) < 0


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=0.8, top_k=12, top_p=0.9),
        Sampling(temperature=1.4, min_p=0.05, repetition_penalty=1.3, presence_penalty=0.5, typical_p=0.9),
        Sampling(temperature=1.0, banned_token_ids=(5, 6), biased_token_ids=(9,), biases=(2.0,), logprobs=3),
    ],
)
def test_a_whole_model(driver: Driver, tiny_path: Path, sampling: Sampling) -> None:
    """Prompt, model, logits and sampler together, against transformers' logits."""
    prompt = [11, 12, 13]
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_path, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt])).logits[0, -1]
    weights = reference_weights(reference_scores(logits.double().tolist(), sampling, prompt, []), sampling)
    counts: Counter[int] = Counter()
    for begin in range(0, 2000, 50):
        for seed in range(begin, begin + 50):
            driver.add(seed, prompt, replace(sampling, seed=seed))
        driver.run(1)
        for seed in range(begin, begin + 50):
            counts[driver.sequences[seed].output[0]] += 1
            driver.finish(seed)
    assert chi_square_excess([counts[token] for token in range(len(weights))], weights) < 0


def test_the_test_can_fail() -> None:
    weights = [0.5, 0.25, 0.125, 0.125]
    fair = [5000, 2500, 1250, 1250]
    assert chi_square_excess(fair, weights) < 0
    assert chi_square_excess([5200, 2300, 1250, 1250], weights) > 0
    assert chi_square_excess([5000, 2500, 2500, 0], weights) > 0
    assert chi_square_excess([*fair, 1], [*weights, 0.0]) == float("inf")
