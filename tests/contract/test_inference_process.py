"""The scheduler process itself: how it starts, what it says when it cannot, and how it ends."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from loader.checkpoint import open_checkpoint
from stepwire.rpc.errors import StepwireError, from_rpc_error
from stepwire.v1 import inference_pb2 as pb
from stepwire.v1.inference_pb2_grpc import InferenceServiceStub
from tests.support.fake_worker import FakeWorker, FakeWorkerServer, letter_ids
from tests.support.scheduler_server import until
from tests.support.tiny_checkpoint import make_tiny_llama, tiny_tokenizer

PROGRAM = """
import json, sys
from scheduler_service.main import serve
from scheduler_service.settings import SchedulerSettings
from stepwire.rpc.run import run
status = run(serve(SchedulerSettings(**json.loads(sys.argv[1]))))
assert "torch" not in sys.modules, "the scheduler imported torch"
sys.exit(status)
"""
SERVING = health_pb2.HealthCheckResponse.SERVING


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny-model")


@pytest.fixture
async def worker(checkpoint: Path) -> AsyncIterator[FakeWorkerServer]:
    fingerprint = open_checkpoint(checkpoint).fingerprint
    server = FakeWorkerServer(FakeWorker(choices=letter_ids(tiny_tokenizer()), fingerprint=fingerprint))
    await server.start()
    yield server
    await server.kill()


class Process:
    """A scheduler process and what a client does with it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[str] = []
        self._reader = asyncio.create_task(self._read())
        self.address = ""
        self.channel: Any = None

    async def _read(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self.lines.append(line.decode().rstrip())

    async def line_with(self, word: str) -> str:
        def found() -> list[str]:
            assert self.process.returncode is None, self.lines
            return [line for line in self.lines if word in line]

        await until(lambda: bool(found()))
        return found()[0]

    async def connect(self) -> None:
        line = await self.line_with('"listening"')
        self.address = line.split('"address": "')[1].split('"')[0]
        self.channel = grpc.aio.insecure_channel(self.address)

    async def ended(self) -> int:
        status = await asyncio.wait_for(self.process.wait(), 60)
        await self._reader
        return status

    async def health(self, service: str = "") -> int:
        stub = health_pb2_grpc.HealthStub(self.channel)
        return (await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)).status

    async def generate(self, **fields: Any) -> list[pb.GenerateResponse]:
        try:
            call = InferenceServiceStub(self.channel).Generate(pb.GenerateRequest(**fields), timeout=20)
            return [response async for response in call]
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error


@asynccontextmanager
async def scheduler(model: Path | str, worker: str, **settings: Any) -> AsyncIterator[Process]:
    values = {"model": str(model), "workers": [worker], "port": 0, "log_format": "json", **settings}
    process = Process(
        await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            PROGRAM,
            json.dumps(values),
            stderr=asyncio.subprocess.PIPE,
            # As the command sets it.
            env={**os.environ, "GRPC_VERBOSITY": "ERROR", "GRPC_ENABLE_FORK_SUPPORT": "0"},
        )
    )
    try:
        yield process
    finally:
        if process.channel is not None:
            await process.channel.close()
        if process.process.returncode is None:
            process.process.kill()
        await process.ended()


async def test_it_listens_at_once_serves_when_ready_and_drains_on_sigterm(
    checkpoint: Path, worker: FakeWorkerServer
) -> None:
    worker.worker.load_delay_s = 1.0
    async with scheduler(checkpoint, worker.address) as process:
        await process.connect()
        assert await process.health() != SERVING
        with pytest.raises(StepwireError) as caught:
            await process.generate(text="x")
        assert caught.value.reason == "MODEL_NOT_READY"
        assert '"seconds"' in await process.line_with('"ready"')
        assert [await process.health(name) for name in ("", "stepwire.v1.InferenceService")] == [SERVING, SERVING]
        worker.worker.step_delay_s = 0.01
        running = asyncio.create_task(
            process.generate(text="x", model="tiny-model", sampling=pb.SamplingParams(max_tokens=60, ignore_eos=True))
        )
        await until(lambda: bool(worker.worker.sequences))
        process.process.send_signal(signal.SIGTERM)
        await process.line_with('"draining"')
        assert await process.health() != SERVING
        with pytest.raises(StepwireError) as caught:
            await process.generate(text="x")
        assert caught.value.reason == "DRAINING"
        assert (await running)[-1].finished.usage.output_token_count == 60
        assert await process.ended() == 0
        assert not any("Traceback" in line for line in process.lines)


