"""Speculation changes when tokens come and nothing else: every sequence gets those of an undisturbed run."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scheduler_service.core.request import FinishReason, Request
from scheduler_service.engine.values import Sampling
from tests.support.served_runner import Oracle, Served, ServedRunner
from tests.support.tiny_runner import Driver, make_runner, reference_tokens
from worker_service.models.decoder import Decoder
from worker_service.runtime import drafting
from worker_service.runtime import step as worker_step
from worker_service.runtime.step import StateMismatch

VOCAB, NUM_BLOCKS, BLOCK_SIZE, MAX_MODEL_LEN = 320, 96, 4, 128

GREEDY: dict[str, Any] = {
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "stop_token_ids": (),
    "min_tokens": 0,
    "seed": 7,
    "logprobs": None,
}
WAYS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.9, "top_p": 0.9, "logprobs": 2},
    {"repetition_penalty": 1.4, "frequency_penalty": 0.5},
    {"temperature": 1.2, "presence_penalty": 0.6, "frequency_penalty": 0.9, "min_p": 0.02, "logprobs": 0},
    {"temperature": 1.0, "banned_token_ids": tuple(range(0, 160, 2)), "logit_bias": ((5, 2.0),)},
    {"logprobs": 3, "allowed_token_ids": tuple(range(90))},
    {"temperature": 0.7, "typical_p": 0.8, "repetition_penalty": 1.1},
]


def requests_of(ways: list[dict[str, Any]], *, n: int = 1, seed: int = 0) -> list[Request]:
    """One request for each way to sample, of prompts that hold their own beginnings twice."""
    rng = random.Random(seed)
    made = []
    for number, way in enumerate(ways):
        stem = [rng.randrange(VOCAB) for _ in range(rng.randrange(2, 12))]
        prompt = [*stem, rng.randrange(VOCAB), *stem]
        sampling = Sampling(**{**GREEDY, "seed": number, **way})
        made.append(Request(f"r{number}", prompt, rng.randrange(1, 40), n=n, sampling=sampling))
    return made


def serve(model: Decoder, requests: list[Request], num_drafts: int = 0, **sizes: int) -> Served:
    sizes = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE, **sizes}
    runner, _ = make_runner(model, num_blocks=sizes["num_blocks"], block_size=BLOCK_SIZE, max_model_len=MAX_MODEL_LEN)
    served = ServedRunner(runner, VOCAB, **sizes)
    served.add([replace(request, max_draft_tokens=num_drafts) for request in requests])
    return served.finish()


def oracle_of(requests: list[Request], plain: Served, **options: Any) -> Oracle:
    prompts = {request.request_id: list(request.prompt_token_ids) for request in requests}
    return Oracle([prompts[name] + output for (name, _), output in plain.outputs.items()], VOCAB, **options)


@pytest.fixture(autouse=True)
def _tireless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts cost nothing, so no sequence rests, and batches have room for those of all."""
    monkeypatch.setattr("worker_service.runtime.executor.TorchExecutor.token_cost", 1e-6)
    monkeypatch.setattr("worker_service.runtime.executor.TorchExecutor.num_cheap_tokens", 64)


@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
def test_every_way_to_sample_gives_the_same_tokens(
    tiny_model: Decoder, monkeypatch: pytest.MonkeyPatch, max_in_flight: int
) -> None:
    requests = requests_of(WAYS, seed=max_in_flight)
    plain = serve(tiny_model, requests)
    monkeypatch.setattr(drafting, "look_up", oracle_of(requests, plain))
    sizes = {"max_in_flight": max_in_flight, "max_running": 60, "max_step_tokens": 80}
    speculating = serve(tiny_model, requests, 4, **sizes)
    assert speculating.outputs == plain.outputs
    assert speculating.ends == plain.ends
    assert speculating.num_accepted > 40
    for name, values in plain.logprobs.items():
        assert len(values) == len(speculating.logprobs[name])
        for one, other in zip(values, speculating.logprobs[name], strict=True):
            assert other.sampled.logprob == pytest.approx(one.sampled.logprob, abs=1e-4)  # type: ignore[attr-defined]
            assert [top.token_id for top in one.top] == [top.token_id for top in other.top]  # type: ignore[attr-defined]


