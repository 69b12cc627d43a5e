"""Models that a call names by a Hub id or a URL: brought here, and kept in the cache while they are served."""

import asyncio
import threading
from pathlib import Path

import structlog

from loader.errors import CheckpointError
from loader.inspection import Problem
from loader.sources.cache import Held
from loader.sources.resolve import Resolved, hold_path, resolve
from scheduler_service.engine.preflight import check_failed
from stepwire.rpc.errors import StepwireError

MAX_SOURCE_LEN = 4096

_log = structlog.stdlib.get_logger(__name__)


def is_elsewhere(model: str) -> bool:
    """Whether a call names a Hub id or a URL. A path that it names begins with "/": it is of no folder of ours."""
    return bool(model) and not model.startswith("/")


def check_source(model: str) -> str:
    """A URL as it is; a Hub id so that it cannot be a folder's. Raises FIELD_OUT_OF_RANGE or FIELD_INVALID."""
    if len(model) > MAX_SOURCE_LEN:
        text = f"path has {len(model)} characters; at most {MAX_SOURCE_LEN} are allowed"
        raise StepwireError("FIELD_OUT_OF_RANGE", text, {"field": "path"})
    scheme = model.partition("://")[0].lower() if "://" in model else ""
    if scheme == "file" or not model.isprintable() or (not scheme and "/" not in model):
        text = f"path {model[:256]!r} is no absolute path, no Hub id such as org/name, and no URL of another machine"
        raise StepwireError("FIELD_INVALID", text, {"field": "path", "found": model[:256]})
    return model if scheme else f"hf://{model}"


async def bring(model: str) -> Resolved:
    """Brings what a Hub id or a URL names to this machine, unless it is here. It is kept there until it is released.

    Cancelling ends the download, which the next goes on with. Raises StepwireError of the phase "fetch".
    """
    is_given_up = threading.Event()
    try:
        return await asyncio.to_thread(resolve, model, report=_say, cancelled=is_given_up.is_set)
    except CheckpointError as error:
        raise check_failed(Problem.of(error), phase="fetch") from error
    finally:
        is_given_up.set()


async def keep(path: str) -> Held | None:
    """Keeps what lies at a path of the cache from being evicted; None for a path elsewhere. Raises StepwireError."""
    try:
        return await asyncio.to_thread(hold_path, Path(path))
    except CheckpointError as error:
        raise check_failed(Problem.of(error), phase="fetch") from error


def _say(text: str) -> None:
    _log.info("fetching", progress=text)
