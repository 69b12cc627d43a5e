"""Workers that are killed, stopped or break in the middle of streams: clients see a pause, and nothing is left behind.

Real processes; a simulated device where a model would add nothing.
"""

import asyncio
import os
import random
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler_service.engine.group import LOST_AFTER_S
from stepwire.client import AsyncClient, Client, ModelState
from tests.support.stack import Server, processes_of, serve, tiny_limits
from tests.support.streams import FollowedStream, Job, assert_whole, finished, undisturbed, until
from tests.support.tiny_checkpoint import make_tiny_llama, tiny_tokenizer

MAX_MODEL_LEN = 2048
NUM_KILLS = 5 if os.environ.get("STEPWIRE_TEST_FULL") else 2
SIM = ("--device=sim", "--sim-latency-s=0.004")
JOBS = [Job("abc " * (1 + 9 * i), max_tokens=150 + 10 * i, seed=i) for i in range(6)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", max_position_count=MAX_MODEL_LEN)


def limits(*more: str) -> list[str]:
    return [*tiny_limits(MAX_MODEL_LEN, 4 * MAX_MODEL_LEN // 16), *more]


@pytest.fixture
def server(model: Path, tmp_path: Path) -> Iterator[Server]:
    with serve(model, tmp_path, *limits(*SIM)) as server:
        yield server


async def until_ready(server: Server, pid_before: int) -> None:
    """Waits until another worker serves."""
    await until(
        lambda: server.pids.get("worker") not in (pid_before, None) and server.model().state is ModelState.READY
    )


def worker_lines(server: Server) -> dict[int, str]:
    """Command lines of the workers, one that stands by among them, by process id."""
    return {pid: line for pid, line in processes_of(server.mark).items() if " worker " in line}


def empty(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


def limit_memory(pid: int, more_bytes: int) -> None:
    """What goes beyond what a process has now and so much more is refused."""
    num_pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    limit = num_pages * resource.getpagesize() + more_bytes
    resource.prlimit(pid, resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


def lift_limit(pid: int) -> None:
    resource.prlimit(pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


async def test_streams_survive_kills_of_a_real_worker_in_prefill_and_decode(model: Path, tmp_path: Path) -> None:
    r = random.Random(7)
    jobs = [Job("lorem ipsum " * (1 + 4 * i), 400 + 20 * i, seed=i, temperature=(i % 2) * 1.0) for i in range(6)]
    jobs += [Job("lorem", 400, seed=i, n=i, regex=r"([a-z ]{9}: [0-9]{6}\n){200}") for i in (1, 2)]
    with serve(model, tmp_path, *limits("--dtype=float32")) as server:
        async with AsyncClient(server.target) as client:
            expected = await undisturbed(client, jobs)
            streams: list[FollowedStream] = []
            for _ in range(NUM_KILLS):
                streams += [FollowedStream(client, job) for job in jobs]
                # From the first chunk of the first prompt to the middle of the outputs.
                await asyncio.sleep(r.uniform(0.0, 0.4))
                pid = server.pids["worker"]
                os.kill(pid, signal.SIGKILL)
                await until_ready(server, pid)
            await finished(streams)
            assert_whole(streams, expected)
        assert server.wait_idle()
        assert "Traceback" not in server.output


@pytest.mark.full
async def test_a_standby_takes_the_place_of_a_worker_within_a_second_or_two(model: Path, tmp_path: Path) -> None:
    with serve(model, tmp_path, *limits("--dtype=float32", "--standby")) as server:
        async with AsyncClient(server.target) as client:
            await until(lambda: len(worker_lines(server)) == 2, 60)
            expected = await undisturbed(client, JOBS)
            pid = server.pids["worker"]
            standby = max(worker_lines(server))
            streams = [FollowedStream(client, job) for job in JOBS]
            await asyncio.gather(*(stream.began.wait() for stream in streams))
            os.kill(pid, signal.SIGKILL)
            await finished(streams)
            assert_whole(streams, expected)
            assert server.pids["worker"] == standby


async def test_health_and_state_tell_of_a_recovery(server: Server) -> None:
    """vllm #16259, sglang #18421, PR #21486: a service whose workers are gone must not look alive."""
    async with AsyncClient(server.target) as client:
        pid = server.pids["worker"]
        os.kill(pid, signal.SIGKILL)
        # Long before it would count as silent.
        await until(lambda: server.model().state is ModelState.RECOVERING, LOST_AFTER_S)
        await until_ready(server, pid)
        assert (await client.complete("abc", max_tokens=3)).finish_reason == "length"
    assert "worker 0 was killed by SIGKILL" in server.output
    assert server.output.count('"epoch_ended"') + server.output.count("epoch_ended ") == 1


@pytest.mark.full
async def test_a_worker_that_is_stopped_is_replaced_and_its_zombie_is_gone(server: Server) -> None:
    """vllm #7454, #16841: a silent hang is noticed within seconds, not minutes."""
    async with AsyncClient(server.target) as client:
        expected = await undisturbed(client, JOBS)
        streams = [FollowedStream(client, job) for job in JOBS]
        await asyncio.gather(*(stream.began.wait() for stream in streams))
        pid = server.pids["worker"]
        os.kill(pid, signal.SIGSTOP)
        await finished(streams)
        assert_whole(streams, expected)
        assert server.pids["worker"] != pid
        assert is_gone(pid)
    assert "no sign of life" in server.output
    assert "worker 0 did not answer and was killed" in server.output


async def test_memory_that_runs_out_inside_a_step_ends_the_request_and_not_the_service(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Plain torch allocates the attention of a long prompt in each step: here from the kernel, not from what malloc has.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(1 << 18))
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    flags = limits("--dtype=float32", "--no-native-kernels", "--no-prefix-caching", "--max-num-batched-tokens=2048")
    short, long = Job("abc", 400), Job("y" * 1500, 60, seed=1)
    with serve(model, tmp_path, *flags) as server:
        async with AsyncClient(server.target) as client:
            # One after the other: when the limit comes, the products of these steps are compiled.
            expected = await undisturbed(client, [short]) | await undisturbed(client, [long])
            pid = server.pids["worker"]
            # Room for all but the attention of that prompt.
            limit_memory(pid, 1 << 20)
            hungry = FollowedStream(client, long)
            await finished([hungry])
            lift_limit(pid)
            assert hungry.error is not None
            assert hungry.error.reason == "REQUEST_ENDS_WORKERS"
            assert '"OUT_OF_MEMORY"' in server.output
            streams = [FollowedStream(client, job) for job in (short, long)]
            await finished(streams)
            assert_whole(streams, expected)
            assert server.pids["worker"] == pid


async def test_a_worker_that_could_not_compile_for_want_of_memory_is_replaced(model: Path, tmp_path: Path) -> None:
    """oneDNN does not mend itself: what was new to that process would fail for ever."""
    flags = limits("--dtype=float32", "--no-native-kernels")
    with serve(model, tmp_path, *flags) as server:
        async with AsyncClient(server.target) as client:
            jobs = [Job("abc" * (i + 1), 200, seed=i) for i in range(3)]
            expected = {}
            for job in jobs[1:]:
                expected |= await undisturbed(client, [job])
            pid = server.pids["worker"]
            limit_memory(pid, 0)
            # Three rows are new.
            streams = [FollowedStream(client, job) for job in jobs]
            await finished(streams)
            assert server.pids["worker"] != pid
            expected |= await undisturbed(client, jobs[:1])
            assert_whole(streams, expected)
        assert server.output.count("epoch_ended") == 1


async def test_a_request_that_kills_its_worker_each_time_fails_alone(model: Path, tmp_path: Path) -> None:
    """DeepSpeed-MII #299: one request that crashes must not block all others."""
    poison = tiny_tokenizer().encode("Q").ids
    with serve(model, tmp_path, *limits(*SIM, f"--sim-fatal-token={poison[-1]}")) as server:
        async with AsyncClient(server.target) as client:
            jobs = [Job("abc" * (i + 1), 1200, seed=i) for i in range(5)]
            expected = await undisturbed(client, jobs)
            streams = [FollowedStream(client, job) for job in jobs]
            await asyncio.gather(*(stream.began.wait() for stream in streams))
            bad = FollowedStream(client, Job("Q", 100), request_id="bad")
            await finished([*streams, bad], within_s=90)
            assert bad.error is not None
            assert (bad.error.reason, bad.error.metadata["request_id"]) == ("REQUEST_ENDS_WORKERS", "bad")
            assert_whole(streams, expected)
            assert len((await client.complete("abc", max_tokens=2)).token_ids) == 2
        assert "killed by SIGABRT" in server.output


async def test_a_worker_that_cannot_come_back_ends_the_service_with_its_own_status(model: Path, tmp_path: Path) -> None:
    """TensorRT-LLM #18663: a service that has lost its workers must not answer 503 for ever, but end."""
    copy = make_tiny_llama(tmp_path / "gone", max_position_count=MAX_MODEL_LEN)
    with serve(copy, tmp_path, *limits(*SIM, "--restart-budget=1")) as server:
        async with AsyncClient(server.target) as client:
            stream = FollowedStream(client, Job("abc", 1900))
            await stream.began.wait()
            empty(copy)
            os.kill(server.pids["worker"], signal.SIGKILL)
            await finished([stream])
        assert stream.error is not None
        assert (stream.error.reason, stream.error.retry_after_s) == ("WORKER_FAILED", None)
        assert "restart_budget" in stream.error.message
        assert str(copy) in stream.error.message
        assert await asyncio.to_thread(server.process.wait, 20) == 3


def test_nothing_is_left_when_the_supervisor_is_killed_with_a_standby(model: Path, tmp_path: Path) -> None:
    """vllm #34643: no orphans, whoever is killed."""
    with serve(model, tmp_path, *limits(*SIM, "--standby")) as server:
        deadline = time.monotonic() + 60
        while len(processes_of(server.mark)) < 5:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        server.process.kill()
        server.process.wait()


def test_a_drain_that_loses_its_worker_still_delivers(model: Path, tmp_path: Path) -> None:
    # What is waited for is the worker's successor, however slow the machine.
    with serve(model, tmp_path, *limits(*SIM, "--shutdown-timeout=120")) as server:
        with Client(server.target) as client, client.generate("abc", max_tokens=600, ignore_eos=True) as stream:
            next(stream)
            server.send(signal.SIGTERM)
            os.kill(server.pids["worker"], signal.SIGKILL)
            tokens = [token for event in stream for token in getattr(event, "token_ids", ())]
        assert len(tokens) == 600
        assert server.process.wait(60) == 0, server.output


async def test_a_restart_store_without_room_costs_a_read_and_no_request(model: Path, tmp_path: Path) -> None:
    with serve(model, tmp_path, *limits("--dtype=float32", "--restart-store-bytes=1")) as server:
        async with AsyncClient(server.target) as client:
            expected = await undisturbed(client, JOBS)
            streams = [FollowedStream(client, job) for job in JOBS]
            await asyncio.gather(*(stream.began.wait() for stream in streams))
            os.kill(server.pids["worker"], signal.SIGKILL)
            await finished(streams)
            assert_whole(streams, expected)


async def test_streams_go_on_when_their_scheduler_is_killed(server: Server) -> None:
    """sglang #18421: no zombie service after a scheduler crash; its worker stays, and its clients keep their place."""
    async with AsyncClient(server.target) as client:
        expected = await undisturbed(client, JOBS)
        streams = [FollowedStream(client, job) for job in JOBS]
        await asyncio.gather(*(stream.began.wait() for stream in streams))
        pids = server.pids
        os.kill(pids["scheduler"], signal.SIGKILL)
        await finished(streams)
        assert_whole(streams, expected)
        assert server.pids["worker"] == pids["worker"]
        assert server.pids["scheduler"] != pids["scheduler"]
