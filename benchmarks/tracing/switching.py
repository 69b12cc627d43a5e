"""The same live services with and without tracing, in turns.

Two servers differ by more than tracing costs, if only by their place in memory; so one is switched.
"""

import asyncio
import os
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

from benchmarks.peers.event_loop import runner
from benchmarks.tracing.services import Services, serving
from benchmarks.tracing.switched import LEDGER, SWITCH_OFF, SWITCH_ON
from stepwire.client import AsyncClient, Output
from stepwire.telemetry.spans import SpanRecorder

# Until the exporter has sent what is queued: two ticks of a second after the last span.
_FLUSH_S = 3.3
_POLL_S, _TIMEOUT_S = 0.005, 300.0


class Mode(Enum):
    """How a block of requests is traced."""

    OFF = "off"
    ONE = "1pct"
    """Each hundredth request is sampled, counted over all such blocks."""
    ALL = "100pct"
    """All requests are sampled."""


@dataclass(frozen=True, slots=True)
class Block:
    """What a block of requests took: processor time of all services, of that what is known to go to tracing, exports of
    spans, and tokens a second."""

    num_tokens: int
    cpu_per_token_s: float
    tracing_per_token_s: float
    exports_per_token: float
    tokens_per_s: float


class Switching:
    """Live services whose tracing is switched between blocks of requests. Made by `switching`."""

    def __init__(self, services: Services, concurrency: int, ledger: Path) -> None:
        self._services = services
        self._ledger = ledger
        self._num_of_one = 0
        self._concurrency = concurrency
        self._runner = runner()
        self._plain, self._tracing = self._runner.run(_clients(services.target))

    @property
    def pids(self) -> list[int]:
        """The services' processes."""
        return self._services.pids

    def block(self, prompts: Sequence[Sequence[int]], max_tokens: int, mode: Mode) -> Block:
        """Runs requests, so many at once, and waits until their spans are sent."""
        spent_before, exports_before = self._switch(mode)
        before, began = self._cpu_s(), time.perf_counter()
        num_tokens = self._runner.run(self._run(prompts, max_tokens, mode))
        seconds = time.perf_counter() - began
        if mode is not Mode.OFF:
            time.sleep(_FLUSH_S)
        cpu_s = self._cpu_s() - before
        spent_s, num_exports = self._switch(mode)
        tracing, exports = (spent_s - spent_before) / num_tokens, (num_exports - exports_before) / num_tokens
        return Block(num_tokens, cpu_s / num_tokens, tracing, exports, num_tokens / seconds)

    def close(self) -> None:
        """Closes the clients."""
        self._runner.run(_close(self._plain, self._tracing))
        self._runner.close()

    def _switch(self, mode: Mode) -> tuple[float, int]:
        """Switches all services; answers what they have spent on tracing so far, in seconds, and their exports."""
        written = [self._ledger / str(pid) for pid in self.pids]
        for path in written:
            path.unlink(missing_ok=True)
            os.kill(int(path.name), SWITCH_OFF if mode is Mode.OFF else SWITCH_ON)
        while not all(path.exists() and path.read_text().endswith("\n") for path in written):
            time.sleep(_POLL_S)
        spent = [list(map(int, path.read_text().split())) for path in written]
        return sum(ns for ns, _ in spent) / 1e9, sum(num for _, num in spent)

    def _cpu_s(self) -> float:
        """Processor time of the services so far, to the nanosecond: see CPUCLOCK_SCHED in Linux's posix-timers."""
        return sum(time.clock_gettime((~pid << 3) | 2) for pid in self.pids)

    def _is_sampled(self, mode: Mode) -> bool:
        self._num_of_one += mode is Mode.ONE
        return mode is Mode.ALL or (mode is Mode.ONE and self._num_of_one % 100 == 50)

    async def _run(self, prompts: Sequence[Sequence[int]], max_tokens: int, mode: Mode) -> int:
        slots = asyncio.Semaphore(self._concurrency)

        async def one(prompt: Sequence[int]) -> int:
            async with slots:
                if not self._is_sampled(mode):
                    return await _generate(self._plain, prompt, max_tokens)
                ids = (random.getrandbits(128) or 1, random.getrandbits(64) or 1)
                caller = NonRecordingSpan(SpanContext(*ids, is_remote=False, trace_flags=TraceFlags(1)))
                with trace.use_span(caller):
                    return await _generate(self._tracing, prompt, max_tokens)

        return sum(await asyncio.gather(*map(one, prompts)))


@contextmanager
def switching(model: Path, concurrency: int, endpoint: str, device: Sequence[str]) -> Iterator[Switching]:
    """Services that are ready, their workers with these flags, and clients of them."""
    with tempfile.TemporaryDirectory(prefix="stepwire-trace-cost-") as folder:
        ledger = Path(folder) / "ledger"
        ledger.mkdir()
        # The services inherit it.
        os.environ[LEDGER] = str(ledger)
        flags, more = ["--max-num-seqs=128", "--max-model-len=512"], [f"--otlp-endpoint={endpoint}"]
        how = {"device": device, "program": "benchmarks.tracing.switched"}
        with serving(model, Path(folder), 1, flags, more, **how) as services:
            switched = Switching(services, concurrency, ledger)
            try:
                yield switched
            finally:
                switched.close()


async def _clients(target: str) -> tuple[AsyncClient, AsyncClient]:
    """One that sends no trace context, and one that passes on the current one."""
    return AsyncClient(target), AsyncClient(target, tracer_provider=SpanRecorder(None))


async def _close(*clients: AsyncClient) -> None:
    for client in clients:
        await client.close()


async def _generate(client: AsyncClient, prompt: Sequence[int], max_tokens: int) -> int:
    num_tokens = 0
    stream = client.generate(prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True, timeout=_TIMEOUT_S)
    async for event in stream:
        if isinstance(event, Output):
            num_tokens += len(event.token_ids)
    return num_tokens
