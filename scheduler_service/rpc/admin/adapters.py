"""Adapters, as AdminService loads, lists and unloads them."""

from scheduler_service.engine.adapters import AdapterInfo
from scheduler_service.engine.models import Models
from scheduler_service.rpc.admin.roots import Roots
from stepwire.v1 import admin_pb2 as pb


class AdapterCalls:
    """LoadAdapter, UnloadAdapter and ListAdapters."""

    def __init__(self, models: Models, roots: Roots) -> None:
        self._models = models
        self._roots = roots

    async def load(self, request: pb.LoadAdapterRequest) -> pb.LoadAdapterResponse:
        """See admin.proto."""
        adapters = self._models.get(request.model).adapters
        info = await adapters.load(request.name, self._roots.check(request.path))
        return pb.LoadAdapterResponse(adapter=_adapter(info))

    async def unload(self, request: pb.UnloadAdapterRequest) -> pb.UnloadAdapterResponse:
        """See admin.proto."""
        await self._models.get(request.model).adapters.unload(request.name, wait=request.wait)
        return pb.UnloadAdapterResponse()

    def list(self, request: pb.AdminServiceListAdaptersRequest) -> pb.AdminServiceListAdaptersResponse:
        """See admin.proto."""
        infos = self._models.get(request.model).adapters.infos()
        return pb.AdminServiceListAdaptersResponse(adapters=map(_adapter, infos))


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
