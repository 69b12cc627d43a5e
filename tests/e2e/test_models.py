"""Several models under one `stepwire serve`: real processes, models loaded and unloaded by the command line."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepwire.client import AsyncClient, ModelState, StepwireError
from stepwire.client.admin import AdminClient
from stepwire.client.admin_types import ServerState
from tests.support.processes import run
from tests.support.stack import Server, processes_of, serve, tiny_limits, wait_serving
from tests.support.streams import FollowedStream, Job, assert_whole, finished, undisturbed, until
from tests.support.tiny_checkpoint import make_tiny_llama

pytestmark = pytest.mark.timeout(300)

MAX_MODEL_LEN = 2048
KEY = "an-admin-key-of-some-length"
JOBS = [Job("abc " * (1 + 9 * i), max_tokens=300, seed=i) for i in range(3)]
SETTINGS = """
max_model_len = 2048
num_kv_blocks = 512
max_num_seqs = 8
max_num_batched_tokens = 64
dtype = "float32"
memory_fraction = 0.3
admin_key = "{key}"

[[models]]
model = "{folder}/a"

[[models]]
model = "{folder}/b"
served_model_name = "second"
max_num_seqs = 4
memory_fraction = 0.25
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three models that differ in their weights."""
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate("abc"):
        make_tiny_llama(folder / name, max_position_count=MAX_MODEL_LEN, seed=seed)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = folder / "settings.toml"
    path.write_text(SETTINGS.format(folder=folder, key=KEY))
    with serve(None, tmp_path_factory.mktemp("stack"), "--config", str(path)) as server:
        yield server


def command(server: Server, *arguments: str) -> tuple[int, str]:
    """Exit status and all that a command of an operator says."""
    done = run("admin", *arguments, "--target", server.target, "--admin-key", KEY)
    return done.returncode, done.stdout + done.stderr


def state_of(server: Server, model: str) -> ServerState:
    with AdminClient(server.target, key=KEY) as client:
        return client.get_state(model=model)


def pid_of(server: Server, model: str) -> int:
    """Of a model's worker."""
    (worker,) = state_of(server, model).workers
    return worker.process_id


async def test_each_answers_by_its_name(server: Server) -> None:
    async with AsyncClient(server.target) as client:
        models = await client.list_models()
        assert [(model.name, model.state) for model in models] == [
            ("a", ModelState.READY),
            ("second", ModelState.READY),
        ]
        answers = {
            name: (await client.complete("abc", model=name, max_tokens=20, temperature=0, ignore_eos=True)).text
            for name in ("a", "second", "")
        }
    assert answers["a"] == answers[""] != answers["second"]


async def stream_on(client: AsyncClient, jobs: list[Job], stop: asyncio.Event) -> int:
    """Streams of the first model, again and again; each is as if nothing happened. Answers how many."""
    expected, count = await undisturbed(client, jobs), 0
    while not stop.is_set():
        streams = [FollowedStream(client, job) for job in jobs]
        await finished(streams)
        assert_whole(streams, expected)
        count += len(streams)
    return count


async def test_a_model_comes_and_goes_beside_streams_of_another(server: Server, folder: Path) -> None:
    async with AsyncClient(server.target) as client:
        stop = asyncio.Event()
        streams = asyncio.create_task(stream_on(client, JOBS, stop))
        path = str(folder / "c")
        with AdminClient(server.target, key=KEY) as operator, pytest.raises(StepwireError) as refused:
            await asyncio.to_thread(operator.load_model, path, settings={"memory_fraction": "0.5"})
        assert refused.value.reason == "OUT_OF_MEMORY"
        for part in ("a 0.30", "second 0.25", "c 0.50", "lower memory_fraction"):
            assert part in refused.value.message
        load = ("load-model", path, "--name", "third", "--set", "max-num-seqs=2")
        status, text = await asyncio.to_thread(command, server, *load)
        assert (status, "third is served" in text) == (0, True), text
        assert (await client.complete("abc", model="third", max_tokens=5, ignore_eos=True)).finish_reason == "length"
        pid = pid_of(server, "third")
        assert await asyncio.to_thread(command, server, "unload-model", "third") == (0, "third is unloaded\n")
        await until(lambda: pid not in processes_of(server.mark))
        stop.set()
        assert await streams > len(JOBS)
        assert [model.name for model in await client.list_models()] == ["a", "second"]
    assert state_of(server, "a").epoch == 1


async def test_a_lost_worker_is_no_matter_to_the_other_model(server: Server) -> None:
    async with AsyncClient(server.target) as client:
        expected = await undisturbed(client, JOBS, model="second")
        pid, stop = pid_of(server, "second"), asyncio.Event()
        others = asyncio.create_task(stream_on(client, JOBS, stop))
        streams = [FollowedStream(client, job, model="second") for job in JOBS]
        await asyncio.gather(*(stream.began.wait() for stream in streams))
        os.kill(pid, signal.SIGKILL)
        await finished(streams)
        assert_whole(streams, expected)
        stop.set()
        await others
    assert [state_of(server, name).epoch for name in ("a", "second")] == [1, 2]
    assert pid_of(server, "second") != pid


@pytest.mark.full
async def test_a_scheduler_that_is_started_anew_serves_what_was_loaded_too(server: Server, folder: Path) -> None:
    with AdminClient(server.target, key=KEY) as operator:
        operator.load_model(str(folder / "c"), settings={"max_num_seqs": "2"})
        before = {name: pid_of(server, name) for name in ("a", "second", "c")}
        pid = server.pids["scheduler"]
        os.kill(pid, signal.SIGKILL)
        await until(lambda: server.pids.get("scheduler") not in (pid, None))
        await asyncio.to_thread(wait_serving, server.target, server.process, server.log_path)
        assert {name: pid_of(server, name) for name in before} == before
        assert state_of(server, "c").model.state is ModelState.READY
        operator.unload_model("c")


@pytest.mark.full
async def test_a_model_that_is_lost_for_good_leaves_the_other(folder: Path, tmp_path: Path) -> None:
    lost = make_tiny_llama(tmp_path / "b", max_position_count=MAX_MODEL_LEN)
    models = [f"--models=model={path},memory_fraction=0.3" for path in (folder / "a", lost)]
    sim = ("--device=sim", "--sim-latency-s=0.004", "--restart-budget=0", f"--admin-key={KEY}")
    with serve(None, tmp_path / "stack", *models, *sim, *tiny_limits(MAX_MODEL_LEN, 512)) as server:
        async with AsyncClient(server.target, resume_s=0) as client:
            pid = pid_of(server, "b")
            streams = {name: FollowedStream(client, Job("abc", 400), model=name) for name in "ab"}
            await asyncio.gather(*(stream.began.wait() for stream in streams.values()))
            # The next worker finds nothing to load.
            for path in lost.iterdir():
                path.unlink()
            os.kill(pid, signal.SIGKILL)
            await finished(list(streams.values()))
            assert streams["a"].error is None
            error = streams["b"].error
            assert error is not None and "restart_budget" in error.message
            # Nobody serves on it, so it is not kept.
            await until(lambda: sum(" worker " in line for line in processes_of(server.mark).values()) == 1)
            assert (await client.complete("abc", model="a", max_tokens=3)).finish_reason == "length"
            with pytest.raises(StepwireError, match="restart_budget"):
                await client.complete("abc", model="b", max_tokens=3)
        assert run("health", "--target", server.target).returncode == 0
        assert run("health", "--target", server.target, "--service", "stepwire.v1.InferenceService/b").returncode == 1
        assert server.process.poll() is None
