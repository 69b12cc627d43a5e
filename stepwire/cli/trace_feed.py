"""Traces in the order in which they are finished."""

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass

from stepwire.traces.store import Trace, TraceStore

# Processes send their spans every half second; after this long without one a trace is taken as finished.
QUIET_S = 1.5
# The same while the parent of a span is missing: it has not ended, or its process sends its spans elsewhere.
_QUIET_OPEN_FACTOR = 10
_LOOK_EVERY_S = 0.25
_MAX_REMEMBERED = 10_000


@dataclass(slots=True)
class _Seen:
    num_spans: int
    changed_at: float
    num_reported: int = 0


async def finished_traces(
    store: TraceStore, stop: asyncio.Event, *, quiet_s: float = QUIET_S, look_every_s: float = _LOOK_EVERY_S
) -> AsyncIterator[Trace]:
    """Each trace once no span of it came for a while, and again when more came later; until `stop`."""
    seen: OrderedDict[str, _Seen] = OrderedDict()
    loop = asyncio.get_running_loop()
    while not stop.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), look_every_s)
        now = loop.time()
        for trace in reversed(store.recent(limit=100)):
            entry = seen.setdefault(trace.trace_id, _Seen(0, now))
            if entry.num_spans != len(trace.spans):
                entry.num_spans, entry.changed_at = len(trace.spans), now
            elif entry.num_reported < entry.num_spans and now - entry.changed_at >= _patience(trace, quiet_s):
                entry.num_reported = entry.num_spans
                yield trace
        while len(seen) > _MAX_REMEMBERED:
            seen.popitem(last=False)


def _patience(trace: Trace, quiet_s: float) -> float:
    known = {span.span_id for span in trace.spans}
    is_open = any(span.parent_id and span.parent_id not in known for span in trace.spans)
    return quiet_s * _QUIET_OPEN_FACTOR if is_open else quiet_s
