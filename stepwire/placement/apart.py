"""Calls that may block for long, each on a thread that nobody has to wait for, not even the end of the process."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def apart(call: Callable[..., T], *arguments: object) -> "asyncio.Future[T]":
    """Begins a call on a thread of its own; answers its outcome to come, which may be dropped.

    asyncio's own threads would not do: the end of its loop waits for them.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()
    outcome.add_done_callback(_note)

    def run() -> None:
        try:
            value = call(*arguments)
        except Exception as error:
            _tell(loop, _fail, outcome, error)
        else:
            _tell(loop, _succeed, outcome, value)

    threading.Thread(target=run, name=f"apart: {getattr(call, '__name__', call)}", daemon=True).start()
    return outcome


def _tell(loop: asyncio.AbstractEventLoop, how: Callable[..., None], *arguments: object) -> None:
    with contextlib.suppress(RuntimeError):  # The loop is closed: nobody waits any more.
        loop.call_soon_threadsafe(how, *arguments)


def _succeed(outcome: "asyncio.Future[T]", value: T) -> None:
    if not outcome.done():
        outcome.set_result(value)


def _fail(outcome: "asyncio.Future[T]", error: Exception) -> None:
    if not outcome.done():
        outcome.set_exception(error)


def _note(outcome: "asyncio.Future[T]") -> None:
    """asyncio would complain of an error that nobody takes."""
    if not outcome.cancelled():
        outcome.exception()