def test_it_takes_fewer_steps(tiny_model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [replace(request, max_tokens=60) for request in requests_of([{}])]
    plain = serve(tiny_model, requests)
    monkeypatch.setattr(drafting, "look_up", oracle_of(requests, plain, wrong=0.0))
    speculating = serve(tiny_model, requests, 5)
    assert speculating.outputs == plain.outputs
    # The first token, then six a step, and what was sent before the end was known.
    assert plain.num_steps >= 60
    assert speculating.num_steps <= 1 + 10 + 2
    assert speculating.num_accepted == 59 - 10


def test_stop_tokens_inside_an_accepted_run_end_the_sequence(
    tiny_model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [replace(request, max_tokens=40) for request in requests_of([{}, {"temperature": 1.0}, {}, {}])]
    whole = serve(tiny_model, requests)
    rng = random.Random(4)
    stopping = []
    for request in requests:
        output = whole.outputs[request.request_id, 0]
        stop, least = output[rng.randrange(10, 30)], rng.choice([0, 15])
        sampling = replace(request.sampling, stop_token_ids=(stop,), min_tokens=least)  # type: ignore[type-var]
        stopping.append(replace(request, sampling=sampling))
    plain = serve(tiny_model, stopping)
    assert FinishReason.STOP in plain.ends.values()
    monkeypatch.setattr(drafting, "look_up", oracle_of(requests, whole, wrong=0.05))
    speculating = serve(tiny_model, stopping, 6, max_running=60)
    assert speculating.outputs == plain.outputs
    assert speculating.ends == plain.ends


def test_siblings_preemption_and_shared_prefixes(tiny_model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = requests_of([{"temperature": 1.0}, {}, {"temperature": 0.5}] * 3, n=3)
    plain = serve(tiny_model, requests)
    monkeypatch.setattr(drafting, "look_up", oracle_of(requests, plain))
    sizes = {"num_blocks": 34, "max_running": 50, "max_step_tokens": 60}
    speculating = serve(tiny_model, requests, 3, **sizes)
    assert speculating.outputs == plain.outputs
    assert speculating.num_preemptions > 0
    assert speculating.num_accepted > 40


def test_prompt_lookup_finds_loops_of_greedy_text(tiny_model: Decoder, tiny_path: Path) -> None:
    prompts = [[3, 4, 5, 6, 7, 3, 4], [9] * 6, [11, 30, 11, 30, 11]]
    expected = reference_tokens(tiny_path, prompts, 60)
    requests = [Request(f"r{i}", prompt, 60, sampling=Sampling(**GREEDY)) for i, prompt in enumerate(prompts)]
    served = serve(tiny_model, requests, 4, max_running=20)
    assert [served.outputs[f"r{i}", 0] for i in range(3)] == expected
    assert served.num_accepted > 0


def test_a_request_may_be_cancelled_with_drafts_in_flight(tiny_model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [replace(request, max_tokens=30) for request in requests_of([{}] * 4)]
    plain = serve(tiny_model, requests)
    monkeypatch.setattr(drafting, "look_up", oracle_of(requests, plain))
    runner, _ = make_runner(tiny_model, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_model_len=MAX_MODEL_LEN)
    served = ServedRunner(runner, VOCAB, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_running=40)
    served.add([replace(request, max_draft_tokens=4) for request in requests])
    for number, request in enumerate(requests[:2]):
        for _ in range(2 + number):
            served.turn()
        served.scheduler.end_request(request.request_id, FinishReason.CANCELLED)
    outputs = served.finish().outputs
    for request in requests:
        name = request.request_id, 0
        assert outputs[name] == plain.outputs[name][: len(outputs[name])]
    assert runner.num_sequences == 0


# What is refused.


@pytest.fixture
def drafting_driver(tiny_model: Decoder, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Two sequences of 7 tokens, the first of which had 3 drafts accepted in step 12, which is not applied."""
    driver = Driver(*make_runner(tiny_model, num_blocks=64, max_model_len=40))
    driver.add(1, [1, 2, 3, 4, 5], num_outputs=30)
    driver.add(2, [5, 6, 7])
    driver.run(10)
    transcripts = [s.token_ids for s in driver.sequences.values()]
    for sequence_id in (1, 2):
        driver.preempt(sequence_id)
        driver.sequences[sequence_id].token_ids = driver.sequences[sequence_id].token_ids[:6]
    driver.free = list(range(20, 0, -1))
    driver.step({1: 100, 2: 100})
    monkeypatch.setattr(drafting, "look_up", Oracle(transcripts, VOCAB, wrong=0.0))
    output = driver.runner.execute(driver.plan({1: 1, 2: 1}, num_drafts=3))
    assert output.step_id == 12
    assert len(output.accepted[1]) == 3
    return driver


def next_step(driver: Driver, **changes: Any) -> worker_step.StepInput:
    """What the scheduler sends that has not applied the last answer."""
    values: dict[str, Any] = {
        "step_id": driver.step_id + 1,
        "new_sequences": [],
        "sequence_ids": [1, 2],
        "scheduled_token_counts": [1, 1],
        "computed_token_counts": [7, 7],
        "new_block_counts": [1, 0],
        "new_block_ids": [40],
        "finished_sequence_ids": [],
        "preempted_sequence_ids": [],
        "draft_token_counts": [1, 0],
        "applied_step_id": driver.step_id - 1,
    }
    return worker_step.StepInput(**(values | changes))


def test_a_count_that_steps_in_flight_explain_is_taken(drafting_driver: Driver) -> None:
    output = drafting_driver.runner.execute(next_step(drafting_driver))
    assert sorted(output.sequence_ids) == [1, 2]
    # Applied now, so nothing is left to explain a difference.
    later = {"step_id": drafting_driver.step_id + 2, "applied_step_id": drafting_driver.step_id + 1}
    accepted = len(output.accepted.get(1, ()))
    blocks = {"new_block_counts": [1, 1], "new_block_ids": [41, 42], "draft_token_counts": []}
    counts = {"computed_token_counts": [11 + accepted, 8]}
    with pytest.raises(StateMismatch, match="computed_token_count differs"):
        drafting_driver.runner.execute(next_step(drafting_driver, **later, **blocks, computed_token_counts=[8, 8]))
    assert drafting_driver.runner.execute(next_step(drafting_driver, **later, **blocks, **counts)).token_ids


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"computed_token_counts": [10, 7]}, "computed_token_count differs"),
        ({"computed_token_counts": [8, 7]}, "computed_token_count differs"),
        ({"applied_step_id": 12}, "computed_token_count differs"),
        ({"computed_token_counts": [7, 6]}, "computed_token_count differs"),
        ({"draft_token_counts": [1, 1]}, "does not speculate"),
        ({"draft_token_counts": [1]}, "1 entries for 2 sequences"),
        ({"draft_token_counts": [-1, 0]}, "below 0"),
        ({"draft_token_counts": [2**70, 0]}, "64 bits"),
        ({"draft_token_counts": [6, 0]}, "too short for its draft tokens"),
    ],
)
def test_what_disagrees_is_refused_and_changes_nothing(
    drafting_driver: Driver, changes: dict[str, Any], message: str
) -> None:
    table = drafting_driver.runner._table
    before = {name: np.copy(value) for name, value in vars(table).items() if isinstance(value, np.ndarray)}
    with pytest.raises(StateMismatch, match=message):
        drafting_driver.runner.execute(next_step(drafting_driver, **changes))
    for name, value in before.items():
        assert np.array_equal(getattr(table, name), value), name
    assert sorted(drafting_driver.runner.execute(next_step(drafting_driver)).sequence_ids) == [1, 2]


@pytest.mark.parametrize("limit", [5, -1, 41])
def test_an_absurd_token_limit_ends_its_own_sequence_only(tiny_model: Decoder, limit: int) -> None:
    driver = Driver(*make_runner(tiny_model, max_model_len=40))
    driver.add(1, [1, 2, 3, 4, 5], num_outputs=limit - 5)
    driver.add(2, [5, 6, 7])
    output = driver.step({1: 100, 2: 100})
    assert list(output.errors) == [1] and "token_limit" in output.errors[1]
    assert output.sequence_ids == [2]


def test_the_context_is_filled_to_its_end_and_not_beyond(tiny_model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = list(range(1, 9))
    requests = [Request("r", prompt, MAX_MODEL_LEN - len(prompt), sampling=Sampling(**GREEDY))]
    plain = serve(tiny_model, requests)
    monkeypatch.setattr(drafting, "look_up", oracle_of(requests, plain, wrong=0.1))
    speculating = serve(tiny_model, requests, 7, max_in_flight=3)
    assert speculating.outputs == plain.outputs
    assert len(plain.outputs["r", 0]) == MAX_MODEL_LEN - len(prompt)
    assert speculating.ends == {("r", 0): FinishReason.LENGTH}


@pytest.mark.parametrize("seed", range(6))
def test_in_random_histories_nothing_but_the_steps_differs(
    tiny_model: Decoder, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Few blocks, late comers, siblings, cancels, epochs that end with steps in flight."""
    rng = random.Random(seed)
    requests = requests_of([rng.choice(WAYS) for _ in range(10)], seed=seed)
    requests = [replace(request, n=rng.choice([1, 1, 3]), priority=rng.choice([0, 0, 1])) for request in requests]
    plain = serve(tiny_model, requests)
    monkeypatch.setattr(drafting, "look_up", oracle_of(requests, plain, wrong=0.3))
    runner, _ = make_runner(tiny_model, num_blocks=30, block_size=BLOCK_SIZE, max_model_len=MAX_MODEL_LEN)
    sizes = {"num_blocks": 30, "block_size": BLOCK_SIZE, "max_running": rng.choice([8, 40]), "max_step_tokens": 48}
    served = ServedRunner(runner, VOCAB, max_in_flight=rng.choice([1, 2, 3]), **sizes)
    waiting, cancelled = list(requests), set()
    while waiting or rng.random() < 0.9:
        if waiting and rng.random() < 0.4:
            served.add([replace(waiting.pop(), max_draft_tokens=rng.choice([0, 1, 4, 8]))])
        if rng.random() < 0.03:
            request_id = rng.choice(requests).request_id
            cancelled |= {request_id} if served.scheduler.end_request(request_id, FinishReason.CANCELLED) else set()
        if rng.random() < 0.04:
            served.lose_worker()
        served.turn()
    outputs = served.finish().outputs
    for (request_id, index), output in outputs.items():
        whole = plain.outputs[request_id, index]
        assert output == (whole[: len(output)] if request_id in cancelled else whole)
    assert served.served.num_accepted > 0
    assert runner.num_sequences == 0
