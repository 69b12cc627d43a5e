import json
import random
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from loader.errors import CheckpointError, LoadCancelled
from loader.shares import RankPlace
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.plan import StepPlan, StepResult, TokenEvent
from scheduler_service.core.request import FinishReason, Request
from scheduler_service.core.scheduler import Scheduler
from stepwire.grammars import grammar_key
from stepwire.simulation.cost import CostModel, StepLoad
from tests.support.grammars import lark, schema
from tests.support.tiny_checkpoint import EOS_TOKEN_ID, make_tiny_llama, tiny_tokenizer
from worker_service.runtime.errors import RuntimeFailure
from worker_service.runtime.report import Phase
from worker_service.runtime.sim import SimRuntime
from worker_service.runtime.step import NewSequence, Sampling, StateMismatch, StepInput
from worker_service.settings import WorkerSettings


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model"))


def loaded(model: Path, sleeps: list[float] | None = None, **settings: Any) -> SimRuntime:
    """A runtime that holds the model."""
    runtime = SimRuntime(WorkerSettings(device="sim", **settings), sleep=([] if sleeps is None else sleeps).append)
    runtime.init_device(RankPlace())
    runtime.load_model(model, "auto", lambda *_: None, lambda: False)
    return runtime


def ready(model: Path, *, num_blocks: int = 64, sleeps: list[float] | None = None, **settings: Any) -> SimRuntime:
    """A runtime that takes steps."""
    runtime = loaded(model, sleeps, **settings)
    runtime.determine_available_memory(64, 8)
    runtime.initialize_cache(num_blocks, 16, 256)
    runtime.warm_up(64, 8, lambda *_: None)
    return runtime


NO_KEYS: Mapping[str, bytes] = MappingProxyType({})


def step_input(plan: StepPlan, grammar_keys: Mapping[str, bytes] = NO_KEYS) -> StepInput:
    """The plan as it comes over the wire."""
    return StepInput(
        step_id=plan.step_id,
        new_sequences=[
            NewSequence(
                new.sequence_id,
                new.sequence.request.request_id,
                new.token_ids,
                new.sequence.prompt_token_count,
                new.sequence.request.sampling,  # type: ignore[arg-type]
                new.block_ids,
                grammar_key=grammar_keys.get(new.sequence.request.request_id, b""),
            )
            for new in plan.new_sequences
        ],
        sequence_ids=plan.sequence_ids,
        scheduled_token_counts=plan.scheduled_token_counts,
        computed_token_counts=plan.computed_token_counts,
        new_block_counts=plan.new_block_counts,
        new_block_ids=plan.new_block_ids,
        finished_sequence_ids=plan.finished_sequence_ids,
        preempted_sequence_ids=plan.preempted_sequence_ids,
    )


def serve(
    runtime: SimRuntime,
    requests: list[Request],
    *,
    grammar_keys: Mapping[str, bytes] = NO_KEYS,
    **config: int,
) -> tuple[dict[str, list[int]], dict[str, Any], Scheduler]:
    """The tokens and the finish reason of each request, scheduled by the core with two steps in flight.

    `grammar_keys` are by request."""
    sizes = {"num_blocks": 64, "block_size": 16, "max_running": 8, "max_step_tokens": 64, **config}
    scheduler = Scheduler(SchedulerConfig(**sizes), lambda: 0.0)
    for request in requests:
        scheduler.add_request(request)
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    reasons: dict[str, Any] = {}
    flight: list[StepResult] = []
    while not scheduler.is_idle:
        while (plan := scheduler.schedule()) is not None:
            output = runtime.execute(step_input(plan, grammar_keys))
            assert not output.errors
            stopped = frozenset(output.stopped_sequence_ids)
            flight.append(StepResult(output.step_id, output.sequence_ids, output.token_ids, stopped))
        for event in scheduler.apply(flight.pop(0)):
            assert isinstance(event, TokenEvent)
            tokens[event.sequence.request.request_id].append(event.token_id)
            if event.finish_reason is not None:
                reasons[event.sequence.request.request_id] = event.finish_reason
    return tokens, reasons, scheduler


def some_requests(num: int, **sampling: Any) -> list[Request]:
    rng = random.Random(3)
    return [
        Request(
            request_id=f"r{i}",
            prompt_token_ids=[rng.randrange(3, 320) for _ in range(rng.randrange(1, 100))],
            max_tokens=rng.randrange(1, 60),
            sampling=Sampling(seed=i, **sampling),
        )
        for i in range(num)
    ]


def test_answers_are_as_long_as_asked_and_depend_on_nothing_else(model: Path) -> None:
    requests = some_requests(20)
    together, reasons, _ = serve(ready(model), requests)
    assert {name: len(tokens) for name, tokens in together.items()} == {r.request_id: r.max_tokens for r in requests}
    assert set(reasons.values()) == {FinishReason.LENGTH}
    alone: dict[str, list[int]] = {}
    for request in requests:
        alone |= serve(ready(model), [request])[0]
    assert alone == together
    squeezed, _, scheduler = serve(ready(model, num_blocks=12), requests, num_blocks=12)
    assert scheduler.stats.num_preemptions > 0
    assert squeezed == together


