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
    """How far one phase is on each rank."""

    def __init__(self, phase: str, bar: Progress | None) -> None:
        self._phase = phase
        self._bar = bar
        self._tasks: dict[int, TaskID] = {}
        self._next_line = time.monotonic() + _LINE_EVERY_S

    def update(self, rank: int, stage: str, done: int, total: int) -> None:
        """Shows that a rank has done `done` of `total` (bytes or parts)."""
        if self._bar is not None:
            if rank not in self._tasks:
                self._tasks[rank] = self._bar.add_task(f"{self._phase} rank {rank}", total=total)
            self._bar.update(self._tasks[rank], completed=done, total=total)
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + _LINE_EVERY_S
            percent = 100 * done // total if total else 0
            _log.info("progress", phase=self._phase, rank=rank, stage=stage, percent=percent)


@contextmanager
def progress_report(phase: str) -> Iterator[ProgressReport]:
    """Shows the progress of a phase while the block runs."""
    if not sys.stderr.isatty():
        yield ProgressReport(phase, None)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield ProgressReport(phase, bar)
