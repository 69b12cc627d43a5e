import random
import sys
from subprocess import run

import pytest

from scheduler_service.core.config import SchedulerConfig
from stepwire.simulation.arrivals import Arrival, Mix, parse_lengths, poisson_arrivals
from stepwire.simulation.cost import HARDWARE, CostModel, StepLoad
from stepwire.simulation.shapes import SHAPES
from stepwire.simulation.simulator import Assumptions, Simulation, SimulationResult

COST = CostModel(SHAPES["llama-3.2-1b"], HARDWARE["l4"])


def simulate(arrivals: list[Arrival], *, told: Assumptions | None = None, **config: int) -> SimulationResult:
    sizes = {"num_blocks": 4096, "block_size": 16, "max_running": 32, "max_step_tokens": 256, **config}
    return Simulation(SchedulerConfig(**sizes), COST, told).run(arrivals)


def some(num: int, rate: float, seed: int = 1, **mix: float) -> list[Arrival]:
    rng = random.Random(seed)
    source = poisson_arrivals(rate, parse_lengths("uniform:20:600"), parse_lengths("uniform:1:80"), rng)
    return list(Mix(**mix).apply([next(source) for _ in range(num)], rng))  # type: ignore[arg-type]


@pytest.mark.parametrize(("prompt", "output"), [(1, 1), (100, 30), (600, 2)])
@pytest.mark.parametrize("max_tokens", [None, 1000])
def test_a_lone_request_takes_its_unloaded_latency(prompt: int, output: int, max_tokens: int | None) -> None:
    record = simulate([Arrival(3.0, prompt, output)], told=Assumptions(max_tokens)).records[0]
    assert record.latency_s == pytest.approx(COST.unloaded_seconds(prompt, output, 256))
    assert record.ttft_s == pytest.approx(COST.prefill_seconds(prompt, 256))
    assert (record.wait_s, record.num_output_tokens, record.error) == (0.0, output, None)


def test_the_device_runs_one_step_after_the_other_without_a_gap() -> None:
    """Two requests that arrive together share each step; the plan of a step never waits for the one before it."""
    result = simulate([Arrival(0.0, 16, 5), Arrival(0.0, 16, 5)])
    first = COST.step_seconds(StepLoad.of([16, 16], [0, 0]))
    rest = sum(COST.step_seconds(StepLoad.of([1, 1], [16 + i] * 2)) for i in range(4))
    assert result.duration_s == pytest.approx(first + rest)
    assert result.busy_s == pytest.approx(result.duration_s)
    assert result.num_steps - result.records[0].num_output_tokens <= 1  # and one that only says who has ended


def test_every_request_ends_once_and_what_is_delivered_is_what_was_wanted() -> None:
    arrivals = some(200, rate=20.0)
    result = simulate(arrivals)
    assert [r.num_output_tokens for r in result.records] == [a.num_output_tokens for a in arrivals]
    assert all(record.is_finished for record in result.records)
    assert 0 < result.num_blocks_mean < result.num_blocks_peak <= 4096
    assert result.num_step_tokens >= sum(a.num_prompt_tokens + a.num_output_tokens - 1 for a in arrivals)
    # The tokens of the very last answer come when no time follows in which they could be counted.
    delivered = sum(result.series.columns["tokens/s"]) * result.series.span_s
    assert delivered == pytest.approx(sum(a.num_output_tokens for a in arrivals), abs=32)


def test_a_run_is_repeatable() -> None:
    arrivals = some(100, rate=50.0, high_share=0.3, deadline_s=5.0)
    assert simulate(arrivals).records == simulate(arrivals).records


def test_few_blocks_preempt_and_answers_stay_whole() -> None:
    arrivals = some(60, rate=100.0)
    result = simulate(arrivals, num_blocks=64)
    assert result.num_preemptions > 0
    assert result.num_blocks_peak <= 64
    assert [r.num_output_tokens for r in result.records] == [a.num_output_tokens for a in arrivals]


def test_shared_prefixes_are_found_again() -> None:
    arrivals = some(50, rate=10.0, prefix_share=1.0, num_prefix_tokens=160)
    records = simulate(arrivals).records
    assert sum(record.num_cached_tokens >= 160 for record in records) >= 45
    assert sum(record.num_cached_tokens for record in simulate(some(50, rate=10.0)).records) == 0


def test_what_cannot_be_taken_is_refused_with_its_reason() -> None:
    arrivals = [Arrival(0.0, 100, 10), *(Arrival(0.0, 10, 10) for _ in range(5))]
    errors = [record.error for record in simulate(arrivals, num_blocks=4, max_queued_requests=2).records]
    assert errors[0] == "PROMPT_TOO_LONG"
    assert errors.count("QUEUE_FULL") == 3


@pytest.mark.parametrize("is_blind", [True, False])
def test_deadlines_end_requests_in_time_whoever_knows_of_them(is_blind: bool) -> None:
    arrivals = some(150, rate=300.0, deadline_s=0.6)
    result = simulate(arrivals, told=Assumptions(is_blind=is_blind))
    late = [record for record in result.records if record.error == "DEADLINE_EXCEEDED"]
    assert 10 < len(late) < 150
    for record in result.records:
        assert record.latency_s is not None
        assert record.latency_s <= 0.6 + 1e-9


def test_blind_is_first_come_first_served() -> None:
    arrivals = some(60, rate=1000.0, high_share=0.5)
    blind = simulate(arrivals, told=Assumptions(is_blind=True), max_running=2).records
    started = [record.started_s for record in blind]
    assert started == sorted(started)  # type: ignore[type-var]
    sighted = simulate(arrivals, max_running=2).records

    def mean_wait(records: list, priority: int) -> float:
        waits = [record.wait_s for record in records if record.priority == priority]
        return sum(waits) / len(waits)

    assert mean_wait(sighted, 1) < 0.5 * mean_wait(sighted, 0)
    assert mean_wait(blind, 1) == pytest.approx(mean_wait(blind, 0), rel=0.3)


def test_no_time_at_all_is_a_run_too() -> None:
    cost = CostModel(SHAPES["llama-3.2-1b"], HARDWARE["instant"])
    config = SchedulerConfig(num_blocks=64, block_size=16, max_running=4, max_step_tokens=64)
    result = Simulation(config, cost).run([Arrival(0.0, 20, 5), Arrival(1.0, 20, 5)])
    assert [record.latency_s for record in result.records] == [0.0, 0.0]


def test_a_simulation_needs_neither_grpc_nor_torch() -> None:
    code = "import sys, stepwire.simulation.simulator; print({'grpc', 'torch'} & set(sys.modules))"
    done = run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
