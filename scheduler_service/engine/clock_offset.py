"""How far a worker's wall clock is from ours, estimated from the steps that go there and back.

The estimate is NTP's (RFC 5905, section 8): with t1 the sending here, t2 the arrival there, t3 the answer there and t4
its arrival here, the offset is ((t2 - t1) + (t3 - t4)) / 2, off by at most half of the delay (t4 - t1) - (t3 - t2).
The exchange with the least delay counts: what a step waits in queues on its way only adds to the delay.
"""

from scheduler_service.engine.ports import StepTimings

# Clocks drift by some 20 µs a second, so an estimate is forgotten after one to two of these.
_WINDOW_NS = 60_000_000_000


class ClockOffset:
    """One worker's clock against ours. Positive where the worker's is ahead."""

    __slots__ = ("_before", "_now", "_window_end")

    def __init__(self) -> None:
        # The least delay of this window and of the one before, each with its offset, in nanoseconds.
        self._now: tuple[int, int] | None = None
        self._before: tuple[int, int] | None = None
        self._window_end = 0

    @property
    def is_known(self) -> bool:
        """Whether a step has lately been there and back."""
        return self._now is not None or self._before is not None

    @property
    def offset_s(self) -> float:
        """Worker's clock less ours, in seconds; 0 while it is not known."""
        return self._chosen()[1] / 1e9

    @property
    def error_s(self) -> float:
        """How much the offset may be wrong by, in seconds, either way."""
        return self._chosen()[0] / 2e9

    def note(self, sent_ns: int, timings: StepTimings, received_ns: int) -> None:
        """Takes one exchange: our wall clock when a step was sent and when its answer came, in nanoseconds."""
        if received_ns > self._window_end:
            self._window_end = received_ns + _WINDOW_NS
            self._before, self._now = self._now, None
        arrived_ns = timings.start_unix_ns - timings.queue_ns
        answered_ns = timings.answered_unix_ns or timings.start_unix_ns + timings.busy_ns
        delay_ns = (received_ns - sent_ns) - (answered_ns - arrived_ns)
        if delay_ns >= 0 and (self._now is None or delay_ns < self._now[0]):
            self._now = (delay_ns, ((arrived_ns - sent_ns) + (answered_ns - received_ns)) // 2)

    def _chosen(self) -> tuple[int, int]:
        return min((found for found in (self._now, self._before) if found is not None), default=(0, 0))
