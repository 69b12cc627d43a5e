"""From what a user calls a model to a path on this machine: a path, a Hub id, or a URL."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self
from urllib.parse import unquote, urlsplit

from loader.errors import CheckpointError
from loader.sources.cache import Asking, Held, ModelCache
from loader.sources.directory import LIMIT_VARIABLE, default_directory
from loader.sources.remote import RemoteModel, last_part

if TYPE_CHECKING:
    from loader.sources.hub import HubId

_REPORT_EVERY_S = 5.0
_WAYS = "pass a folder, a .gguf file, a Hub id such as org/name, or a URL"


class Resolved:
    """A model on this machine; what came from elsewhere is not evicted from the cache before `release`.

    `name` is the short name of a model that came from elsewhere, whose path says nothing; None for a path that was
    given.
    """

    def __init__(self, path: Path, name: str | None = None, held: Held | None = None) -> None:
        self.path = path
        self.name = name
        self._held = held

    def release(self) -> None:
        """Lets the cache evict it."""
        if self._held is not None:
            self._held.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def resolve(
    model: str,
    *,
    report: Callable[[str], None],
    cancelled: Callable[[], bool] = lambda: False,
    cache: ModelCache | None = None,
    asking: Asking | None = None,
) -> Resolved:
    """Where `model` lies on this machine, brought here first if need be. Nothing is imported for a local path.

    A path that exists is taken as it is, and so is one that can be no Hub id: whether a checkpoint is there is for
    `open_checkpoint` to say. `report` is told what takes time. Raises CheckpointError: "unavailable" when network,
    source or disk fail, "not_found", "unsupported", "invalid"; LoadCancelled.
    """
    scheme = model.partition("://")[0].lower() if "://" in model else ""
    if scheme == "file":
        return Resolved(Path(unquote(urlsplit(model).path)))
    asking = asking or Asking(report, _Progress(report), cancelled)
    if scheme in ("http", "https"):
        from loader.sources.http import http_model

        return _from_source(model, lambda: http_model(model), cache, asking)
    if scheme and scheme != "hf":
        from loader.sources.objects import object_model

        return _from_source(model, lambda: object_model(model), cache, asking)
    if is_path(model):
        return Resolved(Path(model))
    from loader.sources.hub import HubId

    wanted = HubId.parse(model.removeprefix("hf://"))
    if wanted is None:
        if scheme:
            raise CheckpointError("not_found", f"{model} is no Hub id", _WAYS)
        return Resolved(Path(model))
    return _from_hub(wanted, cache, asking)


def is_path(model: str) -> bool:
    """Whether a path is meant: one that exists, or whose folder does, or that can be no Hub id."""
    path = Path(model)
    is_plain = "://" not in model
    return is_plain and (_exists(path) or len(path.parts) < 2 or path.is_absolute() or _exists(path.parent))


class _Progress:
    """Reports how far a download is, every few seconds."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report, self._next = report, time.monotonic() + _REPORT_EVERY_S

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _REPORT_EVERY_S
            self._report(f"{done >> 20} of {total >> 20} MiB")


def _exists(path: Path) -> bool:
    try:
        return os.path.lexists(path.expanduser())
    except (ValueError, RuntimeError):
        return True  # no usable path, and surely no Hub id


def _from_source(url: str, find: Callable[[], RemoteModel], cache: ModelCache | None, asking: Asking) -> Resolved:
    cache, name = cache or configured_cache(), url.partition("?")[0].rstrip("/")
    try:
        found = find()
    except CheckpointError as error:
        held = cache.find(name) if error.code == "unavailable" else None
        if held is None:
            raise
        asking.report(f"{error.message}; using what the cache holds of it")
    else:
        held = cache.hold(found, name, asking)
    return Resolved(held.path, last_part(name).removesuffix(".gguf"), held)


def _from_hub(wanted: "HubId", cache: ModelCache | None, asking: Asking) -> Resolved:
    from loader.sources.hub import hub_model, hub_snapshot

    cache, name = cache or configured_cache(), f"hf://{wanted}"
    if wanted.is_fixed:
        here = _on_this_machine(wanted, cache, name)
        if here is not None:
            return here
    try:
        found, commit = hub_model(wanted)
    except CheckpointError as error:
        here = _on_this_machine(wanted, cache, name) if error.code == "unavailable" else None
        if here is None:
            raise
        asking.report(f"{error.message}; using {here.path}")
        return here
    snapshot = hub_snapshot(wanted, commit, found.files)
    if snapshot is not None:
        return Resolved(snapshot, wanted.short_name)
    held = cache.hold(found, name, asking)
    return Resolved(held.path, wanted.short_name, held)


def _on_this_machine(wanted: "HubId", cache: ModelCache, name: str) -> Resolved | None:
    """What huggingface_hub's cache, or ours, has of a revision, whatever the Hub has by now."""
    from loader.sources.hub import hub_snapshot

    snapshot = hub_snapshot(wanted, wanted.revision)
    if snapshot is not None:
        return Resolved(snapshot, wanted.short_name)
    held = cache.find(name)
    return None if held is None else Resolved(held.path, wanted.short_name, held)


def hold_path(path: Path) -> Held | None:
    """Keeps what lies at a path of the cache from being evicted; None for a path elsewhere. Raises CheckpointError."""
    in_cache = path.is_relative_to(default_directory().absolute())
    return configured_cache().hold_path(path) if in_cache else None


def configured_cache() -> ModelCache:
    """The cache that the environment asks for. Raises CheckpointError "invalid" for a limit that is no number."""
    limit = os.environ.get(LIMIT_VARIABLE)
    if limit and not (limit.isascii() and limit.isdigit()):
        raise CheckpointError("invalid", f"{LIMIT_VARIABLE} is {limit[:100]!r}", "give it a number of bytes")
    return ModelCache(default_directory(), int(limit) if limit else None)
