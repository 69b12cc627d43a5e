"""A scheduler, a worker that somebody else started, and the network between them: cut, slow, away, taken over."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from stepwire.client import AsyncClient
from stepwire.supervisor.ports import free_port
from tests.support.fault_proxy import FaultProxy, fault_proxy
from tests.support.processes import running, wait_serving
from tests.support.stack import MARK_VARIABLE, marked, tiny_limits
from tests.support.streams import FollowedStream, Job, assert_whole, finished, undisturbed, until
from tests.support.tiny_checkpoint import make_tiny_llama

JOBS = [Job("abc " * (1 + 5 * i), max_tokens=300 + 10 * i, seed=i) for i in range(4)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", max_position_count=2048)


@dataclass
class Pair:
    """A worker, a proxy before it, and a scheduler that knows the proxy alone."""

    target: str
    proxy: FaultProxy
    worker_pid: int
    scheduler_log: Path
    worker_log: Path

    @property
    def epochs(self) -> int:
        """Epochs that have ended."""
        return self.scheduler_log.read_text().count('"epoch_ended"')


@contextmanager
def scheduler(model: Path, worker: str, log: Path, mark: str) -> Iterator[str]:
    """A scheduler that serves; its address."""
    port = free_port()
    arguments = ["scheduler", "--model", str(model), "--port", str(port), "--workers", worker]
    with running([*arguments, *tiny_limits(2048, 512)], log, {MARK_VARIABLE: mark}) as process:
        wait_serving(f"127.0.0.1:{port}", process, log)
        yield f"127.0.0.1:{port}"


@asynccontextmanager
async def pair(model: Path, folder: Path) -> AsyncIterator[Pair]:
    worker_port, worker_log, scheduler_log = free_port(), folder / "worker.log", folder / "scheduler.log"
    sim = ["--device", "sim", "--sim-latency-s", "0.004"]
    with ExitStack() as stack:
        mark = stack.enter_context(marked())
        arguments = ["worker", "--port", str(worker_port), *sim]
        worker = stack.enter_context(running(arguments, worker_log, {MARK_VARIABLE: mark}))
        async with fault_proxy(worker_port) as proxy:
            serving = scheduler(model, f"127.0.0.1:{proxy.port}", scheduler_log, mark)
            # In a thread: the proxy lives in this one.
            target = await asyncio.to_thread(serving.__enter__)
            try:
                yield Pair(target, proxy, worker.pid, scheduler_log, worker_log)
            finally:
                await asyncio.to_thread(serving.__exit__, None, None, None)


async def test_a_network_that_is_cut_costs_a_pause_and_no_load(model: Path, tmp_path: Path) -> None:
    async with pair(model, tmp_path) as found, AsyncClient(found.target) as client:
        expected = await undisturbed(client, JOBS)
        streams = [FollowedStream(client, job) for job in JOBS]
        for number in range(1, 4):
            before = sum(stream.num_tokens for stream in streams)
            await until(lambda before=before: sum(stream.num_tokens for stream in streams) > before + 40)
            found.proxy.cut()
            await until(lambda number=number: found.epochs == number)
        await finished(streams)
        assert_whole(streams, expected)
        assert found.worker_log.read_text().count('"model_loaded"') == 1


@pytest.mark.full
async def test_a_slow_network_is_no_loss(model: Path, tmp_path: Path) -> None:
    async with pair(model, tmp_path) as found, AsyncClient(found.target) as client:
        jobs = [Job("abc", 40, seed=1), Job("def", 40, seed=2)]
        expected = await undisturbed(client, jobs)
        found.proxy.delay_s = 0.1
        streams = [FollowedStream(client, job) for job in jobs]
        await finished(streams)
        assert_whole(streams, expected)
        assert found.epochs == 0


@pytest.mark.full
async def test_a_network_that_is_away_for_long_costs_a_pause(model: Path, tmp_path: Path) -> None:
    """vllm #7454, #16841: what is silent is given up after seconds, and taken again when it is back."""
    async with pair(model, tmp_path) as found, AsyncClient(found.target) as client:
        expected = await undisturbed(client, JOBS)
        streams = [FollowedStream(client, job) for job in JOBS]
        await asyncio.gather(*(stream.began.wait() for stream in streams))
        found.proxy.flows.clear()
        await until(lambda: found.epochs == 1)
        found.proxy.flows.set()
        await finished(streams)
        assert_whole(streams, expected)


@pytest.mark.full
async def test_a_worker_that_was_stopped_comes_back_into_a_new_epoch(model: Path, tmp_path: Path) -> None:
    """A zombie's epoch is over: it is reset, and what it held of the old one never counts."""
    async with pair(model, tmp_path) as found, AsyncClient(found.target) as client:
        expected = await undisturbed(client, JOBS)
        streams = [FollowedStream(client, job) for job in JOBS]
        await asyncio.gather(*(stream.began.wait() for stream in streams))
        os.kill(found.worker_pid, signal.SIGSTOP)
        await until(lambda: found.epochs == 1)
        os.kill(found.worker_pid, signal.SIGCONT)
        await finished(streams)
        assert_whole(streams, expected)
        assert '"epoch": 2' in found.worker_log.read_text()


async def test_the_newer_of_two_schedulers_has_the_worker_and_the_older_says_so(model: Path, tmp_path: Path) -> None:
    async with pair(model, tmp_path) as found, AsyncClient(found.target, resume_s=0) as client:
        stream = FollowedStream(client, Job("abc", 1900))
        await stream.began.wait()
        with marked() as mark:
            serving = scheduler(model, f"127.0.0.1:{found.proxy.port}", tmp_path / "newer.log", mark)
            target = await asyncio.to_thread(serving.__enter__)
            try:
                await finished([stream])
                assert stream.error is not None
                assert stream.error.reason == "FENCED"
                async with AsyncClient(target) as other:
                    assert len((await other.complete("abc", max_tokens=5, ignore_eos=True)).token_ids) == 5
            finally:
                await asyncio.to_thread(serving.__exit__, None, None, None)
        assert "another scheduler" in found.scheduler_log.read_text()


async def test_a_scheduler_that_is_killed_leaves_its_worker_to_the_next(model: Path, tmp_path: Path) -> None:
    """vllm #32136: when the head is lost, the worker waits, and whoever comes next takes it over as it is."""
    async with pair(model, tmp_path) as found:
        with marked() as mark:
            for number in range(2):
                log = tmp_path / f"next{number}.log"
                serving = scheduler(model, f"127.0.0.1:{found.proxy.port}", log, mark)
                target = await asyncio.to_thread(serving.__enter__)
                try:
                    async with AsyncClient(target) as client:
                        assert len((await client.complete("abc", max_tokens=5, ignore_eos=True)).token_ids) == 5
                finally:
                    await asyncio.to_thread(serving.__exit__, None, None, None)
                assert '"already_loaded": true' in log.read_text()
                assert '"kept": "cached"' in log.read_text()
        assert found.worker_log.read_text().count('"model_loaded"') == 1
