"""A `stepwire` command whose tracing is switched while it runs: SIGUSR1 turns it off, SIGUSR2 on again.

Off is what a service does that was started without a collector. On, a request is traced when its caller says so: none
is drawn.
"""

import signal
import sys
from collections.abc import Callable
from typing import Any

from stepwire.rpc.environment import prepare_grpc

prepare_grpc()

from scheduler_service.engine.step_tracing import StepTracing  # noqa: E402
from stepwire.cli.main import main  # noqa: E402
from stepwire.telemetry.spans import SpanRecorder  # noqa: E402

SWITCH_OFF, SWITCH_ON = signal.SIGUSR1, signal.SIGUSR2


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
    sinks: dict[int, Any] = {}

    def switch(number: int, _frame: object) -> None:
        for recorder in recorders:
            recorder._bound = 0
            sink = sinks.setdefault(id(recorder), recorder._sink)
            recorder._sink = sink if number == SWITCH_ON else None
        for tracing in step_tracings:
            tracing._is_on = number == SWITCH_ON

    for number in (SWITCH_OFF, SWITCH_ON):
        signal.signal(number, switch)
    main()


if __name__ == "__main__":
    sys.exit(_run())
