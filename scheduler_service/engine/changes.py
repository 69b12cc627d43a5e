"""Work that goes on though whoever asked for it has gone, and calls that are all made before one may fail."""

import asyncio
import contextvars
from collections.abc import Awaitable, Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


class Changes:
    """Changes that are finished once they have begun. On the event loop; `close` ends what goes on.

    With `takes_errors` an error that nobody waits for any more is dropped; else asyncio tells of it.
    """

    def __init__(self, name: str, *, takes_errors: bool) -> None:
        self._name = name
        self._takes_errors = takes_errors
        self._tasks: set[asyncio.Task[Any]] = set()

    def begin(self, change: Coroutine[Any, Any, T], *, context: contextvars.Context | None = None) -> "asyncio.Task[T]":
        """Begins a change; nobody need wait for it."""
        task = asyncio.create_task(change, name=self._name, context=context)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def run(self, change: Coroutine[Any, Any, T]) -> T:
        """Begins a change and waits for it. Cancelling the wait does not stop it."""
        return await asyncio.shield(self.begin(change))

    async def close(self) -> None:
        """Cancels the changes under way, and waits for their end."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if self._takes_errors and not task.cancelled():
            # Whoever waited may be gone; then nobody else takes it.
            task.exception()


async def all_or_none(calls: Iterable[Awaitable[T]]) -> list[T]:
    """Makes all calls at once; the first failure is raised, once the others, which it cancels, have ended."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def all_of(calls: Iterable[Awaitable[object]]) -> None:
    """Makes all calls at once and waits for all of them; raises the first one's error among those that failed."""
    for outcome in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome
