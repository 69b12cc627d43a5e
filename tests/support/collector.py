"""A trace collector in a thread of its own, for sessions of tests with an event loop each."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from benchmarks.tracing.collector import receiving
from stepwire.telemetry import names
from stepwire.traces import Trace, TraceStore

_POLL_S = 0.05


class Collector:
    """What the processes of a session have reported. `endpoint` is what they take as --otlp-endpoint."""

    def __init__(self, store: TraceStore, endpoint: str) -> None:
        self._store = store
        self.endpoint = endpoint

    def wait_for(self, request_id: str, is_whole: Callable[[Trace], bool], within_s: float = 20.0) -> Trace:
        """A request's trace once it is whole. Raises AssertionError with what there is."""
        deadline = time.monotonic() + within_s
        while True:
            trace = self._store.by_attribute(names.REQUEST_ID, request_id)
            if trace is not None and is_whole(trace):
                return trace
            seen = trace and [(span.service, span.name) for span in trace.spans]
            assert time.monotonic() < deadline, f"the trace of {request_id} is not whole: {seen}"
            time.sleep(_POLL_S)

    def find(self, span_name: str) -> list[Trace]:
        """The traces with a span of this name."""
        return list(self._store.recent(limit=1000, matches=lambda t: any(s.name == span_name for s in t.spans)))


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector on a free port."""
    store = TraceStore()
    with receiving(store) as endpoint:
        yield Collector(store, endpoint)
