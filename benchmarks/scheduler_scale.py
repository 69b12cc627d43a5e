"""Whether a long queue costs anything: a step's time with 100,000 waiting over that with 100, and memory a request.

Both queues are measured in turns in one process, with the same 256 sequences running.
"""

import gc
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.report import Bar, report
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.plan import StepPlan, StepResult
from scheduler_service.core.request import Request
from scheduler_service.core.scheduler import Scheduler

RUNNING = 256
SHORT, LONG = 100, 100_000
PROMPT_TOKENS = 128
STEPS, ROUNDS = 60, 9
TENANTS, PRIORITIES = 16, 4


def filled_scheduler(num_waiting: int) -> tuple[Scheduler, int]:
    """A scheduler with 256 running sequences that never end, and bytes of memory for each waiting request.

    Waiting requests differ in tenant, priority and deadline. Bytes are what the process grew by, without token ids.
    """
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=RUNNING * 1024,
            block_size=16,
            max_running=RUNNING,
            max_step_tokens=4096,
            max_queued_requests=10 * LONG,
            max_queued_tokens=LONG * 10 * PROMPT_TOKENS,
        ),
        time.monotonic,
    )
    for index in range(RUNNING):
        scheduler.add_request(Request(f"running-{index}", prompt(index), 10_000, priority=PRIORITIES))
    for _ in range(2 * RUNNING * PROMPT_TOKENS // 4096):
        step(scheduler)
    prompts = [prompt(RUNNING + index) for index in range(num_waiting)]
    gc.collect()
    before = resident_bytes()
    far = time.monotonic() + 86_400
    for index, token_ids in enumerate(prompts):
        request = Request(
            f"waiting-{index}",
            token_ids,
            64,
            priority=index % PRIORITIES,
            tenant=f"tenant-{index % TENANTS}",
            deadline=far + index if index % 2 else None,
        )
        scheduler.add_request(request)
    return scheduler, (resident_bytes() - before) // num_waiting


def prompt(index: int) -> list[int]:
    """A prompt that shares nothing with others."""
    return [(index * 7919 + position * 31) % 50_000 for position in range(PROMPT_TOKENS)]


def resident_bytes() -> int:
    """Memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def answer(plan: StepPlan) -> StepResult:
    """A token for every sequence whose step reaches its last one."""
    ids = [
        sequence.sequence_id
        for sequence, num, computed in zip(
            plan.sequences, plan.scheduled_token_counts, plan.computed_token_counts, strict=True
        )
        if computed + num >= sequence.prompt_token_count
    ]
    return StepResult(plan.step_id, ids, [7] * len(ids))


def step(scheduler: Scheduler) -> float:
    """One step planned and applied; microseconds of the scheduler's own time."""
    began = time.perf_counter_ns()
    scheduler.expire()
    plan = scheduler.schedule()
    spent = time.perf_counter_ns() - began
    if plan is None:
        raise RuntimeError("there was nothing to plan")
    result = answer(plan)
    began = time.perf_counter_ns()
    scheduler.apply(result)
    return (spent + time.perf_counter_ns() - began) / 1e3


def rounds(schedulers: dict[int, Scheduler]) -> Iterator[dict[int, float]]:
    """Median step times of each scheduler, in interleaved rounds."""
    for _ in range(ROUNDS):
        yield {num: statistics.median(step(scheduler) for _ in range(STEPS)) for num, scheduler in schedulers.items()}


def main() -> int:
    """Measures and reports."""
    short, _ = filled_scheduler(SHORT)
    long, bytes_per_waiting = filled_scheduler(LONG)
    measured = list(rounds({SHORT: short, LONG: long}))
    growth = statistics.median(times[LONG] / times[SHORT] for times in measured)
    return report(
        {
            "queue_growth": Bar(round(growth, 3), 1.15, "at most"),
            "bytes_per_waiting": Bar(bytes_per_waiting, 4096, "at most"),
        },
        {
            "step_us_100": round(statistics.median(times[SHORT] for times in measured), 1),
            "step_us_100000": round(statistics.median(times[LONG] for times in measured), 1),
        },
    )


if __name__ == "__main__":
    sys.exit(main())
