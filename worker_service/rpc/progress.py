"""Progress that the device thread writes and the event loop reads, and what a load's trace and log show of it."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Any

from opentelemetry.trace import Tracer

from stepwire.rpc.errors import StepwireError
from stepwire.telemetry import names
from stepwire.telemetry.trace import context_of, current_span, record_span
from worker_service.rpc.failures import load_failure
from worker_service.runtime.report import LoadSummary

# At most ten messages a second.
REPORT_INTERVAL_S = 0.1


class LoadProgress:
    """How far a load is; and the wish to end it."""

    def __init__(self) -> None:
        # One tuple, replaced as a whole, so that a reader on another thread sees values that belong together.
        self.now: tuple[str, int, int] = ("inspect", 0, 0)
        self.cancel_reason: StepwireError | None = None

    def report(self, stage: str, loaded_bytes: int, total_bytes: int) -> None:
        """Notes where the load stands; called on the device thread."""
        self.now = (stage, loaded_bytes, total_bytes)

    def is_cancelled(self) -> bool:
        """Whether the load is to stop."""
        return self.cancel_reason is not None


@contextmanager
def load_errors(progress: LoadProgress) -> Iterator[None]:
    """Gives what a load within raises the meaning that its caller is told: why it was stopped, or what its error says
    of the checkpoint."""
    try:
        yield
    except Exception as error:
        failure = progress.cancel_reason or load_failure(error)
        if failure is None:
            raise
        raise failure from error


class WarmUpProgress:
    """How far a warm-up is."""

    def __init__(self) -> None:
        self.now: tuple[int, int] = (0, 0)

    def report(self, num_done: int, num_total: int) -> None:
        """Notes where the warm-up stands; called on the device thread."""
        self.now = (num_done, num_total)


async def changes(progress: LoadProgress | WarmUpProgress, work: asyncio.Task[Any]) -> AsyncGenerator[Any, None]:
    """What `progress.now` changes to while `work` goes on, at most ten times a second."""
    last: Any = None
    while not work.done():
        await asyncio.wait({work}, timeout=REPORT_INTERVAL_S)
        now = progress.now
        if now != last and not work.done():
            last = now
            yield now


def record_phases(tracer: Tracer, summary: LoadSummary, *, rank: int, epoch: int) -> None:
    """Records a span for each phase of a load, below the span that is current: that of the call which asked for it."""
    parent, start_ns = context_of(current_span()), summary.begin_unix_ns
    for phase in summary.phases:
        end_ns = start_ns + phase.duration_ns
        attributes = {names.RANK: rank, names.EPOCH: epoch, names.NUM_BYTES: phase.num_bytes}
        record_span(tracer, names.load_span_name(phase.name), parent, (start_ns, end_ns), attributes=attributes)
        start_ns = end_ns


def seconds_of_phases(summary: LoadSummary) -> dict[str, float]:
    """What a log line says of a load's phases; one that came twice is added up."""
    times_ns: Counter[str] = Counter()
    for phase in summary.phases:
        times_ns[phase.name] += phase.duration_ns
    return {name: round(time_ns / 1e9, 3) for name, time_ns in times_ns.items()}
