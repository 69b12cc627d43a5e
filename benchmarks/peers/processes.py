"""An engine as a process: loaded once, asked many times, stopped by the kernel while it is not its turn.

An engine that waits may spin, vLLM's processes and idle OpenMP threads do; a stopped one takes no processor time.
"""

import contextlib
import glob
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.rates import Answer

PEERS = Path(os.environ.get("STEPWIRE_PEERS") or Path.home() / ".cache/stepwire/peers")
NAMES = ("vllm", "llamacpp", "hf")
_START_TIMEOUT_S, _ANSWER_TIMEOUT_S, _END_TIMEOUT_S = 600.0, 300.0, 20.0
_VLLM_CACHE_GIB = 2


class PeerFailed(Exception):
    """An engine is not built, ended, or does not answer; the text says which and what its log ends with."""


class PeerProcess:
    """One engine that answers as peer_loop.py does; `command` gets `options` as its last argument, as JSON."""

    def __init__(
        self, name: str, command: Sequence[str], options: dict[str, Any], log_path: Path, env: dict[str, str]
    ) -> None:
        self.name = name
        self._log_path = log_path
        self.began = time.monotonic()
        with log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=env,
                start_new_session=True,
            )
        self._unread = b""
        self._timeout_s = _START_TIMEOUT_S

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int, *, stream: bool = False) -> Answer:
        """Greedy continuations, and when each token was there. Raises PeerFailed."""
        question = json.dumps({"prompts": prompts, "max_tokens": max_tokens, "stream": stream})
        self._signal(signal.SIGCONT)
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(question.encode() + b"\n")
            self._process.stdin.flush()
            answer = json.loads(self._line(time.monotonic() + self._timeout_s))
        except BrokenPipeError:
            raise self._failed("has ended") from None
        finally:
            self._signal(signal.SIGSTOP)
        self._timeout_s = _ANSWER_TIMEOUT_S
        return Answer(answer["tokens"], answer["times"])

    def close(self) -> None:
        """Ends it with all that it has started."""
        self._signal(signal.SIGCONT)
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_TIMEOUT_S)
        self._signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            # What was written and not taken cannot be flushed any more.
            with contextlib.suppress(BrokenPipeError):
                if pipe is not None:
                    pipe.close()

    def _line(self, deadline: float) -> bytes:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        while b"\n" not in self._unread:
            ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise self._failed("does not answer")
            data = os.read(descriptor, 1 << 20)
            if not data:
                raise self._failed("has ended")
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return

    def _failed(self, what: str) -> PeerFailed:
        said = self._log_path.read_text(errors="replace").strip().splitlines()[-3:]
        return PeerFailed(f"{self.name} {what}: {' | '.join(said)}")


def start_peer(name: str, options: dict[str, Any], log_path: Path) -> PeerProcess:
    """Starts a peer in its own environment. Raises PeerFailed when it is not built."""
    python = PEERS / name / "bin/python"
    if not python.exists():
        raise PeerFailed(f"{name} is not built: run `make peers`")
    script = Path(__file__).with_name(f"{name}_peer.py")
    env = environment(name, PEERS / name, dict(os.environ))
    return PeerProcess(name, [str(python), str(script)], options, log_path, env)


def close_on_sigterm() -> None:
    """Makes SIGTERM end this program as an exception would, so that what it started is closed."""

    def end(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)


def environment(name: str, home: Path, inherited: dict[str, str]) -> dict[str, str]:
    """Variables of a peer: nothing is fetched, and vLLM is set up as its guide to CPUs says.

    That is its OpenMP threads bound to the cores of this process, and tcmalloc and Intel's OpenMP loaded first.
    """
    values = {key: value for key, value in inherited.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    values |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if name == "vllm":
        cores = sorted(os.sched_getaffinity(0))
        found = [
            sorted(glob.glob(str(home / "lib" / pattern))) for pattern in ("libtcmalloc_minimal.so*", "libiomp5.so")
        ]
        values |= {
            "LD_PRELOAD": ":".join(paths[0] for paths in found if paths),
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_CPU_KVCACHE_SPACE": str(_VLLM_CACHE_GIB),
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
        }
    return values
