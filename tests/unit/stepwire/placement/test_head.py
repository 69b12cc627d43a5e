"""Whether the head of a cluster is there, by a server that comes and goes."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from stepwire.placement import head as module
from stepwire.placement.head import Head, ray_limit_s
from stepwire.supervisor.ports import free_port


class Watched:
    """A head, and what was said of it."""

    def __init__(self) -> None:
        self.port = free_port("127.0.0.1")
        self.said: list[str] = []
        self.heard = asyncio.Event()
        self._server: asyncio.Server | None = None

    async def come(self) -> None:
        self._server = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", self.port)

    async def go(self) -> None:
        assert self._server is not None
        self._server.close()
        await self._server.wait_closed()

    async def hear(self) -> str:
        await asyncio.wait_for(self.heard.wait(), 20)
        self.heard.clear()
        return self.said[-1]

    def report(self, text: str) -> None:
        self.said.append(text)
        self.heard.set()


@pytest.fixture
async def watched(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Watched]:
    monkeypatch.setattr(module, "_EVERY_S", 0.01)
    watched = Watched()
    await watched.come()
    yield watched
    await watched.go()


async def test_a_head_that_comes_back_is_told_and_nothing_else_happens(watched: Watched) -> None:
    def too_late(text: str, left_s: float) -> None:
        raise AssertionError(text, left_s)

    # Long enough for whatever machine this is: nothing here waits for the end of it.
    head = Head("127.0.0.1", watched.port, limit_s=600.0)
    with pytest.MonkeyPatch.context() as soon:
        soon.setattr(module, "_TOLD_AFTER", 0.0)
        watch = asyncio.create_task(head.watch(watched.report, too_late))
        await watched.go()
        assert "does not answer: streams go on" in await watched.hear()
        await watched.come()
        assert await watched.hear() == f"the head of the Ray cluster at 127.0.0.1:{watched.port} answers again"
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
    assert len(watched.said) == 2


async def test_a_head_that_stays_away_is_lost_with_time_to_end_in_order(watched: Watched) -> None:
    await watched.go()
    lost: list[Any] = []
    await asyncio.wait_for(
        Head("127.0.0.1", watched.port, limit_s=1.0).watch(watched.report, lambda *said: lost.append(said)), 20
    )
    await watched.come()
    ((text, left_s),) = lost
    assert f"127.0.0.1:{watched.port} has not answered for" in text
    assert "start the cluster anew" in text
    assert 0.1 < left_s < 0.5
    assert len(watched.said) == 1


def test_the_time_that_ray_waits_is_that_of_its_own_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_gcs_rpc_server_reconnect_timeout_s", raising=False)
    assert ray_limit_s() == 60
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "7.5")
    assert ray_limit_s() == 7.5
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "x")
    assert ray_limit_s() == 60
