"""A TCP proxy that a test puts between two processes, to cut, slow and stop what goes through it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

_CHUNK = 65_536


class FaultProxy:
    """Forwards connections to `target_port` on this machine, in the test's event loop."""

    def __init__(self, target_port: int) -> None:
        self.port = 0
        self.delay_s = 0.0
        """How long each piece of data is held, in each direction."""
        self.flows = asyncio.Event()
        """While it is not set nothing passes, and nothing is lost: a network that is away."""
        self.flows.set()
        self._target_port = target_port
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listens."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def cut(self) -> None:
        """Resets every connection; new ones are taken."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def close(self) -> None:
        """Ends."""
        if self._server is not None:
            self._server.close()
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        # Those that were being connected meanwhile; and what is aborted is closed in the loop's next turn.
        self.cut()
        await asyncio.sleep(0)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._writers.add(writer)
        try:
            there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            self._writers.discard(writer)
            writer.transport.abort()
            return
        pair = (writer, there_writer)
        self._writers.update(pair)
        for source, sink in ((reader, there_writer), (there_reader, writer)):
            task = asyncio.create_task(self._pump(source, sink, pair))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, pair: tuple[asyncio.StreamWriter, ...]
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(_CHUNK):
                await asyncio.sleep(self.delay_s)
                await self.flows.wait()
                sink.write(data)
                await sink.drain()
        for writer in pair:
            self._writers.discard(writer)
            writer.transport.abort()


@contextlib.asynccontextmanager
async def fault_proxy(target_port: int) -> AsyncIterator[FaultProxy]:
    """A proxy while the block runs."""
    proxy = FaultProxy(target_port)
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.close()
