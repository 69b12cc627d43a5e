"""A group of ranks over the nodes of a Ray cluster: placed, served, and taken up again when a node loses its worker.

Two raylets on this machine, with an address each.
"""

import asyncio
import importlib.util
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from stepwire.client import AsyncClient, ModelState, StepwireError
from stepwire.client.admin import AdminClient
from stepwire.supervisor.ports import free_port
from tests.support.processes import run, wait_serving
from tests.support.ray_cluster import RayCluster, ray_cluster
from tests.support.stack import processes_of, serve, tiny_limits
from tests.support.streams import FollowedStream, Job, assert_whole, finished, undisturbed, until
from tests.support.tiny_checkpoint import make_tiny_llama

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed (requirements/ray.txt)"),
    pytest.mark.timeout(300),
]

KEY = "an-admin-key-of-some-length"
JOBS = [Job("lorem ipsum " * (1 + 4 * i), 200 + 20 * i, seed=i, temperature=(i % 2) * 1.0) for i in range(4)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", max_position_count=1024)


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster(2) as cluster:
        yield cluster


@dataclass(frozen=True)
class Worker:
    """A worker process on a node, and the actor that is its parent."""

    pid: int
    parent: int


def flags(cluster: RayCluster, *more: str) -> list[str]:
    """Rank by rank on a node of its own."""
    ray = ["--placement=ray", f"--ray-address={cluster.address}", "--ray-strategy=STRICT_SPREAD"]
    return [*ray, "--dtype=float32", *tiny_limits(1024, 256), *more]


def workers(cluster: RayCluster) -> dict[str, Worker]:
    """The workers that run on the cluster, by the address of their node."""
    found = {}
    for pid, line in processes_of(cluster.mark).items():
        if " worker " in line:
            stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            found[line.partition("--host=")[2].partition(" ")[0]] = Worker(pid, int(stat[1]))
    return found


async def follow(client: AsyncClient) -> list[FollowedStream]:
    """Streams that are under way."""
    streams = [FollowedStream(client, job) for job in JOBS]
    await asyncio.gather(*(stream.began.wait() for stream in streams))
    return streams


async def test_a_group_over_two_nodes_goes_on_when_a_node_loses_its_worker_or_its_actor(
    model: Path, cluster: RayCluster, tmp_path: Path
) -> None:
    """vllm #16259: a server whose Ray workers crashed stayed up and answered nothing. ray #59778: nodes that were
    started together failed."""
    with serve(model, tmp_path, *flags(cluster, "--tp=2")) as server:
        first, second = cluster.hosts
        placed = workers(cluster)
        assert placed.keys() == {first, second}
        async with AsyncClient(server.target) as client:
            expected = await undisturbed(client, JOBS)
            streams = await follow(client)
            os.kill(placed[second].pid, signal.SIGKILL)
            await finished(streams, within_s=120)
            assert_whole(streams, expected)
            again = workers(cluster)
            assert again[first] == placed[first], "a worker that nobody touched was replaced"
            assert again[second].parent != placed[second].parent, "Ray did not start the actor again"
            (told,) = [line for line in server.output.splitlines() if line.endswith("it is started again")]
            assert "was killed by SIGKILL" in told
            assert f"(on {second})" in told

            streams = await follow(client)
            os.kill(again[first].parent, signal.SIGKILL)
            await finished(streams, within_s=120)
            assert_whole(streams, expected)
            assert workers(cluster)[first].pid != again[first].pid
            assert "was lost with its Ray actor" in server.output
        assert "Traceback" not in server.output
    assert not workers(cluster)


async def test_a_model_is_loaded_and_unloaded_while_another_serves(
    model: Path, cluster: RayCluster, tmp_path: Path
) -> None:
    # Two places, on one machine with one memory.
    share = ("--memory-fraction=0.3", f"--admin-key={KEY}")
    with serve(model, tmp_path, *flags(cluster, "--served-model-name=a", *share)) as server:
        (before,) = workers(cluster).values()
        async with AsyncClient(server.target) as client:
            expected = await undisturbed(client, JOBS)
            streams = await follow(client)
            with AdminClient(server.target, key=KEY) as operator:
                await asyncio.to_thread(operator.load_model, str(model), name="b")
                placed = workers(cluster)
                assert len(placed) == 2 and before in placed.values()
                loaded = [FollowedStream(client, job, model="b") for job in JOBS]
                await asyncio.gather(*(stream.began.wait() for stream in loaded))
                lost = next(host for host, worker in placed.items() if worker != before)
                os.kill(placed[lost].pid, signal.SIGKILL)
                await finished(loaded, within_s=120)
                assert_whole(loaded, expected)

                streams += await follow(client)
                settings = {"worker_timeout": "2"}
                with pytest.raises(StepwireError) as refused:
                    await asyncio.to_thread(operator.load_model, str(model), name="c", settings=settings)
                assert refused.value.reason == "DEVICE_UNAVAILABLE"
                for part in (
                    "no room for 1 workers with {'CPU': 1} each",
                    "within 2 s",
                    "2 nodes together: {'CPU': 0.0}",
                ):
                    assert part in refused.value.message
                await asyncio.to_thread(operator.unload_model, "b")
                await until(lambda: list(workers(cluster).values()) == [before])
                # The place is free again, also for one whose start fails, and free after that.
                broken = {"worker_timeout": "60", "num_kv_blocks": "100000000"}
                with pytest.raises(StepwireError):
                    await asyncio.to_thread(operator.load_model, str(model), name="c", settings=broken)
                await until(lambda: list(workers(cluster).values()) == [before])
                await asyncio.to_thread(operator.load_model, str(model), name="c")
                assert len(workers(cluster)) == 2
            await finished(streams, within_s=60)
            assert_whole(streams, expected)
        assert "Traceback" not in server.output
    assert not workers(cluster)
    # What was loaded has given its place back, too.
    with serve(model, tmp_path / "other", *flags(cluster, "--tp=2")):
        assert len(workers(cluster)) == 2


async def test_a_head_that_hangs_for_a_while_is_told_of_once_and_ends_nothing(
    model: Path, cluster: RayCluster, tmp_path: Path
) -> None:
    with serve(model, tmp_path, *flags(cluster, f"--admin-key={KEY}")) as server:
        async with AsyncClient(server.target) as client:
            expected = await undisturbed(client, JOBS)
            streams = await follow(client)
            with cluster.hanging_head():
                told = f"the head of the Ray cluster at {cluster.address} does not answer (it takes connections but"
                await until(lambda: told in server.output, 20)
                await finished(streams, within_s=60)
                assert_whole(streams, expected)
                with AdminClient(server.target, key=KEY) as operator, pytest.raises(StepwireError) as refused:
                    await asyncio.to_thread(operator.load_model, str(model), name="b", timeout=20)
                assert told in refused.value.message
            await until(lambda: f"{cluster.address} answers again" in server.output, 20)
            assert server.output.count("does not answer (") == 1
            assert server.model().state is ModelState.READY


def test_a_cluster_without_room_is_refused_with_what_it_has(model: Path, cluster: RayCluster, tmp_path: Path) -> None:
    wish = flags(cluster, "--tp=1", "--replicas=3", "--worker-timeout=3", f"--log-dir={tmp_path}")
    done = run("serve", "--model", str(model), *wish)
    assert done.returncode == 1
    assert "no room for 3 groups of 1 workers with {'CPU': 1} each" in done.stderr
    assert not workers(cluster)


def test_a_head_that_is_none_is_refused_at_once(model: Path, tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    done = run("serve", "--model", str(model), "--placement=ray", f"--ray-address={address}", timeout=30)
    assert done.returncode == 1
    assert f"no Ray cluster answers at {address}" in done.stderr
    assert "--ray-address" in done.stderr


@pytest.mark.full
async def test_a_rank_whose_node_is_lost_goes_on_at_another(model: Path, tmp_path: Path) -> None:
    with ray_cluster(2) as cluster, serve(model, tmp_path, *flags(cluster, "--tp=2")) as server:
        lost = cluster.hosts[1]
        spare = cluster.add_node()
        async with AsyncClient(server.target) as client:
            expected = await undisturbed(client, JOBS)
            streams = await follow(client)
            cluster.lose_node(lost)
            await until(lambda: spare in workers(cluster), 90)
            await finished(streams, within_s=120)
            assert_whole(streams, expected)
        await until(lambda: "worker_moved" in server.output, 90)
        assert server.model().state is ModelState.READY


@pytest.mark.full
async def test_without_its_head_streams_go_on_and_all_ends_in_order_before_ray_ends_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of the cluster's nodes too; a minute by default.
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "40")
    with ray_cluster(2) as cluster, serve(model, tmp_path, *flags(cluster, "--tp=2")) as server:
        async with AsyncClient(server.target, resume_s=0) as client:
            expected = await undisturbed(client, JOBS)
            streams = await follow(client)
            cluster.lose_head()
            await finished(streams, within_s=60)
            assert_whole(streams, expected)
            told = f"the head of the Ray cluster at {cluster.address} does not answer (no connection"
            await until(lambda: told in server.output, 10)
            assert len((await client.complete("abc", max_tokens=5, ignore_eos=True)).token_ids) == 5
            os.kill(workers(cluster)[cluster.hosts[1]].pid, signal.SIGKILL)
            (late,) = [FollowedStream(client, Job("abc", 20))]
            await finished([late], within_s=60)
            assert late.error is not None
            assert late.error.reason == "WORKER_FAILED"
            assert "is not started again: the head of the Ray cluster" in late.error.message
        assert await asyncio.to_thread(server.process.wait, 30) == 1
        assert f"{cluster.address} has not answered for" in server.output
        assert "start the cluster anew" in server.output


@pytest.mark.full
async def test_a_head_that_hangs_for_good_ends_all_in_order(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "20")
    with ray_cluster(2) as cluster, serve(model, tmp_path, *flags(cluster, "--tp=2")) as server, cluster.hanging_head():
        async with AsyncClient(server.target, resume_s=0) as client:
            assert len((await client.complete("abc", max_tokens=5, ignore_eos=True)).token_ids) == 5
        assert await asyncio.to_thread(server.process.wait, 60) == 1
        assert f"{cluster.address} has not answered for" in server.output
        assert "it hangs, or is stopped" in server.output


@pytest.mark.full
async def test_the_end_waits_for_no_load_that_waits_for_room(model: Path, cluster: RayCluster, tmp_path: Path) -> None:
    with serve(model, tmp_path, *flags(cluster, "--tp=2", f"--admin-key={KEY}")) as server:

        def load() -> None:
            with AdminClient(server.target, key=KEY) as operator:
                operator.load_model(str(model), name="b", settings={"worker_timeout": "600"})

        loading = asyncio.create_task(asyncio.to_thread(load))
        done, _ = await asyncio.wait([loading], timeout=4)
        assert not done
        server.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(server.process.wait, 30) == 0
        with pytest.raises(StepwireError):
            await loading
        assert "Traceback" not in server.output
    with serve(model, tmp_path / "other", *flags(cluster, "--tp=2")):
        assert len(workers(cluster)) == 2


@pytest.mark.full
async def test_a_scheduler_that_finds_all_models_unloaded_serves_the_first_at_a_new_place(
    model: Path, cluster: RayCluster, tmp_path: Path
) -> None:
    with serve(model, tmp_path, *flags(cluster, f"--admin-key={KEY}")) as server:
        with AdminClient(server.target, key=KEY) as operator:
            operator.unload_model(model.name)
        await until(lambda: not workers(cluster))
        (pid,) = [pid for pid, line in processes_of(server.mark).items() if " scheduler " in line]
        os.kill(pid, signal.SIGKILL)
        await until(lambda: len(workers(cluster)) == 1, 60)
        await asyncio.to_thread(wait_serving, server.target, server.process, server.log_path)
        async with AsyncClient(server.target) as client:
            assert len((await client.complete("abc", max_tokens=5, ignore_eos=True)).token_ids) == 5


@pytest.mark.full
async def test_several_models_are_placed_and_one_that_loses_its_worker_is_no_matter_to_the_other(
    model: Path, cluster: RayCluster, tmp_path: Path
) -> None:
    entries = [f"--models=model={model},served_model_name={name},memory_fraction=0.3" for name in "ab"]
    with serve(None, tmp_path, *entries, *flags(cluster, f"--admin-key={KEY}")) as server:
        placed = workers(cluster)
        assert len(placed) == 2
        async with AsyncClient(server.target) as client:
            expected = await undisturbed(client, JOBS)
            streams = {name: [FollowedStream(client, job, model=name) for job in JOBS] for name in "ab"}
            await asyncio.gather(*(stream.began.wait() for each in streams.values() for stream in each))
            os.kill(placed[cluster.hosts[1]].pid, signal.SIGKILL)
            await finished([stream for each in streams.values() for stream in each], within_s=120)
            for each in streams.values():
                assert_whole(each, expected)
            with AdminClient(server.target, key=KEY) as operator:
                assert sorted(operator.get_state(model=name).epoch for name in "ab") == [1, 2]
                operator.unload_model("b")
        # What the other had is free for whoever comes.
        with serve(model, tmp_path / "other", *flags(cluster)):
            assert len(workers(cluster)) == 2
