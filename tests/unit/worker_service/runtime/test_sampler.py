"""The sampler against a reference that looks at one row at a time. Its frequencies: test_frequencies.py."""

import math
import random
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.sampling import Rows, reference_scores, reference_weights
from worker_service.runtime.draws import FAR, NEAR, RUN, nucleus_limits, pick
from worker_service.runtime.rng import uniforms
from worker_service.runtime.step import Sampling

CPU = torch.device("cpu")


def reference_token(logits: list[float], sampling: Sampling, prompt: list[int], output: list[int]) -> int:
    scores = reference_scores(logits, sampling, prompt, output)
    if sampling.temperature == 0.0:
        return max(range(len(scores)), key=scores.__getitem__)
    weights = reference_weights(scores, sampling)
    key = (
        np.array([sampling.seed], np.uint64),
        np.array([sampling.sequence_index], np.int64),
        np.array([len(output)], np.int64),
    )
    goal, upto = float(uniforms(*key)[0]) * sum(weights), 0.0
    for token, weight in enumerate(weights):
        upto += weight
        if upto > goal:
            return token
    raise AssertionError("the weights do not reach their sum")


def random_sampling(rng: random.Random, vocab: int) -> Sampling:
    biased = tuple(rng.sample(range(vocab), rng.choice((0, 0, 2))))
    allowed = tuple(rng.sample(range(vocab), rng.choice((0, 0, 0, vocab // 2))))
    stops = tuple(rng.sample(range(vocab), rng.choice((0, 1, min(9, vocab // 3)))))
    left = set(allowed or range(vocab)) - set(stops)
    return Sampling(
        biased_token_ids=biased,
        biases=tuple(rng.uniform(-5, 5) for _ in biased),
        allowed_token_ids=allowed if left else (),
        banned_token_ids=tuple(rng.sample(sorted(left), min(len(left) - 1, 1))) if len(left) > 1 else (),
        typical_p=rng.choice((1.0, 1.0, 0.3, 0.95)),
        temperature=rng.choice((0.0, 0.3, 1.0, 1.0, 2.5)),
        top_k=rng.choice((0, 0, 1, 5, 70, vocab - 1, vocab + 3)),
        top_p=rng.choice((1.0, 1.0, 0.2, 0.9, 0.999)),
        min_p=rng.choice((0.0, 0.0, 0.02, 0.5)),
        repetition_penalty=rng.choice((1.0, 1.0, 1.4, 0.7)),
        presence_penalty=rng.choice((0.0, 0.0, 1.5, -1.0)),
        frequency_penalty=rng.choice((0.0, 0.0, 0.4, -0.3)),
        stop_token_ids=stops,
        min_tokens=rng.choice((0, 100)),
        seed=rng.randrange(2**64),
        sequence_index=rng.randrange(64),
    )


@pytest.mark.parametrize("vocab", [3, 100, RUN, 1500])
def test_every_row_equals_the_reference(vocab: int) -> None:
    rng = random.Random(vocab)
    generator = torch.Generator().manual_seed(vocab)
    samplings = [random_sampling(rng, vocab) for _ in range(60)]
    history = [
        ([rng.randrange(vocab) for _ in range(9)], [rng.randrange(vocab) for _ in range(rng.randrange(20))])
        for _ in samplings
    ]
    logits = torch.randn(len(samplings), vocab, generator=generator) * 3
    before = logits.clone()
    sampled = Rows(samplings, vocab, history).sample(logits)
    expected = [
        reference_token(row, sampling, *past)
        for row, sampling, past in zip(logits.double().tolist(), samplings, history, strict=True)
    ]
    assert sampled.token_ids.tolist() == expected
    assert not sampled.failed.any()
    assert torch.equal(logits, before)


def test_positions_and_indices_draw_independently() -> None:
    """Uniform over all keys of one seed, and uncorrelated between neighbours."""
    positions = np.arange(50_000)
    lanes = [uniforms(np.full(50_000, 42, np.uint64), np.full(50_000, i), positions) for i in range(2)]
    for lane in lanes:
        counts, _ = np.histogram(lane, 100, (0.0, 1.0))
        assert ((counts - 500.0) ** 2 / 500.0).sum() < 161.0
        assert abs(np.corrcoef(lane[1:], lane[:-1])[0, 1]) < 0.02
    assert abs(np.corrcoef(*lanes)[0, 1]) < 0.02


def test_a_row_does_not_depend_on_the_others() -> None:
    rng, vocab = random.Random(3), 2000
    samplings = [random_sampling(rng, vocab) for _ in range(40)]
    history = [([1, 2, 3], [rng.randrange(vocab) for _ in range(5)]) for _ in samplings]
    logits = torch.randn(40, vocab, generator=torch.Generator().manual_seed(1)).bfloat16()  # with many ties
    rows = Rows(samplings, vocab, history)
    together = rows.sample(logits).token_ids
    for _ in range(30):
        some = rng.sample(range(40), rng.randrange(1, 12))
        assert rows.sample(logits[some], some).token_ids.tolist() == together[some].tolist()


@pytest.mark.parametrize("top_p", [0.5, 0.999, 0.9999999])
def test_a_flat_distribution_needs_all_scores(top_p: float) -> None:
    """The nucleus is wider than what is looked at first."""
    vocab = 5000
    logits = torch.linspace(0.0, 0.5, vocab).flip(0)[None]
    weights = reference_weights(logits[0].double().tolist(), Sampling(temperature=1.0, top_p=top_p))
    num_kept = sum(weight > 0 for weight in weights)
    samplings = [Sampling(temperature=1.0, top_p=top_p, seed=seed) for seed in range(2000)]
    sampled = Rows(samplings, vocab).sample(logits.expand(2000, -1))
    assert num_kept > FAR
    assert num_kept - vocab * 0.01 < sampled.token_ids.max() < num_kept + 2


@pytest.mark.parametrize("num_ties", [3, NEAR, NEAR + 1, FAR, FAR + 1])
@pytest.mark.parametrize("filters", [{"top_k": 2}, {"top_p": 0.5}, {"top_k": 3, "top_p": 0.4}, {"min_p": 0.9}])
def test_ties_at_the_border_are_kept_together(num_ties: int, filters: dict[str, Any]) -> None:
    logits = torch.full((1, FAR + 500), -4.0)
    logits[0, 7 : 7 + num_ties] = 5.0
    samplings = [Sampling(temperature=0.5, seed=seed, **filters) for seed in range(1500)]
    drawn = set(Rows(samplings, FAR + 500).sample(logits.expand(1500, -1)).token_ids.tolist())
    assert drawn <= set(range(7, 7 + num_ties))
    # As many different ones as throwing 1,500 balls into so many bins fills, about.
    assert len(drawn) > num_ties * (1 - math.exp(-1500 / num_ties)) - (60 if num_ties > 100 else 1)


def test_a_tiny_temperature_is_greedy() -> None:
    logits = torch.tensor([[1.0, 1.0001, 0.5]])
    assert Rows([Sampling(temperature=1e-40, seed=1)], 3).sample(logits).token_ids.tolist() == [1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_fails_alone(temperature: float, bad: float) -> None:
    logits = torch.zeros(3, 300)
    logits[:, 7] = 9.0
    logits[1, 5] = bad
    sampling = Sampling(temperature=temperature, top_p=0.5, logprobs=2, seed=1)
    sampled = Rows([sampling] * 3, 300).sample(logits)
    assert sampled.failed.tolist() == [False, True, False]
    assert sampled.token_ids[[0, 2]].tolist() == [7, 7]
    assert sorted(sampled.logprobs) == [0, 2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_masking_every_token_fails_the_row(temperature: float) -> None:
    sampling = Sampling(temperature=temperature, stop_token_ids=(0, 1, 2), min_tokens=5)
    assert Rows([sampling], 3).sample(torch.zeros(1, 3)).failed.tolist() == [True]


def test_penalties_follow_what_is_sampled() -> None:
    vocab, rng = 50, random.Random(1)
    sampling = Sampling(temperature=0.9, seed=5, repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.2)
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(2))
    prompt, output = [rng.randrange(vocab) for _ in range(5)], []
    rows = Rows([sampling], vocab, [(prompt, [])])
    for _ in range(30):
        expected = reference_token(logits[0].double().tolist(), sampling, prompt, output)
        rows.history = [(prompt, output)]
        token_ids = rows.sample(logits).token_ids
        assert token_ids.tolist() == [expected]
        rows.sampler.penalties.record(np.zeros(1, np.int64), token_ids)
        output.append(expected)


def test_penalty_memory_is_reused() -> None:
    rows = Rows([Sampling(frequency_penalty=0.5)], 10, [([1], [2, 2])])
    penalties = rows.sampler.penalties
    size = len(penalties._seen)
    for turn in range(10):
        penalties.remove(0)
        penalties.add(0, np.array([turn % 10]), np.array([3]))
    scores = torch.zeros(1, 10)
    penalties.apply(scores, np.zeros(1, np.int64), np.zeros(1, np.int64), rows.columns)
    assert len(penalties._seen) == size
    assert scores[0].tolist() == [-0.5 if token == 3 else 0.0 for token in range(10)]


def test_a_draw_never_hits_weight_zero() -> None:
    weights = torch.zeros(4, 3 * RUN)
    weights[0, 2 * RUN + 5] = 1.0
    weights[1, 0] = 1.0
    weights[2, RUN - 1], weights[2, RUN] = 0.5, 0.5
    weights[3, 10:20] = 1e-30
    least, most = torch.zeros(4, dtype=torch.float64), torch.full((4,), 1.0, dtype=torch.float64)
    assert pick(weights, least).tolist() == [2 * RUN + 5, 0, RUN - 1, 10]
    assert pick(weights, most).tolist() == [2 * RUN + 5, 0, RUN, 19]


def test_nucleus_limits_say_when_they_saw_too_little() -> None:
    scores = torch.zeros(2, 1000)
    scores[1, :3] = 20.0
    top_k, top_p = torch.tensor([[0], [0]]), torch.tensor([[0.9], [0.9]])
    limits, sure = nucleus_limits(scores, scores.exp(), top_k=top_k, top_p=top_p, width=64, is_all=False)
    assert sure.flatten().tolist() == [False, True]
    assert limits[1].item() == 20.0


def test_uniforms_are_what_they_were() -> None:
    """A change here would change every seeded answer: SplitMix64, chained, computed with Python integers."""

    def mix(word: int) -> int:
        word = (word + 0x9E3779B97F4A7C15) % 2**64
        word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
        return word ^ word >> 31

    keys = [(0, 0, 0), (2**64 - 1, 63, 10**6), (12345, 1, 0), (12345, 0, 1)]
    expected = [(mix(mix(mix(seed) + index) + position) >> 11) / 2**53 for seed, index, position in keys]
    seeds, indices, positions = zip(*keys, strict=True)
    got = uniforms(np.array(seeds, np.uint64), np.array(indices), np.array(positions))
    assert got.tolist() == expected
    assert len(set(expected)) == 4
