"""Runs a service's main coroutine."""

import asyncio
import gc
import sys
from collections.abc import Coroutine
from typing import Any


def settle_memory() -> None:
    """For a service that is ready: spares the garbage collector what lives as long as the process, and lets it look
    for cycles less often.

    Every token and every step make objects, none of them in cycles, so that by default it would run over all that is
    alive many times a second.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def run(main: Coroutine[Any, Any, int]) -> int:
    """Runs `main` on a new event loop, uvloop's where there is one, and returns what it returns.

    Signals are main's own business.
    """
    if sys.platform == "win32":
        return asyncio.run(main)
    import uvloop

    return uvloop.run(main)
