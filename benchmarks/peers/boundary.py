"""The scheduler's core in this process and `stepwire worker` in another, joined by the engine's own client."""

import asyncio
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from opentelemetry.trace import NoOpTracer

from benchmarks.peers.drain import Sizes, request
from benchmarks.peers.event_loop import runner
from benchmarks.peers.rates import Answer
from loader.checkpoint import open_checkpoint
from scheduler_service.core.plan import StepResult, TokenEvent
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.engine.ports import StepStream
from scheduler_service.engine.start import GroupStarter, StartPlan
from scheduler_service.engine.values import Sampling
from scheduler_service.model_service import start_plan
from scheduler_service.rpc.worker_client import WorkerClient
from scheduler_service.settings import SchedulerSettings
from stepwire.supervisor.ports import free_port

_GREEDY = Sampling(0.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0, (), 0, 0, None)
_END_TIMEOUT_S = 30.0


class Boundary:
    """A worker that was started and made ready. Raises StepwireError when it cannot be."""

    def __init__(self, model: Path, sizes: Sizes, threads: int, log_path: Path) -> None:
        port = free_port()
        command = [sys.executable, "-m", "stepwire.cli.main", "worker", f"--port={port}", f"--threads={threads}"]
        with log_path.open("wb") as log:
            self._process = subprocess.Popen([*command, "--log-level=warning"], stdout=log, stderr=log)
        self._scheduler = Scheduler(sizes.scheduler_config, time.monotonic)
        self._results: deque[StepResult] = deque()
        self._runner = runner()
        try:
            self._stream = self._runner.run(self._start(f"127.0.0.1:{port}", wanted(model, sizes)))
        except BaseException:
            self._end_process()
            raise

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int, *, stream: bool = False) -> Answer:
        """Greedy continuations, and when the core had each token."""
        del stream
        return self._runner.run(self._drain(prompts, max_tokens))

    def close(self) -> None:
        """Ends the worker."""
        self._runner.run(self._close())
        self._end_process()

    async def _start(self, address: str, plan: StartPlan) -> StepStream:
        started = await GroupStarter([self._client(address)], plan, NoOpTracer()).start()
        self._wake = asyncio.Event()
        self._epoch = started.epoch
        stream = await started.ranks[0].port.open_stream(started.epoch)
        self._reader = asyncio.create_task(self._read(stream))
        return stream

    def _client(self, address: str) -> WorkerClient:
        self._worker = WorkerClient(address, key=None, tracer=NoOpTracer())
        return self._worker

    async def _read(self, stream: StepStream) -> None:
        """Takes results as they come, as the engine's group does."""
        try:
            while True:
                result, _timings = await stream.receive()
                self._results.append(result)
                self._wake.set()
        finally:
            self._wake.set()

    async def _close(self) -> None:
        self._stream.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        await self._worker.close()

    async def _drain(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> Answer:
        """As the engine's step loop, with two steps in flight and nothing made of what comes."""
        scheduler, stream, wake = self._scheduler, self._stream, self._wake
        tokens: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
        times: dict[str, list[float]] = {name: [] for name in tokens}
        begin = time.perf_counter()
        for name, prompt in zip(tokens, prompts, strict=True):
            scheduler.add_request(request(name, prompt, max_tokens, _GREEDY))
        while not scheduler.is_idle:
            while (plan := scheduler.schedule()) is not None:
                await stream.send(self._worker.encode_step(plan, self._epoch))
            await wake.wait()
            wake.clear()
            if self._reader.done():
                await self._reader
            while self._results:
                for event in scheduler.apply(self._results.popleft()):
                    if not isinstance(event, TokenEvent):
                        raise SystemExit(f"a sequence failed: {event.message}")
                    name = event.sequence.request.request_id
                    tokens[name].append(event.token_id)
                    times[name].append(time.perf_counter() - begin)
        return Answer(list(tokens.values()), list(times.values()))

    def _end_process(self) -> None:
        self._process.terminate()
        self._process.wait(_END_TIMEOUT_S)
        self._runner.close()


def wanted(model: Path, sizes: Sizes) -> StartPlan:
    """What the worker is to be made ready for."""
    settings = SchedulerSettings(
        model=str(model),
        dtype=sizes.dtype,
        max_model_len=sizes.max_model_len,
        max_num_seqs=sizes.max_sequences,
        max_num_batched_tokens=sizes.max_step_tokens,
        block_size=sizes.block_size,
        num_kv_blocks=sizes.num_blocks,
    )
    return start_plan(settings, open_checkpoint(model))
