"""The adapters that requests may name: which content each name stands for, and who uses it.

An adapter is on all workers before its name is known, and leaves them when no request has it any more.
"""

import asyncio
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import structlog

from scheduler_service.engine.changes import Changes
from scheduler_service.engine.ports import HeldAdapter, WorkerPort
from scheduler_service.engine.refusals import not_ready
from scheduler_service.engine.validate import check_adapter_name, check_adapter_path
from stepwire.rpc.errors import StepwireError

# How an adapter fails that cannot be brought to a worker again: nobody else is to fail for it.
_ITS_OWN_FAULT = frozenset(
    {
        *("CHECKPOINT_NOT_FOUND", "CHECKPOINT_INVALID", "CHECKPOINT_UNSUPPORTED"),
        *("ADAPTER_UNSUPPORTED", "ADAPTER_LIMIT", "FIELD_INVALID"),
    }
)
# What workers answer whose epoch is about to begin.
_BETWEEN_EPOCHS = frozenset({"STALE_EPOCH", "WRONG_PHASE"})
_MOST_NAMES = 20

_log = structlog.stdlib.get_logger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """An adapter as operators see it; `num_bytes` over all workers."""

    name: str
    fingerprint: str
    path: str
    rank: int
    num_bytes: int
    num_requests: int
    is_leaving: bool


@dataclass(slots=True, eq=False)
class _LiveAdapter:
    """An adapter that is on all workers. `idle` is set while no request has it."""

    name: str
    path: str
    held: HeldAdapter
    num_bytes: int
    num_requests: int = 0
    is_leaving: bool = False
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    def info(self) -> AdapterInfo:
        """For operators."""
        held = self.held
        return AdapterInfo(
            self.name, held.fingerprint, self.path, held.rank, self.num_bytes, self.num_requests, self.is_leaving
        )


