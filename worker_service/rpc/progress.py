"""Progress that the device thread writes and the event loop reads."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from stepwire.rpc.errors import StepwireError

# At most ten messages a second.
REPORT_INTERVAL_S = 0.1


class LoadProgress:
    """How far a load is; and the wish to end it."""

    def __init__(self) -> None:
        # One tuple, replaced as a whole, so that a reader on another thread sees values that belong together.
        self.now: tuple[str, int, int] = ("inspect", 0, 0)
        self.cancel_reason: StepwireError | None = None

    def report(self, stage: str, loaded_bytes: int, total_bytes: int) -> None:
        """Notes where the load stands; called on the device thread."""
        self.now = (stage, loaded_bytes, total_bytes)

    def is_cancelled(self) -> bool:
        """Whether the load is to stop."""
        return self.cancel_reason is not None


class WarmUpProgress:
    """How far a warm-up is."""

    def __init__(self) -> None:
        self.now: tuple[int, int] = (0, 0)

    def report(self, num_done: int, num_total: int) -> None:
        """Notes where the warm-up stands; called on the device thread."""
        self.now = (num_done, num_total)


async def changes(progress: LoadProgress | WarmUpProgress, work: asyncio.Task[Any]) -> AsyncGenerator[Any, None]:
    """What `progress.now` changes to while `work` goes on, at most ten times a second."""
    last: Any = None
    while not work.done():
        await asyncio.wait({work}, timeout=REPORT_INTERVAL_S)
        now = progress.now
        if now != last and not work.done():
            last = now
            yield now
