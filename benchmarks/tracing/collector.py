"""The receiver of `stepwire traces` on a thread of its own: it takes spans also while this program waits for others."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from stepwire.traces import TraceStore, serve_receiver


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
        is_up.wait()
        yield endpoints[0]
    finally:
        stop.set()
        thread.join()