class Adapters:
    """The owner of live adapters. On the event loop; changes are made one after the other, and each is finished once
    it has begun, whoever waits for it."""

    def __init__(self, max_adapters: int) -> None:
        self._max_adapters = max_adapters
        self._by_name: dict[str, _LiveAdapter] = {}
        self._leaving: list[_LiveAdapter] = []
        # Each group's workers, with its epoch.
        self._groups: dict[tuple[WorkerPort, ...], int] = {}
        self._lock = asyncio.Lock()
        self._changes = Changes("adapters", takes_errors=True)
        self._asking: asyncio.Future[list[Any]] | None = None

    async def load(self, name: str, path: str) -> AdapterInfo:
        """Brings an adapter to all workers; `name` stands for it from then on, whatever it stood for before.

        Raises ADAPTER_LIMIT, ADAPTER_UNSUPPORTED, MODEL_NOT_READY, CHECKPOINT_* for its files, FIELD_* for a name or
        path that cannot be.
        """
        check_adapter_name("name", name)
        check_adapter_path("path", path)
        return await self._changes.run(self._load(name, path))

    async def unload(self, name: str, *, wait: bool) -> None:
        """Takes an adapter away; with `wait` as soon as no request has it. Raises ADAPTER_NOT_FOUND, ADAPTER_IN_USE."""
        adapter = self._find(name)
        if adapter.num_requests and not wait:
            raise StepwireError(
                "ADAPTER_IN_USE",
                f"{adapter.num_requests} requests have the adapter {name!r}; ask for it to wait until they end",
                {"adapter": name, "requests": str(adapter.num_requests)},
            )
        await self._changes.run(self._retire(adapter))

    def infos(self) -> list[AdapterInfo]:
        """All of them, by name, those that leave last."""
        known = sorted(self._by_name.values(), key=lambda adapter: adapter.name)
        return [adapter.info() for adapter in (*known, *self._leaving)]

    @contextmanager
    def used(self, name: str) -> Iterator[str]:
        """Keeps an adapter for one request, and gives its fingerprint; "" for "". Raises ADAPTER_NOT_FOUND."""
        if not name:
            yield ""
            return
        adapter = self._find(name)
        adapter.num_requests += 1
        adapter.idle.clear()
        try:
            yield adapter.held.fingerprint
        finally:
            adapter.num_requests -= 1
            if not adapter.num_requests:
                adapter.idle.set()

    async def add_all(self, ports: Sequence[WorkerPort], epoch: int) -> None:
        """Makes the workers of a group, in a new epoch, hold what is live, and nothing else.

        One whose files are gone, or are others now, is dropped: its requests fail, and no others. Raises StepwireError
        when a worker fails.
        """
        self._groups[tuple(ports)] = epoch
        if self._asking is not None:
            # A worker of an epoch that has ended may never answer.
            self._asking.cancel()
        async with self._lock:
            live = {adapter.held.fingerprint: adapter for adapter in self._all()}
            found = await asyncio.gather(*(_settle(port, epoch, live) for port in ports))
            for fingerprint, error in (pair for lost in found for pair in lost.items()):
                self._drop(fingerprint, error)

    def forget(self, ports: Sequence[WorkerPort]) -> None:
        """A group of workers serves no more."""
        self._groups.pop(tuple(ports), None)

    async def close(self) -> None:
        """Ends changes under way."""
        await self._changes.close()

    async def _load(self, name: str, path: str) -> AdapterInfo:
        async with self._lock:
            if not self._groups:
                raise not_ready()
            before = self._by_name.get(name)
            if before is None and len(self._by_name) >= self._max_adapters:
                raise StepwireError(
                    "ADAPTER_LIMIT",
                    f"{len(self._by_name)} adapters are loaded and max_adapters allows no more; unload one first",
                    {"limit": str(self._max_adapters)},
                )
            held = await self._add(path)
            if before is not None and before.held.fingerprint == held[0].fingerprint:
                before.path = path
                return before.info()
            adapter = _LiveAdapter(name, path, held[0], sum(each.num_bytes for each in held))
            adapter.idle.set()
            self._by_name[name] = adapter
        _log.info("adapter_loaded", name=name, path=path, fingerprint=adapter.held.fingerprint, rank=adapter.held.rank)
        if before is not None:
            self._changes.begin(self._retire(before))
        return adapter.info()

    async def _add(self, path: str) -> list[HeldAdapter]:
        """On all workers, or on none."""
        outcomes = await self._ask(port.adapters.add(epoch, path, "") for port, epoch in self._workers())
        held = [outcome for outcome in outcomes if isinstance(outcome, HeldAdapter)]
        error = next((outcome for outcome in outcomes if isinstance(outcome, BaseException)), None)
        fingerprints = sorted({each.fingerprint for each in held})
        if error is None and len(fingerprints) > 1:
            error = StepwireError(
                "CHECKPOINT_INVALID",
                f"{path} holds other files on one worker than on another; give all of them the same",
                {"file": path, "found": ", ".join(fingerprints)},
            )
        if error is not None:
            for fingerprint in fingerprints:
                await self._remove(fingerprint)
            raise not_ready() if isinstance(error, StepwireError) and error.reason in _BETWEEN_EPOCHS else error
        return held

    async def _ask(self, calls: Iterable[Coroutine[Any, Any, T]]) -> list[T | BaseException]:
        """Calls all workers at once; answers what each answered or raised. Raises MODEL_NOT_READY when their epoch ends
        meanwhile."""
        self._asking = asyncio.gather(*calls, return_exceptions=True)
        try:
            return await self._asking
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise not_ready() from None
        finally:
            self._asking = None

    async def _retire(self, adapter: _LiveAdapter) -> None:
        """Hides an adapter from new requests, and takes it from the workers once it has none."""
        if self._by_name.get(adapter.name) is adapter:
            del self._by_name[adapter.name]
        adapter.is_leaving = True
        self._leaving.append(adapter)
        await adapter.idle.wait()
        async with self._lock:
            if adapter in self._leaving:
                self._leaving.remove(adapter)
                await self._remove(adapter.held.fingerprint)
        _log.info("adapter_unloaded", name=adapter.name, fingerprint=adapter.held.fingerprint)

    async def _remove(self, fingerprint: str) -> None:
        """Takes content from all workers, unless a name stands for it. A worker that cannot be asked has lost it."""
        if any(adapter.held.fingerprint == fingerprint for adapter in self._all()):
            return
        try:
            outcomes = await self._ask(port.adapters.remove(epoch, fingerprint) for port, epoch in self._workers())
        except StepwireError as error:
            outcomes = [error]
        for outcome in outcomes:
            if isinstance(outcome, StepwireError):
                _log.warning("adapter_not_removed", fingerprint=fingerprint, reason=outcome.reason, error=str(outcome))
            elif isinstance(outcome, BaseException):
                raise outcome

    def _drop(self, fingerprint: str, error: StepwireError) -> None:
        for adapter in self._all():
            if adapter.held.fingerprint == fingerprint:
                _log.error("adapter_lost", name=adapter.name, path=adapter.path, reason=error.reason, error=str(error))
        self._by_name = {name: a for name, a in self._by_name.items() if a.held.fingerprint != fingerprint}
        self._leaving = [adapter for adapter in self._leaving if adapter.held.fingerprint != fingerprint]

    def _find(self, name: str) -> _LiveAdapter:
        adapter = self._by_name.get(name)
        if adapter is None:
            names = sorted(self._by_name)
            more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
            loaded = ", ".join(names[:_MOST_NAMES]) + more
            raise StepwireError(
                "ADAPTER_NOT_FOUND",
                f"no adapter {name[:128]!r} is loaded; " + (f"these are: {loaded}" if names else "none is"),
                {"adapter": name[:128], "loaded": loaded},
            )
        return adapter

    def _workers(self) -> Iterator[tuple[WorkerPort, int]]:
        """Every worker, with its epoch."""
        return ((port, epoch) for ports, epoch in self._groups.items() for port in ports)

    def _all(self) -> list[_LiveAdapter]:
        return [*self._by_name.values(), *self._leaving]


async def _settle(port: WorkerPort, epoch: int, live: dict[str, _LiveAdapter]) -> dict[str, StepwireError]:
    """Makes one worker hold just the live adapters; answers those that it cannot hold."""
    held = {adapter.fingerprint for adapter in await port.adapters.list()}
    for fingerprint in held - live.keys():
        await port.adapters.remove(epoch, fingerprint)
    lost = {}
    for fingerprint, adapter in live.items():
        if fingerprint in held:
            continue
        try:
            await port.adapters.add(epoch, adapter.path, fingerprint)
        except StepwireError as error:
            if error.reason not in _ITS_OWN_FAULT:
                raise
            lost[fingerprint] = error
    return lost
