"""Chat templates: messages to prompt text, by processes that can be killed.

A template comes with the checkpoint and messages come from clients; together they may raise, never
end, or fill the memory. Each of these costs the one request an error, and the process its life.
"""

import asyncio
import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from scheduler_service.engine import template_process
from scheduler_service.engine.values import ChatMessage
from stepwire.rpc.errors import StepwireError

_SCRIPT = str(Path(template_process.__file__))
_STREAM_LIMIT = 1 << 16


class ChatTemplate:
    """Renders one checkpoint's template, in up to `num_processes` processes started as needed."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        time_limit_s: float = 5.0,
        max_characters: int = 1 << 24,
        num_processes: int = 2,
    ) -> None:
        self._source = source
        self._special_tokens = dict(special_tokens)
        self._time_limit_s = time_limit_s
        self._max_characters = max_characters
        self._renderers: asyncio.LifoQueue[_Renderer] = asyncio.LifoQueue()
        self._all = [_Renderer() for _ in range(num_processes)]
        for renderer in self._all:
            self._renderers.put_nowait(renderer)

    async def start(self) -> None:
        """Starts one process ahead of the first request."""
        renderer = self._renderers.get_nowait()
        try:
            await renderer.start()
        finally:
            self._renderers.put_nowait(renderer)

    async def render(self, messages: Sequence[ChatMessage]) -> str:
        """The prompt's text, with the header of the assistant's turn. Raises CHAT_TEMPLATE_FAILED."""
        variables = {
            **self._special_tokens,
            "messages": [{"role": message.role, "content": message.content} for message in messages],
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
        }
        request = {"template": self._source, "variables": variables, "max_characters": self._max_characters}
        renderer = await self._renderers.get()
        try:
            answer = await asyncio.wait_for(renderer.ask(request), self._time_limit_s)
        except TimeoutError:
            raise _failed(f"ran longer than {self._time_limit_s:g} s") from None
        except (OSError, EOFError):
            raise _failed("killed the process that rendered it") from None
        finally:
            await self._give_back(renderer)
        if "error" in answer:
            raise _failed(f"refused these messages: {answer['error']}")
        return answer["text"]

    async def close(self) -> None:
        """Kills the processes and waits for their end."""
        for renderer in self._all:
            await renderer.kill()

    async def _give_back(self, renderer: "_Renderer") -> None:
        try:
            if not renderer.is_clean:
                await renderer.kill()
        finally:
            self._renderers.put_nowait(renderer)


class _Renderer:
    """One process. `is_clean` is False while a question has no answer: then it must be killed."""

    def __init__(self) -> None:
        self.is_clean = True
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                _SCRIPT,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                limit=_STREAM_LIMIT,
                start_new_session=True,  # a Ctrl-C at the terminal is the parent's to handle
            )
        return self._process

    async def ask(self, request: Mapping[str, object]) -> dict[str, str]:
        """Raises OSError or EOFError when the process ends before it has answered."""
        data = await asyncio.to_thread(_encode, request)
        self.is_clean = False
        process = await self.start()
        if process.stdin is None or process.stdout is None:
            raise EOFError
        process.stdin.write(data)
        await process.stdin.drain()
        header = await process.stdout.readexactly(4)
        body = await process.stdout.readexactly(int.from_bytes(header))
        self.is_clean = True
        answer: dict[str, str] = await asyncio.to_thread(json.loads, body)
        return answer

    async def kill(self) -> None:
        """Ends the process, if there is one; the next question starts another."""
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


def _encode(request: Mapping[str, object]) -> bytes:
    data = json.dumps(request).encode()
    return len(data).to_bytes(4) + data


def _failed(what: str) -> StepwireError:
    return StepwireError("CHAT_TEMPLATE_FAILED", f"the checkpoint's chat template {what}", {"cause": what})
