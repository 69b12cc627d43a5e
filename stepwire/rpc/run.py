"""Runs a service's main coroutine."""

import asyncio
import sys
from collections.abc import Coroutine
from typing import Any


def run(main: Coroutine[Any, Any, int]) -> int:
    """Runs `main` on a new event loop, uvloop's where there is one, and returns what it returns.

    Signals are main's own business.
    """
    if sys.platform == "win32":
        return asyncio.run(main)
    import uvloop

    return uvloop.run(main)