def test_tokens_have_text_and_differ_from_seed_to_seed(model: Path) -> None:
    requests = [Request(f"r{i}", [5], 50, sampling=Sampling(seed=i)) for i in range(30)]
    tokens, _, _ = serve(ready(model), requests)
    every = {token for answer in tokens.values() for token in answer}
    assert len({tuple(answer) for answer in tokens.values()}) == 30
    assert len(every) > 250
    assert not every & {0, 1, EOS_TOKEN_ID}


def test_a_stop_token_ends_an_answer_but_not_before_min_tokens(model: Path) -> None:
    plain = serve(ready(model), [Request("r", [5], 40, sampling=Sampling(seed=1))])[0]["r"]
    stop = (plain[10],)
    place = plain.index(plain[10])
    tokens, reasons, _ = serve(ready(model), [Request("r", [5], 40, sampling=Sampling(seed=1, stop_token_ids=stop))])
    assert (tokens["r"], reasons["r"]) == (plain[: place + 1], FinishReason.STOP)
    sampling = Sampling(seed=1, stop_token_ids=stop, min_tokens=20)
    tokens, _, _ = serve(ready(model), [Request("r", [5], 40, sampling=sampling)])
    assert plain[10] not in tokens["r"][:20]
    assert len(tokens["r"]) > 20
    assert tokens["r"][:place] == plain[:place]


def test_logprobs_come_with_the_tokens_that_ask_for_them(model: Path) -> None:
    runtime = ready(model)
    plan = Scheduler(SchedulerConfig(64, 16, 8, 64), lambda: 0.0)
    plan.add_request(Request("a", [5], 4, sampling=Sampling(seed=1, logprobs=3)))
    plan.add_request(Request("b", [5], 4, sampling=Sampling(seed=1)))
    first = plan.schedule()
    assert first is not None
    output = runtime.execute(step_input(first))
    (logprobs,) = output.logprobs.values()
    assert logprobs.token_id == output.token_ids[0]
    assert len({token for token, _ in logprobs.top}) == 3


def test_a_step_that_disagrees_is_refused_and_changes_nothing(model: Path) -> None:
    runtime = ready(model)
    new = NewSequence(1, "r", [5, 6], 2, Sampling(), [0])
    wrong = StepInput(1, [new], [1], [2], [1], [0], [], [], [])
    with pytest.raises(StateMismatch):
        runtime.execute(wrong)
    assert runtime.num_sequences == 0
    right = StepInput(1, [new], [1], [2], [0], [0], [], [], [])
    assert runtime.execute(right).sequence_ids == [1]
    with pytest.raises(StateMismatch, match="computed_token_count"):
        runtime.execute(StepInput(2, [], [1], [1], [7], [0], [], [], []))
    assert runtime.num_sequences == 1


def test_one_bad_sequence_does_not_spoil_the_step(model: Path) -> None:
    bad = NewSequence(1, "bad", [5], 1, Sampling(temperature=-1.0), [0])
    good = NewSequence(2, "good", [5], 1, Sampling(), [1])
    output = ready(model).execute(StepInput(1, [bad, good], [1, 2], [1, 1], [0, 0], [0, 0], [], [], []))
    assert list(output.errors) == [1]
    assert output.sequence_ids == [2]


def test_what_has_a_form_keeps_to_it_whatever_happens(model: Path) -> None:
    grammar = schema({"type": "array", "items": {"enum": ["one", "two", 3]}, "minItems": 2, "maxItems": 5})
    key, samplings = grammar_key(grammar), [Sampling(seed=i, stop_token_ids=(EOS_TOKEN_ID,)) for i in range(8)]
    formed = [Request(f"formed {i}", [5] * 30, 60, sampling=sampling) for i, sampling in enumerate(samplings)]
    requests = [*some_requests(4), *formed]
    outcomes = []
    for num_blocks in (64, 9):
        runtime = ready(model, num_blocks=num_blocks)
        runtime.prepare_grammar(key, grammar, [key], 1)
        keys = {request.request_id: key for request in formed}
        tokens, reasons, scheduler = serve(runtime, requests, num_blocks=num_blocks, grammar_keys=keys)
        outcomes.append(tokens)
    assert scheduler.stats.num_preemptions > 0 and outcomes[0] == outcomes[1]
    answers = []
    for request in formed:
        assert reasons[request.request_id] is FinishReason.STOP
        answers.append(json.loads(tiny_tokenizer().decode(tokens[request.request_id][:-1])))
    assert all(2 <= len(answer) <= 5 and set(answer) <= {"one", "two", 3} for answer in answers)
    assert len({str(answer) for answer in answers}) > 4


