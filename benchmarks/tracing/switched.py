"""A `stepwire` command whose tracing is switched while it runs: SIGUSR1 turns it off, SIGUSR2 on again.

Off is what a service does that was started without a collector. On, a request is traced when its caller says so: none
is drawn. With each signal it writes down what it has spent on tracing so far, in the folder that `LEDGER` names: one
line of nanoseconds of processor time and a number of exports, in a file named after the process. That is the time
inside of what makes spans and inside of the export, by the clocks of their threads, so that nothing else disturbs it;
what gRPC's own threads take for an export is not in it (see `export_cost`).
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stepwire.rpc.environment import prepare_grpc

prepare_grpc()

from scheduler_service.engine.step_tracing import StepTracing  # noqa: E402
from scheduler_service.engine.tracing import RequestTrace  # noqa: E402
from stepwire.cli.main import main  # noqa: E402
from stepwire.rpc import interceptors  # noqa: E402
from stepwire.telemetry.export import SpanExporter  # noqa: E402
from stepwire.telemetry.spans import SpanRecorder  # noqa: E402
from worker_service.rpc.spans import SequenceSpans  # noqa: E402

SWITCH_OFF, SWITCH_ON = signal.SIGUSR1, signal.SIGUSR2
LEDGER = "TRACE_COST_LEDGER"


class _Ledger:
    """What was spent, by threads: the event loop's, and the exporter's."""

    def __init__(self) -> None:
        self.spent_ns = 0
        self.num_calls = 0
        self._is_inside = False

    def counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, its time counted unless it is called from within another one."""

        def call(*values: Any, **named: Any) -> Any:
            if self._is_inside:
                return function(*values, **named)
            self._is_inside = True
            self.num_calls += 1
            began = time.thread_time_ns()
            try:
                return function(*values, **named)
            finally:
                self.spent_ns += time.thread_time_ns() - began
                self._is_inside = False

        return call


def _count(ledger: _Ledger, owner: Any, *names: str) -> None:
    for name in names:
        setattr(owner, name, ledger.counted(getattr(owner, name)))


def _remembered(kind: type[Any]) -> list[Any]:
    """All objects of a class that are made from now on."""
    made: list[Any] = []
    begin: Callable[..., None] = kind.__init__

    def remember(self: Any, *values: Any, **named: Any) -> None:
        begin(self, *values, **named)
        made.append(self)

    kind.__init__ = remember
    return made


def _run() -> None:
    recorders, step_tracings = _remembered(SpanRecorder), _remembered(StepTracing)
    loop, exporter = _Ledger(), _Ledger()
    _count(loop, RequestTrace, "__init__", "describe", "accepted", "placed", "token_came", "preempted")
    _count(loop, RequestTrace, "sequence_ended", "delivered", "end")
    _count(loop, StepTracing, "step_sent", "step_written", "step_answered", "step_acknowledged")
    _count(loop, SequenceSpans, "record", "end_all")
    _count(loop, SpanRecorder, "start_span")
    _count(loop, interceptors, "context_from_metadata", "end_rpc_span")
    _count(exporter, SpanExporter, "_export")
    sinks: dict[int, Any] = {}

    def switch(number: int, _frame: object) -> None:
        for recorder in recorders:
            recorder._bound = 0
            sink = sinks.setdefault(id(recorder), recorder._sink)
            recorder._sink = sink if number == SWITCH_ON else None
        for tracing in step_tracings:
            tracing._is_on = number == SWITCH_ON
        line = f"{loop.spent_ns + exporter.spent_ns} {exporter.num_calls}\n"
        (Path(os.environ[LEDGER]) / f"{os.getpid()}").write_text(line)

    for number in (SWITCH_OFF, SWITCH_ON):
        signal.signal(number, switch)
    main()


if __name__ == "__main__":
    sys.exit(_run())
