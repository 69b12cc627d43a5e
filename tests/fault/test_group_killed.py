"""One rank of a group is killed, or stops: it comes back alone, and the others keep their weights."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from stepwire.client import AsyncClient, ModelState
from tests.support.stack import Server, processes_of, serve, tiny_limits
from tests.support.streams import FollowedStream, Job, assert_whole, finished, undisturbed, until
from tests.support.tiny_checkpoint import make_tiny_llama

JOBS = [Job("lorem ipsum " * (1 + 4 * i), 200 + 20 * i, seed=i, temperature=(i % 2) * 1.0) for i in range(4)]


def workers(server: Server) -> set[int]:
    return {pid for pid, line in processes_of(server.mark).items() if " worker " in line}


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.full)])
async def test_a_rank_that_is_lost_comes_back_alone(tmp_path: Path, how: signal.Signals) -> None:
    """vllm #30112, #27866, PR #46370: a lost rank cost a restart of all. TGI #675: of four ranks one never answered,
    and requests were still taken."""
    model = make_tiny_llama(tmp_path / "tiny", max_position_count=1024)
    flags = tiny_limits(1024, 256, "--tp=2", "--dtype=float32")
    with serve(model, tmp_path, *flags) as server:
        before = workers(server)
        assert len(before) == 2
        async with AsyncClient(server.target) as client:
            expected = await undisturbed(client, JOBS)
            streams = [FollowedStream(client, job) for job in JOBS]
            await asyncio.gather(*(stream.began.wait() for stream in streams))
            lost, kept = sorted(before)
            os.kill(lost, how)
            await until(lambda: server.model().state is ModelState.RECOVERING, 20)
            await finished(streams)
            assert_whole(streams, expected)
            assert kept in workers(server)
            assert lost not in workers(server)
        assert '"kept": "loaded"' in server.output, "the rank that was not lost read its weights again"


@pytest.mark.full
async def test_a_rank_that_takes_longer_to_come_back_than_ranks_wait_for_each_other_costs_one_epoch(
    tmp_path: Path,
) -> None:
    model = make_tiny_llama(tmp_path / "tiny", max_position_count=1024)
    # The imports of a new process take longer.
    flags = tiny_limits(1024, 256, "--tp=2", "--dtype=float32", "--collective-timeout=0.5")
    with serve(model, tmp_path, *flags) as server:
        async with AsyncClient(server.target) as client:
            expected = await undisturbed(client, JOBS)
            streams = [FollowedStream(client, job) for job in JOBS]
            await asyncio.gather(*(stream.began.wait() for stream in streams))
            os.kill(max(workers(server)), signal.SIGKILL)
            await finished(streams)
            assert_whole(streams, expected)
        assert "RENDEZVOUS_FAILED" not in server.output
