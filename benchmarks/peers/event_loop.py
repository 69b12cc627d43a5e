"""The event loop that services and commands run on, for benchmarks that go in and out of it; see stepwire.rpc.run."""

import asyncio
import sys


def runner() -> asyncio.Runner:
    """Runs one coroutine after the other on one loop."""
    if sys.platform == "win32":
        return asyncio.Runner()
    import uvloop

    return asyncio.Runner(loop_factory=uvloop.new_event_loop)
