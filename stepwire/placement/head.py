"""Whether the head of a Ray cluster is there. Without it Ray ends, after a while, all that belongs to the cluster."""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

# Ray's own setting, of this process and of each node: so long they wait for a head that is gone, and end then.
_RAY_LIMIT_VARIABLE = "RAY_gcs_rpc_server_reconnect_timeout_s"
_RAY_LIMIT_S = 60.0
# Parts of that time: one lost answer means nothing, and after the last part there is time to end in order.
_TOLD_AFTER, _LOST_AFTER, _CUT_AFTER = 0.05, 0.65, 0.9
_CONNECT_TIMEOUT_S = 2.0
_EVERY_S = 1.0


def ray_limit_s() -> float:
    """After how many seconds without its head Ray ends this process."""
    try:
        return float(os.environ[_RAY_LIMIT_VARIABLE])
    except (KeyError, ValueError):
        return _RAY_LIMIT_S


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a cluster, and after how many seconds without it Ray ends what belongs to the cluster."""

    host: str
    port: int
    limit_s: float

    async def watch(self, report: Callable[[str], None], on_lost: Callable[[str, float], None]) -> None:
        """Reports when it does not answer any more, and when it does again.

        Returns when it was gone for too long: `on_lost` is told so, with the seconds that are left.
        """
        gone_at: float | None = None
        is_told = False
        while True:
            if await self._answers():
                if is_told:
                    report(f"{self} answers again")
                gone_at, is_told = None, False
            else:
                now = time.monotonic()
                gone_at = now if gone_at is None else gone_at
                if now - gone_at >= _LOST_AFTER * self.limit_s:
                    text = (
                        f"{self} has not answered for {now - gone_at:.0f} s, and without it Ray ends the workers soon; "
                        "start the cluster anew, and then this"
                    )
                    on_lost(text, (_CUT_AFTER - _LOST_AFTER) * self.limit_s)
                    return
                if now - gone_at >= _TOLD_AFTER * self.limit_s and not is_told:
                    is_told = True
                    report(
                        f"{self} does not answer: streams go on, but a worker that is lost now does not come back, and "
                        f"all ends in {_LOST_AFTER * self.limit_s - now + gone_at:.0f} s unless the head is back"
                    )
            await asyncio.sleep(_EVERY_S)

    def __str__(self) -> str:
        return f"the head of the Ray cluster at {self.host}:{self.port}"

    async def _answers(self) -> bool:
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                _, writer = await asyncio.open_connection(self.host, self.port)
        except OSError:  # TimeoutError is one
            return False
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        return True
