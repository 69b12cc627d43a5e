"""The adapters of a worker, over its WorkerService."""

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from scheduler_service.engine.ports import HeldAdapter
from stepwire.v1 import worker_pb2 as pb

# Reading is bounded by the storage alone, but a call that never ends must not hold up the others for ever.
_ADD_TIMEOUT_S = 600.0
_TIMEOUT_S = 60.0


class Unary(Protocol):
    """Makes a call with one answer. Raises StepwireError."""

    def __call__(
        self, method: str, call: Callable[..., Awaitable[Any]], request: object, timeout_s: float, /
    ) -> Awaitable[Any]: ...


class WorkerAdapters:
    """See AdapterPort."""

    def __init__(self, stub: Any, unary: Unary) -> None:
        self._stub = stub
        self._unary = unary

    async def add(self, epoch: int, path: str, fingerprint: str) -> HeldAdapter:
        """See AdapterPort."""
        request = pb.AddAdapterRequest(epoch=epoch, path=path, fingerprint=fingerprint)
        response = await self._unary("AddAdapter", self._stub.AddAdapter, request, _ADD_TIMEOUT_S)
        return _held(response.adapter)

    async def remove(self, epoch: int, fingerprint: str) -> None:
        """See AdapterPort."""
        request = pb.RemoveAdapterRequest(epoch=epoch, fingerprint=fingerprint)
        await self._unary("RemoveAdapter", self._stub.RemoveAdapter, request, _TIMEOUT_S)

    async def list(self) -> list[HeldAdapter]:
        """See AdapterPort."""
        response = await self._unary("ListAdapters", self._stub.ListAdapters, pb.ListAdaptersRequest(), _TIMEOUT_S)
        return [_held(adapter) for adapter in response.adapters]


def _held(adapter: pb.HeldAdapter) -> HeldAdapter:
    return HeldAdapter(adapter.fingerprint, adapter.path, adapter.rank, adapter.byte_count)
