"""Whether the head of a cluster is there, by a server that comes and goes."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
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
        self.answers = threading.Event()
        self.answers.set()
        self.num_asked = 0
        self.failure: Exception | None = None
        self._server: asyncio.Server | None = None

    def head(self, limit_s: float) -> Head:
        return Head("127.0.0.1", self.port, limit_s, self._ask)

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

    def _ask(self) -> None:
        self.num_asked += 1
        self.answers.wait()
        if self.failure is not None:
            raise self.failure


@pytest.fixture
async def watched(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Watched]:
    monkeypatch.setattr(module, "_EVERY_S", 0.01)
    monkeypatch.setattr(module, "_ANSWER_TIMEOUT_S", 0.05)
    watched = Watched()
    await watched.come()
    yield watched
    watched.answers.set()
    await watched.go()


def too_late(text: str, left_s: float) -> None:
    raise AssertionError(text, left_s)


@asynccontextmanager
async def watching(head: Head, watched: Watched) -> AsyncIterator[None]:
    watch = asyncio.create_task(head.watch(watched.report, too_late))
    try:
        yield
    finally:
        assert not watch.done()
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)


async def test_a_head_that_comes_back_is_told_and_nothing_else_happens(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_TOLD_AFTER", 0.0)
    # Long enough for whatever machine this is: nothing here waits for the end of it.
    async with watching(watched.head(600.0), watched):
        await watched.go()
        text = await watched.hear()
        assert text.startswith(
            f"the head of the Ray cluster at 127.0.0.1:{watched.port} does not answer (no connection"
        )
        assert "): streams go on" in text
        await watched.come()
        assert await watched.hear() == f"the head of the Ray cluster at 127.0.0.1:{watched.port} answers again"
    assert len(watched.said) == 2


async def test_a_head_that_hangs_is_told_of_once_and_asked_once(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its port takes connections all the time: those are the kernel's."""
    monkeypatch.setattr(module, "_TOLD_AFTER", 0.0)
    head = watched.head(600.0)
    async with watching(head, watched):
        watched.answers.clear()
        assert "does not answer (it takes connections but answers nothing: it hangs" in await watched.hear()
        assert head.trouble.endswith(
            "does not answer (it takes connections but answers nothing: it hangs, or is stopped)"
        )
        num_asked = watched.num_asked
        await asyncio.sleep(0.3)
        assert watched.num_asked == num_asked, "a thread for each question that hangs"
        watched.answers.set()
        assert (await watched.hear()).endswith("answers again")
        assert head.trouble == ""
    assert len(watched.said) == 2


async def test_a_head_that_is_slow_for_a_few_seconds_is_not_worth_a_word(watched: Watched) -> None:
    # A tenth of the time after which it would be told of.
    async with watching(watched.head(600.0), watched):
        watched.answers.clear()
        await asyncio.sleep(0.3)
        watched.answers.set()
        num_asked = watched.num_asked
        while watched.num_asked < num_asked + 3:  # noqa: ASYNC110 - a thread tells of nothing
            await asyncio.sleep(0.01)
    assert watched.said == []


async def test_a_head_that_only_has_errors_is_as_good_as_gone(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_TOLD_AFTER", 0.0)
    watched.failure = RuntimeError("no such cluster\nand much more")
    async with watching(watched.head(600.0), watched):
        assert "(it answers with an error: no such cluster): streams go on" in await watched.hear()


@pytest.mark.parametrize(("is_there", "cause"), [(False, "no connection"), (True, "it hangs, or is stopped")])
async def test_a_head_that_stays_away_is_lost_with_time_to_end_in_order(
    watched: Watched, *, is_there: bool, cause: str
) -> None:
    if is_there:
        watched.answers.clear()
    else:
        await watched.go()
    lost: list[Any] = []
    await asyncio.wait_for(watched.head(1.0).watch(watched.report, lambda *said: lost.append(said)), 20)
    if not is_there:
        await watched.come()
    ((text, left_s),) = lost
    assert f"127.0.0.1:{watched.port} has not answered for" in text
    assert cause in text
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