async def test_a_second_signal_ends_it_at_once(checkpoint: Path, worker: FakeWorkerServer) -> None:
    async with scheduler(checkpoint, worker.address) as process:
        await process.connect()
        await process.line_with('"ready"')
        worker.worker.step_delay_s = 0.01
        running = asyncio.create_task(process.generate(text="x"))
        await until(lambda: bool(worker.worker.sequences))
        worker.worker.gate.clear()
        process.process.send_signal(signal.SIGTERM)
        await process.line_with('"draining"')
        process.process.send_signal(signal.SIGTERM)
        assert await process.ended() == 130
        with pytest.raises(StepwireError):
            await running


async def test_a_worker_that_does_not_come_back_ends_it_with_status_3_and_one_error_line(
    checkpoint: Path, worker: FakeWorkerServer
) -> None:
    async with scheduler(checkpoint, worker.address, worker_timeout=0.5, restart_budget=1) as process:
        await process.connect()
        await process.line_with('"ready"')
        worker.worker.step_delay_s = 0.01
        running = asyncio.create_task(process.generate(text="x"))
        await until(lambda: bool(worker.worker.sequences))
        await worker.kill()
        with pytest.raises(StepwireError) as caught:
            await running
        assert caught.value.reason == "WORKER_FAILED"
        assert await process.ended() == 3
        errors = [line for line in process.lines if '"level": "error"' in line]
        assert len(errors) == 1
        assert "fakehost" in errors[0]
        (plain,) = [line for line in process.lines if not line.startswith("{")]
        assert plain.startswith("stepwire scheduler: the workers were lost")
        assert "no worker answers" in plain


async def test_a_scheduler_whose_worker_is_taken_ends_with_status_4(checkpoint: Path, worker: FakeWorkerServer) -> None:
    async with scheduler(checkpoint, worker.address) as older:
        await older.line_with('"ready"')
        async with scheduler(checkpoint, worker.address) as newer:
            await newer.connect()
            await newer.line_with('"ready"')
            assert await older.ended() == 4
            assert any("another scheduler" in line for line in older.lines if not line.startswith("{"))
            assert await newer.health() == SERVING


async def _cannot_start(model: Path | str, worker: str, **settings: Any) -> str:
    """The line that a process says before it ends with status 1."""
    async with scheduler(model, worker, **settings) as process:
        assert await process.ended() == 1
    plain = [line for line in process.lines if not line.startswith("{")]
    assert len(plain) == 1, process.lines
    assert plain[0].startswith("stepwire scheduler: ")
    return plain[0]


async def test_a_path_that_does_not_exist_is_one_line(tmp_path: Path) -> None:
    line = await _cannot_start(tmp_path / "nothing", "127.0.0.1:1")
    assert str(tmp_path / "nothing") in line


async def test_a_folder_that_is_no_checkpoint_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "readme.txt").write_text("no model")
    assert str(tmp_path) in await _cannot_start(tmp_path, "127.0.0.1:1")


async def test_a_port_in_use_is_one_line(checkpoint: Path, worker: FakeWorkerServer) -> None:
    line = await _cannot_start(checkpoint, "127.0.0.1:1", port=worker.port)
    assert f"127.0.0.1:{worker.port} is in use" in line


async def test_an_unreachable_worker_is_one_line(checkpoint: Path) -> None:
    line = await _cannot_start(checkpoint, "127.0.0.1:1", worker_timeout=0.3)
    assert "no worker answers at 127.0.0.1:1" in line


async def test_a_worker_that_dies_during_load_is_one_line(checkpoint: Path, worker: FakeWorkerServer) -> None:
    worker.worker.load_delay_s = 30
    task = asyncio.create_task(_cannot_start(checkpoint, worker.address))
    await until(lambda: "LoadModel" in worker.worker.calls)
    await worker.kill()
    assert "load_model failed on rank 0" in await task


async def test_a_context_longer_than_the_model_is_one_line(checkpoint: Path) -> None:
    assert "max_model_len is 5000" in await _cannot_start(checkpoint, "127.0.0.1:1", max_model_len=5000)


async def test_sigterm_during_a_start_ends_it_with_status_0(checkpoint: Path, worker: FakeWorkerServer) -> None:
    worker.worker.load_delay_s = 30
    async with scheduler(checkpoint, worker.address) as process:
        await until(lambda: "LoadModel" in worker.worker.calls)
        process.process.send_signal(signal.SIGTERM)
        assert await process.ended() == 0
