"""Pipeline stages: who comes into which step, and that the stages are kept busy."""

from collections import deque

import pytest

from scheduler_service.core.cohorts import cohort_size
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.plan import StepPlan
from scheduler_service.core.request import Request
from scheduler_service.core.scheduler import Scheduler
from tests.support.model_worker import ModelWorker


class Rig:
    """A scheduler of `num_stages`, which always sends what it may, and a worker that answers the oldest step."""

    def __init__(self, num_stages: int, max_running: int = 12) -> None:
        config = SchedulerConfig(
            256, 4, max_running, 64, max_in_flight=num_stages + 1, num_stages=num_stages, prefix_caching=False
        )
        self.scheduler = Scheduler(config, lambda: 0.0)
        self.worker = ModelWorker(256, 4, 10**9)
        self.sent: deque[StepPlan] = deque()
        self.num_delivered = 0

    def add(self, count: int, max_tokens: int = 20, length: int = 3) -> None:
        for _ in range(count):
            number = len(self.scheduler._roster.live)
            self.scheduler.add_request(Request(f"r{number}.{self.worker.last_step_id}", [1] * length, max_tokens))

    def send(self) -> None:
        while (plan := self.scheduler.schedule()) is not None:
            self.sent.append(plan)

    def answer(self) -> None:
        self.num_delivered += len(self.scheduler.apply(self.worker.execute(self.sent.popleft())))


@pytest.mark.parametrize(
    ("num", "stages", "size"), [(0, 2, 1), (1, 2, 1), (2, 2, 1), (3, 2, 2), (8, 2, 4), (9, 3, 3), (10, 3, 4)]
)
def test_the_parts_are_even(num: int, stages: int, size: int) -> None:
    assert cohort_size(num, stages) == size


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_the_running_set_is_spread_over_steps_that_keep_every_stage_busy(num_stages: int) -> None:
    rig = Rig(num_stages)
    rig.add(12)
    for _ in range(20):
        rig.send()
        assert len(rig.sent) >= num_stages
        assert all(len(plan.sequences) == 12 // num_stages for plan in list(rig.sent)[:num_stages])
        rig.answer()


def test_parts_stay_even_when_sequences_go() -> None:
    rig = Rig(2)
    rig.add(6, max_tokens=4)
    rig.add(6, max_tokens=40)
    for _ in range(30):
        rig.send()
        rig.answer()
    rig.send()
    assert [len(plan.sequences) for plan in rig.sent] == [3, 3]


def test_a_sequence_alone_goes_step_by_step() -> None:
    rig = Rig(3)
    rig.add(1, max_tokens=5)
    rig.send()
    assert [len(plan.sequences) for plan in rig.sent] == [1]
    while rig.sent:
        rig.answer()
        rig.send()
    assert rig.num_delivered == 5
    assert rig.scheduler.is_idle


def test_nobody_starves_while_others_come() -> None:
    """Those that wait longest for a step are in the next one, whatever their order."""
    rig = Rig(2, max_running=5)
    rig.add(5, max_tokens=30)
    for _ in range(40):
        rig.send()
        rig.answer()
    counts = [len(sequence.token_ids) for sequence in rig.scheduler._roster.running]
    assert len(counts) == 5
    assert max(counts) - min(counts) <= 2
