"""How `stepwire serve` ends: after a drain, at once, or with its supervisor; nothing is ever left behind."""

import asyncio
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from stepwire.client import AsyncClient, Client, FinishReason, ModelState, Output, StepwireError
from stepwire.supervisor.ports import free_port
from tests.support.processes import command, environment
from tests.support.processes import wait_serving as wait_for_health
from tests.support.stack import MARK_VARIABLE, Server, marked, serve, tiny_limits
from tests.support.tiny_checkpoint import make_tiny_llama

MAX_MODEL_LEN = 4096
NUM_TOKENS = 2000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", max_position_count=MAX_MODEL_LEN)


@pytest.fixture
def server(model: Path, tmp_path: Path) -> Iterator[Server]:
    with serve(model, tmp_path, *tiny_limits(MAX_MODEL_LEN, 2 * MAX_MODEL_LEN // 16)) as server:
        yield server


async def test_sigterm_takes_no_new_requests_and_lets_running_ones_end(server: Server) -> None:
    async with AsyncClient(server.target) as client:
        stream = client.generate("abc", max_tokens=NUM_TOKENS, ignore_eos=True)
        outputs = [event for event in [await anext(stream), await anext(stream)] if isinstance(event, Output)]
        server.send(signal.SIGTERM)
        while (await client.get_model()).state is not ModelState.DRAINING:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.005)
        with pytest.raises(StepwireError) as caught:
            await client.complete("abc", max_tokens=1)
        assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        assert caught.value.retry_after_s is not None
        outputs += [event async for event in stream if isinstance(event, Output)]
    assert [position for output in outputs for position in output.positions] == list(range(NUM_TOKENS))
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    assert await asyncio.to_thread(server.process.wait, 30) == 0, server.output
    assert "Traceback" not in server.output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_at_once(server: Server, number: signal.Signals) -> None:
    with (
        Client(server.target, resume_s=0) as client,
        client.generate("abc", max_tokens=4000, ignore_eos=True) as stream,
    ):
        next(stream)
        server.send(number)
        while client.get_model().state is not ModelState.DRAINING:
            time.sleep(0.005)
        server.send(number)
        assert server.process.wait(20) == 128 + number
        with pytest.raises(StepwireError) as caught:
            list(stream)
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE


def test_a_request_that_takes_longer_than_the_drain_is_told_so(model: Path, tmp_path: Path) -> None:
    flags = tiny_limits(MAX_MODEL_LEN, MAX_MODEL_LEN // 16, "--shutdown-timeout=0.2")
    with serve(model, tmp_path, *flags) as server, Client(server.target, resume_s=0) as client:
        stream = client.generate("abc", max_tokens=4000, ignore_eos=True)
        next(stream)
        server.send(signal.SIGTERM)
        with pytest.raises(StepwireError) as caught:
            list(stream)
        assert caught.value.reason == "DRAINING"
        assert server.process.wait(20) == 0, server.output


def test_nothing_is_left_of_a_supervisor_that_is_killed(server: Server) -> None:
    server.process.kill()
    server.process.wait()


def test_a_signal_counts_when_nobody_reads_what_is_said(model: Path, tmp_path: Path) -> None:
    port = free_port()
    sizes = tiny_limits(MAX_MODEL_LEN, 2 * MAX_MODEL_LEN // 16, "--device=sim")
    with marked() as mark:
        process = subprocess.Popen(
            command("serve", "--model", str(model), "--port", str(port), "--log-dir", str(tmp_path), *sizes),
            env=environment(**{MARK_VARIABLE: mark}),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        assert process.stderr is not None
        process.stderr.readline()
        process.stderr.close()
        wait_for_health(f"127.0.0.1:{port}", process, tmp_path / f"worker-0.{port}.log")
        process.terminate()
        assert process.wait(20) == 0
