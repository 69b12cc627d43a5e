"""Work on foreign input in processes that can be killed: it may raise, never end, or fill the memory.

Each of these costs the one question an error, and the process its life; the next question starts another one.
"""

import asyncio
import contextlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_ROOT = str(Path(__file__).resolve().parents[2])
# Isolated, so that neither the environment nor the current folder say what is imported.
_PROGRAM = """
import importlib, sys
root, module = sys.argv[1:]
if root not in sys.path:
    sys.path.insert(0, root)
importlib.import_module(module).main()
"""
_STREAM_LIMIT = 1 << 16
_START_LIMIT_S = 60.0


class HelperTimeout(Exception):
    """A question was not answered in time."""


class HelperDied(Exception):
    """A process ended before it had answered."""


class Helpers:
    """Up to `num_processes` processes that run a module's `main`, started as needed.

    `greeting` is what each is told first; see engine/helper_process.py.
    """

    def __init__(
        self,
        module: str,
        *,
        time_limit_s: float,
        num_processes: int,
        greeting: Mapping[str, object] | None = None,
    ) -> None:
        self.time_limit_s = time_limit_s
        self._idle: asyncio.LifoQueue[_Helper] = asyncio.LifoQueue()
        self._all = [_Helper(module, greeting or {}) for _ in range(num_processes)]
        for helper in self._all:
            self._idle.put_nowait(helper)
        self._is_closed = False
        self._closing = asyncio.Lock()

    async def start(self) -> None:
        """Starts one process ahead of the first question, which finds out when that fails."""
        if self._is_closed or self._idle.empty():
            return
        helper = self._idle.get_nowait()
        try:
            with contextlib.suppress(OSError, EOFError):  # TimeoutError is an OSError
                await helper.start()
        finally:
            await self._give_back(helper)

    async def ask(self, question: Mapping[str, object]) -> dict[str, Any]:
        """The answer of whichever process is free first. Raises HelperDied, also once closed, or HelperTimeout."""
        helper = await self._idle.get()
        try:
            if self._is_closed:
                raise HelperDied
            await helper.start()
            async with asyncio.timeout(self.time_limit_s):
                return await helper.ask(question)
        except TimeoutError:
            raise HelperTimeout from None
        except (OSError, EOFError):
            raise HelperDied from None
        finally:
            await self._give_back(helper)

    async def close(self) -> None:
        """Kills the processes and waits for their end; none is started any more."""
        self._is_closed = True
        for helper in self._all:
            helper.end()
        # Whoever waits for an answer, or for a start, gives the process back now.
        async with self._closing:
            back = [await self._idle.get() for _ in self._all]
            for helper in back:
                await helper.kill()
                self._idle.put_nowait(helper)

    async def _give_back(self, helper: "_Helper") -> None:
        try:
            if not helper.is_clean:
                await helper.kill()
        finally:
            self._idle.put_nowait(helper)


class _Helper:
    """One process. `is_clean` is False while a question has no answer: then it must be killed."""

    def __init__(self, module: str, greeting: Mapping[str, object]) -> None:
        self.is_clean = True
        self._module = module
        self._greeting = greeting
        self._process: asyncio.subprocess.Process | None = None
        self._is_ended = False

    async def start(self) -> None:
        """Makes sure that the process runs and is ready."""
        if self._process is not None and self._process.returncode is None:
            return
        self.is_clean = False
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            "-c",
            _PROGRAM,
            _ROOT,
            self._module,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            limit=_STREAM_LIMIT,
            start_new_session=True,  # a Ctrl-C at the terminal is the parent's to handle
        )
        if self._is_ended:
            raise EOFError
        async with asyncio.timeout(_START_LIMIT_S):
            await self.ask(self._greeting)

    async def ask(self, question: Mapping[str, object]) -> dict[str, Any]:
        """Raises OSError or EOFError when the process ends before it has answered."""
        data = await asyncio.to_thread(_encode, question)
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise EOFError
        self.is_clean = False
        process.stdin.write(data)
        await process.stdin.drain()
        header = await process.stdout.readexactly(4)
        body = await process.stdout.readexactly(int.from_bytes(header))
        self.is_clean = True
        answer: dict[str, Any] = await asyncio.to_thread(json.loads, body)
        return answer

    def end(self) -> None:
        """Ends the process for good: whoever waits for its answer gets an error."""
        self._is_ended = True
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def kill(self) -> None:
        """Ends the process, if there is one, when nobody reads from it; the next question starts another."""
        process, self._process = self._process, None
        self.is_clean = True
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            if process.stdin is not None:
                process.stdin.close()
            if process.stdout is not None:
                # asyncio sees the end of a process only when its pipes have been read to their ends.
                await process.stdout.read()
            await process.wait()


def _encode(question: Mapping[str, object]) -> bytes:
    data = json.dumps(question).encode()
    return len(data).to_bytes(4) + data
