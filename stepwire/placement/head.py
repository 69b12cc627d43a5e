"""Whether the head of a Ray cluster is there. Without it Ray ends, after a while, all that belongs to the cluster."""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable

from stepwire.placement.apart import apart

# Ray's own setting, of this process and of each node: so long they wait for a head that is gone, and end then.
_RAY_LIMIT_VARIABLE = "RAY_gcs_rpc_server_reconnect_timeout_s"
_RAY_LIMIT_S = 60.0
# Parts of that time: one lost answer means nothing, and after the last part there is time to end in order.
_TOLD_AFTER, _LOST_AFTER, _CUT_AFTER = 0.05, 0.65, 0.9
_CONNECT_TIMEOUT_S = 2.0
# A head that is busy answers within milliseconds to a second.
_ANSWER_TIMEOUT_S = 2.0
_EVERY_S = 1.0


def ray_limit_s() -> float:
    """After how many seconds without its head Ray ends this process."""
    try:
        return float(os.environ[_RAY_LIMIT_VARIABLE])
    except (KeyError, ValueError):
        return _RAY_LIMIT_S


class Head:
    """The head of a cluster, and after how many seconds without it Ray ends what belongs to the cluster.

    `ask` has it answer something, and blocks until it does. The kernel takes connections for a process that hangs.
    """

    def __init__(self, host: str, port: int, limit_s: float, ask: Callable[[], object]) -> None:
        self._address = f"{host}:{port}"
        self._place = host, port
        self._limit_s = limit_s
        self._ask = ask
        self._answer: asyncio.Future[object] | None = None
        self._trouble = ""

    @property
    def trouble(self) -> str:
        """What is wrong with it, as long as that has been told of; else empty."""
        return self._trouble

    async def watch(self, report: Callable[[str], None], on_lost: Callable[[str, float], None]) -> None:
        """Reports once when it does not answer any more, and why, and when it does again.

        Returns when it did not for too long: `on_lost` is told so, with the seconds that are left.
        """
        gone_at: float | None = None
        while True:
            asked_at = time.monotonic()
            cause = await self._cause()
            if not cause:
                if self._trouble:
                    report(f"{self} answers again")
                gone_at, self._trouble = None, ""
            else:
                gone_at = asked_at if gone_at is None else gone_at
                gone_s = time.monotonic() - gone_at
                if gone_s >= _LOST_AFTER * self._limit_s:
                    text = (
                        f"{self} has not answered for {gone_s:.0f} s ({cause}), and what has no head for long is ended "
                        "by Ray; start the cluster anew, and then this"
                    )
                    on_lost(text, (_CUT_AFTER - _LOST_AFTER) * self._limit_s)
                    return
                if gone_s >= _TOLD_AFTER * self._limit_s and not self._trouble:
                    self._trouble = f"{self} does not answer ({cause})"
                    report(
                        f"{self._trouble}: streams go on, but a worker that is lost now does not come back, and "
                        f"all ends in {_LOST_AFTER * self._limit_s - gone_s:.0f} s unless the head is back"
                    )
            await asyncio.sleep(_EVERY_S)

    def __str__(self) -> str:
        return f"the head of the Ray cluster at {self._address}"

    async def _cause(self) -> str:
        """Why it is as good as gone; empty when it answers."""
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                _, writer = await asyncio.open_connection(*self._place)
        except TimeoutError:
            return "it takes no connection"
        except OSError as error:
            return f"no connection: {error.strerror or error}"
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        # One question at a time: each that hangs holds a thread.
        if self._answer is None or self._answer.done():
            self._answer = apart(self._ask)
        await asyncio.wait([self._answer], timeout=_ANSWER_TIMEOUT_S)
        if not self._answer.done():
            return "it takes connections but answers nothing: it hangs, or is stopped"
        failure = self._answer.exception()
        return "" if failure is None else f"it answers with an error: {str(failure).partition(chr(10))[0][:200]}"
