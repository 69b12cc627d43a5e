"""This project as its users have it: `stepwire serve` on the same cores, asked over gRPC by this process."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers.event_loop import runner
from benchmarks.peers.rates import Answer
from stepwire.client import AsyncClient, Output
from stepwire.client._calls import MAX_STREAM_INTERVAL
from stepwire.rpc.errors import StepwireError
from stepwire.supervisor.ports import free_port

_READY_TIMEOUT_S, _END_TIMEOUT_S, _REQUEST_TIMEOUT_S = 180.0, 60.0, 300.0
_POLL_S = 0.01


class StepwireServer:
    """`stepwire serve` on a model; `began` is when its process was started. Its processes wait without spinning."""

    def __init__(self, model: Path, log_folder: Path, *flags: str) -> None:
        self.target = f"127.0.0.1:{free_port()}"
        port = self.target.rpartition(":")[2]
        arguments = ["serve", f"--model={model}", f"--port={port}", f"--log-dir={log_folder}", "--log-level=warning"]
        self.began = time.monotonic()
        with (log_folder / "serve.log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "stepwire.cli.main", *arguments, *flags],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._runner = runner()
        self._client = self._runner.run(_client(self.target))

    @classmethod
    def ready(cls, model: Path, log_folder: Path, *flags: str) -> "StepwireServer":
        """One that takes requests. Raises as `wait_ready`; then nothing is left of it."""
        server = cls(model, log_folder, *flags)
        try:
            server.wait_ready()
        except BaseException:
            server.close()
            raise
        return server

    def wait_ready(self) -> None:
        """Returns when it takes requests. Raises StepwireError, or SystemExit when it has ended."""
        self._runner.run(self._wait_ready())

    def generate(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, *, stream: bool = False, adapters: Sequence[str] = ()
    ) -> Answer:
        """Greedy continuations, all begun together, and when each token was there; with `adapters`, each with its own.
        Without `stream` each comes as a whole, but for its first token."""
        names = adapters or [""] * len(prompts)
        done = self._runner.run(self._generate_all(prompts, max_tokens, names, 1 if stream else MAX_STREAM_INTERVAL))
        return Answer([tokens for tokens, _ in done], [times for _, times in done])

    def encode(self, text: str) -> list[int]:
        """The token ids of a text."""
        return list(self._runner.run(self._client.tokenize(text)))

    def close(self) -> None:
        """Ends client and server."""
        self._runner.run(self._client.close())
        self._runner.close()
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(_END_TIMEOUT_S)

    @property
    def pids(self) -> list[int]:
        """Its processes: the supervisor and its children."""
        return [self._process.pid, *_children(self._process.pid)]

    @property
    def cpu_seconds(self) -> float:
        """User and system time of all its processes."""
        return sum(_cpu_ticks(pid) for pid in self.pids) / os.sysconf("SC_CLK_TCK")

    async def _wait_ready(self) -> None:
        deadline = time.monotonic() + _READY_TIMEOUT_S
        while True:
            if self._process.poll() is not None:
                raise SystemExit(f"stepwire serve ended with status {self._process.returncode}")
            try:
                await self._client.wait_ready(timeout=_POLL_S * 5)
                return
            except StepwireError:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(_POLL_S)

    async def _generate_all(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, adapters: Sequence[str], interval: int
    ) -> list[tuple[list[int], list[float]]]:
        begin = time.perf_counter()
        pairs = zip(prompts, adapters, strict=True)
        calls = (self._generate(prompt, max_tokens, begin, name, interval) for prompt, name in pairs)
        return await asyncio.gather(*calls)

    async def _generate(
        self, prompt: Sequence[int], max_tokens: int, begin: float, adapter: str, interval: int
    ) -> tuple[list[int], list[float]]:
        tokens: list[int] = []
        times: list[float] = []
        stream = self._client.generate(
            prompt,
            max_tokens=max_tokens,
            temperature=0.0,
            ignore_eos=True,
            adapter=adapter,
            stream_interval=interval,
            timeout=_REQUEST_TIMEOUT_S,
        )
        async for event in stream:
            if isinstance(event, Output):
                tokens += event.token_ids
                times += [time.perf_counter() - begin] * len(event.token_ids)
        return tokens, times


async def _client(target: str) -> AsyncClient:
    return AsyncClient(target)


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
