"""A worker that is killed in the middle of streams: clients hear the cause at once, and nothing is left behind."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from stepwire.client import AsyncClient, Output, StepwireError
from tests.support.stack import Server, serve, tiny_limits
from tests.support.tiny_checkpoint import make_tiny_llama

MAX_MODEL_LEN = 8192
NUM_STREAMS = 4
ERROR_WITHIN_S = 2.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", max_position_count=MAX_MODEL_LEN)


@pytest.fixture
def server(model: Path, tmp_path: Path) -> Iterator[Server]:
    with serve(model, tmp_path, *tiny_limits(MAX_MODEL_LEN, 4 * MAX_MODEL_LEN // 16)) as server:
        yield server


class Stream:
    """A request that would run for long, and how it ended."""

    def __init__(self, client: AsyncClient) -> None:
        self._events = client.generate("abc", max_tokens=8000, ignore_eos=True)
        self.began = asyncio.Event()
        self.positions: list[int] = []
        self.error: StepwireError | None = None
        self.ended_at = 0.0
        self.task = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        try:
            async for event in self._events:
                if isinstance(event, Output):
                    self.positions.extend(event.positions)
                    self.began.set()
        except StepwireError as error:
            self.error = error
        self.ended_at = time.monotonic()
        self.began.set()


async def test_clients_hear_the_cause_within_two_seconds_and_serve_ends(server: Server) -> None:
    pids = server.pids
    async with AsyncClient(server.target) as client:
        streams = [Stream(client) for _ in range(NUM_STREAMS)]
        await asyncio.gather(*(stream.began.wait() for stream in streams))
        os.kill(pids["worker"], signal.SIGKILL)
        killed_at = time.monotonic()
        await asyncio.gather(*(stream.task for stream in streams))
    for stream in streams:
        assert stream.error is not None
        assert stream.error.code is grpc.StatusCode.UNAVAILABLE
        assert stream.ended_at - killed_at < ERROR_WITHIN_S
        assert stream.positions == list(range(len(stream.positions)))
    assert await asyncio.to_thread(server.process.wait, 20) == 1
    assert "worker 0 was killed by SIGKILL" in server.output
    assert str(server.worker_log_path) in server.output
    assert "Traceback" not in server.output


async def test_a_scheduler_that_is_killed_takes_its_worker_with_it(server: Server) -> None:
    async with AsyncClient(server.target) as client:
        stream = Stream(client)
        await stream.began.wait()
        os.kill(server.pids["scheduler"], signal.SIGKILL)
        await stream.task
    assert stream.error is not None
    assert stream.error.code is grpc.StatusCode.UNAVAILABLE
    assert await asyncio.to_thread(server.process.wait, 20) == 1
    assert "scheduler was killed by SIGKILL" in server.output
