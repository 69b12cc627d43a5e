"""Progress of a start: a bar on a terminal, a log line now and then elsewhere."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import structlog
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

_LINE_EVERY_S = 2.0

_log = structlog.stdlib.get_logger(__name__)


class ProgressReport:
    """How far one phase of a start is on each rank, and which part of it goes on there."""

    def __init__(self, phase: str, bar: Progress | None) -> None:
        self._phase = phase
        self._bar = bar
        self._tasks: dict[int, tuple[TaskID, str]] = {}
        self._next_line = time.monotonic() + _LINE_EVERY_S

    def update(self, rank: int, stage: str, done: int, total: int) -> None:
        """Shows that a rank has done `done` of `total` (bytes or parts) of the part `stage`; 0 for a total that is
        not known."""
        if self._bar is not None:
            self._bar.update(self._task(self._bar, rank, stage), completed=done, total=total or None)
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + _LINE_EVERY_S
            percent = 100 * done // total if total else 0
            _log.info("progress", phase=self._phase, rank=rank, stage=stage, percent=percent)

    def _task(self, bar: Progress, rank: int, stage: str) -> TaskID:
        """The rank's line of the bar. A new part begins it anew: what remains is estimated from that part alone."""
        description = f"{self._phase} rank {rank}" + ("" if stage == self._phase else f": {stage}")
        if rank not in self._tasks:
            self._tasks[rank] = bar.add_task(description, total=None), stage
        task, shown = self._tasks[rank]
        if shown != stage:
            bar.reset(task, description=description)
            self._tasks[rank] = task, stage
        return task


@contextmanager
def progress_report(phase: str) -> Iterator[ProgressReport]:
    """Shows the progress of a phase while the block runs."""
    if not sys.stderr.isatty():
        yield ProgressReport(phase, None)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield ProgressReport(phase, bar)
