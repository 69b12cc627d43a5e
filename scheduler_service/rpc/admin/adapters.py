"""Adapters, as AdminService loads, lists and unloads them."""

import posixpath
from collections.abc import Sequence

from scheduler_service.engine.adapters import AdapterInfo, Adapters
from scheduler_service.engine.validate import check_adapter_path
from stepwire.rpc.errors import StepwireError
from stepwire.rpc.exposure import is_loopback
from stepwire.v1 import admin_pb2 as pb


class AdapterRoots:
    """The folders of the workers' hosts that operators may load adapters from; none means anywhere, on loopback only.

    Paths are compared as they are written: they are of other hosts. Where links lead is for the workers to look at,
    and their own roots.
    """

    def __init__(self, roots: Sequence[str], host: str) -> None:
        self._roots = [posixpath.normpath(root) for root in roots]
        self._is_exposed = not is_loopback(host)

    def check(self, path: str) -> str:
        """The path without "..". Raises FIELD_INVALID or FIELD_OUT_OF_RANGE for one that is not allowed."""
        check_adapter_path("path", path)
        plain = posixpath.normpath(path)
        if not self._roots and not self._is_exposed:
            return plain
        if any(plain.startswith(root.rstrip("/") + "/") for root in self._roots):
            return plain
        roots = ", ".join(self._roots) or "none: this server is reachable from other machines"
        remedy = "put the adapter there, or set adapter_roots of the scheduler"
        text = f"path {plain[:256]} is not below the scheduler's adapter roots ({roots}); {remedy}"
        raise StepwireError("FIELD_INVALID", text, {"field": "path", "found": plain[:256], "remedy": remedy})


class AdapterCalls:
    """LoadAdapter, UnloadAdapter and ListAdapters."""

    def __init__(self, adapters: Adapters, roots: AdapterRoots) -> None:
        self._adapters = adapters
        self._roots = roots

    async def load(self, request: pb.LoadAdapterRequest) -> pb.LoadAdapterResponse:
        """See admin.proto."""
        info = await self._adapters.load(request.name, self._roots.check(request.path))
        return pb.LoadAdapterResponse(adapter=_adapter(info))

    async def unload(self, request: pb.UnloadAdapterRequest) -> pb.UnloadAdapterResponse:
        """See admin.proto."""
        await self._adapters.unload(request.name, wait=request.wait)
        return pb.UnloadAdapterResponse()

    def list(self) -> pb.AdminServiceListAdaptersResponse:
        """See admin.proto."""
        return pb.AdminServiceListAdaptersResponse(adapters=map(_adapter, self._adapters.infos()))


def _adapter(info: AdapterInfo) -> pb.Adapter:
    return pb.Adapter(
        name=info.name,
        fingerprint=info.fingerprint,
        path=info.path,
        rank=info.rank,
        byte_count=info.num_bytes,
        request_count=info.num_requests,
        leaving=info.is_leaving,
    )
