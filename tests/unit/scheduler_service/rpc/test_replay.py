"""A recording replays to the same tokens, wherever it begins."""

import random
from collections import deque

import pytest

from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.request import FinishReason, Request
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.engine.flight import FlightFacts, FlightRecorder
from scheduler_service.engine.ports import StepTimings
from scheduler_service.engine.values import Sampling
from scheduler_service.rpc.flight_file import recording
from scheduler_service.rpc.replay import ReplayPlan
from scheduler_service.rpc.worker_messages import step_message, step_result
from stepwire.v1 import flight_pb2
from tests.support.fake_worker import FakeWorker

BLOCK_SIZE = 4
STOP = 3


def facts(num_blocks: int) -> FlightFacts:
    return FlightFacts("/models/m", "f", "auto", "none", "auto", BLOCK_SIZE, num_blocks, 64, 16, 6)


def worker(num_blocks: int) -> FakeWorker:
    return FakeWorker(choices=[STOP, *range(10, 40)], num_blocks=num_blocks, block_size=BLOCK_SIZE, max_model_len=64)


def recorded_run(seed: int, num_kept: int, num_blocks: int = 24) -> tuple[flight_pb2.FlightRecording, FakeWorker]:
    """Requests with shared prefixes, preemptions, cancels and stops, two steps in flight."""
    rng = random.Random(seed)
    config = SchedulerConfig(num_blocks=num_blocks, block_size=BLOCK_SIZE, max_running=6, max_step_tokens=16)
    scheduler, device, recorder = (
        Scheduler(config, clock=lambda: 0.0),
        worker(num_blocks),
        FlightRecorder(num_kept, facts(num_blocks)),
    )
    shared = [rng.randrange(40, 60) for _ in range(12)]
    in_flight: deque[object] = deque()
    for turn in range(120):
        if rng.random() < 0.3:
            prompt = shared[: rng.randrange(13)] + [rng.randrange(40, 60) for _ in range(rng.randrange(1, 9))]
            sampling = Sampling(1.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0, (STOP,), 0, rng.getrandbits(60), None)
            priority = rng.randrange(3)
            scheduler.add_request(
                Request(
                    f"r{turn}",
                    prompt,
                    rng.randrange(1, 20),
                    n=rng.randrange(1, 3),
                    sampling=sampling,
                    priority=priority,
                )
            )
        if rng.random() < 0.05 and turn:
            for name in [f"r{i}" for i in range(turn) if scheduler.sequences_of(f"r{i}")][:1]:
                scheduler.end_request(name, FinishReason.CANCELLED)
        while (plan := scheduler.schedule()) is not None:
            recorder.sent(plan)
            in_flight.append(device.execute(step_message(plan, 1)))
        if in_flight:
            result = step_result(in_flight.popleft())
            recorder.answered(result, StepTimings(1, 2, 3, 4, 5))
            scheduler.apply(result)
    return recording(recorder, 1, "asked for"), device


@pytest.mark.parametrize("seed", range(15))
@pytest.mark.parametrize("num_kept", [1, 7, 30, 1000])
def test_any_window_of_steps_gives_the_recorded_tokens(seed: int, num_kept: int) -> None:
    message, _ = recorded_run(seed, num_kept)
    plan = ReplayPlan(message)
    device = worker(plan.num_blocks)
    num_tokens = 0
    for step in plan.steps:
        result = device.execute(step.step)
        if step.recorded is None:
            assert not result.token_ids
        elif step.recorded.HasField("result"):
            replayed = set(step.step.sequence_ids)
            recorded = step.recorded.result
            before = dict(zip(recorded.sequence_ids, recorded.token_ids, strict=True))
            assert dict(zip(result.sequence_ids, result.token_ids, strict=True)) == {
                i: token for i, token in before.items() if i in replayed
            }
            num_tokens += len(result.token_ids)
    assert len([step for step in plan.steps if step.recorded]) == len(message.steps) <= num_kept
    assert plan.num_left_out <= 1
    assert num_tokens or num_kept == 1