def test_a_form_that_cannot_be_kept_to_ends_its_sequence_alone(model: Path) -> None:
    runtime, grammar = ready(model), lark('start: "a"')
    key = grammar_key(grammar)
    runtime.prepare_grammar(key, grammar, [key], 1)
    ends = Sampling(stop_token_ids=(EOS_TOKEN_ID,), min_tokens=9)
    new = [
        NewSequence(1, "unknown", [5], 1, Sampling(), [0], grammar_key=bytes(32)),
        NewSequence(2, "ends too early", [5], 1, ends, [1], grammar_key=key),
        NewSequence(3, "good", [5], 1, Sampling(), [2], grammar_key=key),
    ]
    first = runtime.execute(StepInput(1, new, [1, 2, 3], [1] * 3, [0] * 3, [0] * 3, [], [], []))
    assert list(first.errors) == [1] and "not known here" in first.errors[1]
    assert first.sequence_ids == [2, 3] and len(set(first.token_ids)) == 1
    second = runtime.execute(StepInput(2, [], [2, 3], [1] * 2, [1] * 2, [0] * 2, [], [1], []))
    assert second.error_reasons == {2: "GRAMMAR_INVALID"} and second.sequence_ids == [3]


def test_a_step_takes_the_time_of_the_cost_model(model: Path) -> None:
    sleeps: list[float] = []
    runtime = ready(model, sleeps=sleeps, sim_compute_flops=1e6, sim_bandwidth_bytes=1e9, sim_latency_s=2.0)
    runtime.execute(StepInput(1, [NewSequence(1, "r", [5] * 9, 9, Sampling(), [0])], [1], [9], [0], [0], [], [], []))
    cost: CostModel = runtime._runner._cost  # type: ignore[union-attr]
    wanted = cost.step_seconds(StepLoad.of([9], [0], 1))
    assert wanted > 2.0
    assert len(sleeps) == 1
    assert wanted - 0.5 < sleeps[0] <= wanted


def test_without_rates_no_time_is_spent(model: Path) -> None:
    sleeps: list[float] = []
    runtime = ready(model, sleeps=sleeps)
    runtime.execute(StepInput(1, [NewSequence(1, "r", [5], 1, Sampling(), [0])], [1], [1], [0], [0], [], [], []))
    assert sleeps == []


def test_memory_is_planned_and_its_lack_explained(model: Path) -> None:
    runtime = loaded(model, sim_memory_bytes=10**7, memory_fraction=0.5)
    report = runtime.determine_available_memory(64, 8)
    assert report.available_bytes == 5 * 10**6 - report.weight_bytes - report.activation_bytes
    assert loaded(model, kv_cache_bytes=4096).determine_available_memory(64, 8).available_bytes == 4096
    assert loaded(model, memory_limit_bytes=3 * 10**6).determine_available_memory(64, 8).limit_bytes == 3 * 10**6
    with pytest.raises(RuntimeFailure, match="sim_memory_bytes") as caught:
        loaded(model, sim_memory_bytes=10**6, memory_fraction=0.1).determine_available_memory(64, 8)
    assert caught.value.code == "out_of_memory"
    with pytest.raises(RuntimeFailure, match="weights"):
        loaded(model, sim_memory_bytes=1000)
    with pytest.raises(RuntimeFailure, match="KV cache"):
        loaded(model, sim_memory_bytes=10**6).initialize_cache(10**6, 16, 256)


def test_phases_and_repeats(model: Path) -> None:
    runtime = loaded(model)
    again = runtime.load_model(model, "auto", lambda *_: None, lambda: False)
    assert again.already_loaded
    assert not runtime.load_model(model, "float16", lambda *_: None, lambda: False).already_loaded
    with pytest.raises(RuntimeFailure, match="InitializeCache"):
        runtime.execute(StepInput(1, [], [], [], [], [], [], [], []))
    runtime.reset(Phase.INITIALISED)
    with pytest.raises(RuntimeFailure, match="LoadModel"):
        runtime.determine_available_memory(64, 8)
    assert runtime.init_device(RankPlace(tensor_parallel_size=2)).rendezvous


def test_a_load_can_be_cancelled_and_a_missing_model_is_said(model: Path, tmp_path: Path) -> None:
    runtime = SimRuntime(WorkerSettings(device="sim"))
    with pytest.raises(LoadCancelled):
        runtime.load_model(model, "auto", lambda *_: None, lambda: True)
    with pytest.raises(CheckpointError):
        runtime.load_model(tmp_path / "none", "auto", lambda *_: None, lambda: False)


def test_reset_drops_sequences(model: Path) -> None:
    runtime = ready(model)
    step = StepInput(1, [NewSequence(1, "r", [5], 1, Sampling(), [0])], [1], [1], [0], [0], [], [], [])
    first = runtime.execute(step).token_ids
    assert runtime.num_sequences == 1
    runtime.reset(Phase.CACHED)
    assert runtime.num_sequences == 0
    assert runtime.execute(step).token_ids == first


def test_it_comes_without_torch(model: Path) -> None:
    code = (
        "import sys; import worker_service.main, worker_service.runtime.sim; "
        "print({'torch', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
