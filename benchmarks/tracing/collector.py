"""The receiver of `stepwire traces` on a thread of its own: it takes spans also while this program waits for others."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from stepwire.traces import TraceStore, serve_receiver

_START_S = 10.0


@contextmanager
def receiving(store: TraceStore) -> Iterator[str]:
    """The address of a receiver that fills a store, as services take it with --otlp-endpoint."""
    endpoints: list[str] = []
    is_up, stop = threading.Event(), threading.Event()

    async def receive() -> None:
        receiver = await serve_receiver(store, port=0)
        endpoints.append(receiver.endpoint)
        is_up.set()
        await asyncio.to_thread(stop.wait)
        await receiver.stop()

    thread = threading.Thread(target=asyncio.run, args=(receive(),), name="receiver")
    thread.start()
    try:
        if not is_up.wait(_START_S):
            raise TimeoutError("the receiver of traces did not start")
        yield endpoints[0]
    finally:
        stop.set()
        thread.join(_START_S)
