"""Adapters of a worker: read on threads of their own, taken in step order by the device thread."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol, TypeVar

import structlog

from stepwire.rpc.errors import StepwireError
from worker_service.device_thread import DeviceThread
from worker_service.rpc.failures import adapter_failure
from worker_service.rpc.paths import ModelRoots
from worker_service.rpc.ports import AdapterReader, Runtime
from worker_service.rpc.state import WorkerState
from worker_service.runtime.adapters import AdapterReport, HostAdapter
from worker_service.runtime.errors import RuntimeFailure
from worker_service.runtime.report import Phase

T = TypeVar("T")

_RETRY_AFTER_S = 5.0
_FINGERPRINT = re.compile(r"[0-9a-f]{64}")

_log = structlog.stdlib.get_logger(__name__)


class Change(Protocol):
    """Makes a change after those before it, and finishes it once it has begun."""

    def __call__(self, change: Coroutine[Any, Any, Any], /) -> Awaitable[Any]: ...


class AdapterCalls:
    """AddAdapter, RemoveAdapter and ListAdapters. Methods raise StepwireError, and what the loader raises."""

    def __init__(self, state: WorkerState, device: DeviceThread[Runtime], roots: ModelRoots, change: Change) -> None:
        self._state = state
        self._device = device
        self._roots = roots
        self._change = change
        # One after the other: each may take as much memory as is allowed for all.
        self._reading = asyncio.Lock()

    async def add(self, epoch: int, path: str, fingerprint: str) -> AdapterReport:
        """See worker.proto. Steps and other changes go on while it reads."""
        self._check_takes(epoch)
        if fingerprint:
            check_fingerprint(fingerprint)
        resolved = await asyncio.to_thread(self._roots.resolve, path, "path")
        async with self._reading:
            reader = await self._device.run(_reader)
            adapter = await asyncio.to_thread(_named, lambda: reader.read(resolved))
            if fingerprint not in ("", adapter.fingerprint):
                raise _changed(path, fingerprint, adapter.fingerprint)
            report: AdapterReport = await self._change(self._install(epoch, adapter))
        _log.info("adapter_added", path=path, fingerprint=report.fingerprint, rank=report.rank, bytes=report.num_bytes)
        return report

    async def remove(self, epoch: int, fingerprint: str) -> None:
        """See worker.proto."""
        check_fingerprint(fingerprint)
        self._check(epoch, "RemoveAdapter")
        await self._change(self._remove(epoch, fingerprint))
        _log.info("adapter_removed", fingerprint=fingerprint)

    async def list(self) -> list[AdapterReport]:
        """See worker.proto."""
        if not self._has_model:
            return []
        return await self._device.run(lambda runtime: runtime.adapters().table.reports())

    @property
    def _has_model(self) -> bool:
        """Whether there is a model, and with it its adapters: one that sleeps may have dropped them."""
        return self._state.kept_phase >= Phase.LOADED

    def _check_takes(self, epoch: int) -> None:
        self._check(epoch, "AddAdapter")
        if not self._has_model:
            text = (
                "the model sleeps without its weights and takes no adapters; wake it up with stepwire admin wake first"
            )
            raise StepwireError("MODEL_ASLEEP", text, retry_after_s=_RETRY_AFTER_S)

    def _check(self, epoch: int, call: str) -> None:
        self._state.require_epoch(epoch)
        if self._state.phase < Phase.LOADED:
            raise self._state.wrong_phase(call, Phase.LOADED)

    async def _install(self, epoch: int, adapter: HostAdapter) -> AdapterReport:
        # A reset, or a sleep, may have come while it was read.
        self._check_takes(epoch)
        return await self._device.run(lambda runtime: _add(runtime, adapter))

    async def _remove(self, epoch: int, fingerprint: str) -> None:
        self._check(epoch, "RemoveAdapter")
        if self._has_model:
            await self._device.run(lambda runtime: runtime.adapters().table.remove(fingerprint))


def check_fingerprint(fingerprint: str) -> None:
    """Raises StepwireError FIELD_INVALID for what is no fingerprint."""
    if not _FINGERPRINT.fullmatch(fingerprint):
        found = fingerprint[:80]
        message = f"fingerprint {found!r} is not a hex SHA-256 of 64 characters"
        raise StepwireError("FIELD_INVALID", message, {"field": "fingerprint", "found": found})


def _reader(runtime: Runtime) -> AdapterReader:
    return _named(lambda: runtime.adapters().reader())


def _add(runtime: Runtime, adapter: HostAdapter) -> AdapterReport:
    return _named(lambda: runtime.adapters().table.add(adapter))


def _named(call: Callable[[], T]) -> T:
    try:
        return call()
    except RuntimeFailure as error:
        failure = adapter_failure(error)
        if failure is None:
            raise
        raise failure from error


def _changed(path: str, expected: str, found: str) -> StepwireError:
    return StepwireError(
        "CHECKPOINT_INVALID",
        f"{path} holds another adapter than was loaded before: its content is {found}, not {expected}; load it again "
        "under its name",
        {"file": path, "expected": expected, "found": found},
    )
