"""The parent of a worker on a node, without Ray."""

import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from stepwire.placement import rank_actor
from stepwire.placement.rank_actor import Launch, RankActor

SAY = "import os; print(os.environ.get('STEPWIRE_PORT'), os.environ['KEY'], flush=True); "
WAIT = "import signal; signal.pause()"


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    return Launch(
        "worker 1", ("-c", SAY + WAIT), {"KEY": "secret"}, ("STEPWIRE_PORT",), f"{tmp_path}/log", is_first=True
    )


async def test_a_worker_gets_the_nodes_environment_less_what_is_set_there_of_settings(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("STEPWIRE_PORT", "7")
    actor = RankActor()
    assert await actor.start(replace(launch, arguments=("-c", SAY + "raise SystemExit(3)"))) > 0
    status, text = await actor.wait()
    assert status == 3
    assert text == f"worker 1 exited with status 3: None secret; log: {tmp_path}/log"
    assert launch.spec().command[0] == sys.executable


async def test_a_signal_reaches_the_worker_and_its_end_is_told(launch: Launch) -> None:
    actor = RankActor()
    await actor.start(launch)
    await actor.send(signal.SIGKILL)
    status, text = await actor.wait()
    assert (status, "worker 1 was killed by SIGKILL" in text) == (-9, True)


async def test_an_actor_that_has_started_nothing_has_nothing_to_tell() -> None:
    with pytest.raises(RuntimeError, match="no worker was started"):
        await RankActor().wait()


def test_a_port_is_kept_where_it_is_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert rank_actor._free_port("127.0.0.1", port) not in (0, port)
    assert rank_actor._free_port("127.0.0.1", port) == port
    assert rank_actor._free_port("127.0.0.1", 0) > 0
