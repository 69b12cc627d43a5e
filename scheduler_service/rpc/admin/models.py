"""Models that come and go while the others are served, as AdminService tells it."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from scheduler_service.engine.values import ModelInfo
from scheduler_service.rpc.admin.replicas import check_addresses
from scheduler_service.rpc.admin.roots import Roots
from scheduler_service.rpc.convert import model_message
from scheduler_service.sources import check_source, is_elsewhere
from stepwire.rpc.errors import StepwireError
from stepwire.v1 import admin_pb2 as pb

_MAX_NAME_LEN = 256
_MAX_SETTINGS = 64
_MAX_SETTING_LEN = 4096
_MAX_SETTING_NAME_LEN = 64
_MAX_DRAIN_S = 86_400.0
# Those that are given otherwise, or by whoever started the service alone.
_NO_SETTINGS = {
    "model": "give it as the field path",
    "served_model_name": "give it as the field name",
    "workers": "give them as the field workers",
    "adapter": "load adapters with LoadAdapter, once the model serves",
    "restart_store": "it is the service's own",
}


class ModelOperator(Protocol):
    """Who changes which models are served; see ModelServices."""

    async def add_replica(self, name: str, addresses: Sequence[str]) -> int: ...
    async def load(self, settings: Mapping[str, str], workers: Sequence[str]) -> ModelInfo: ...
    async def unload(self, name: str, drain_s: float | None) -> None: ...


class ModelCalls:
    """LoadModel and UnloadModel."""

    def __init__(self, operator: ModelOperator, roots: Roots) -> None:
        self._operator = operator
        self._roots = roots

    async def load(self, request: pb.AdminServiceLoadModelRequest) -> pb.AdminServiceLoadModelResponse:
        """See admin.proto."""
        settings = {"model": self._model(request.path)}
        if len(request.name) > _MAX_NAME_LEN:
            text = f"name has {len(request.name)} characters; at most {_MAX_NAME_LEN} are allowed"
            raise StepwireError("FIELD_OUT_OF_RANGE", text, {"field": "name"})
        if request.name:
            settings["served_model_name"] = request.name
        if request.workers:
            check_addresses(request.workers)
        if len(request.settings) > _MAX_SETTINGS:
            text = f"settings has {len(request.settings)} entries; at most {_MAX_SETTINGS} are allowed"
            raise StepwireError("FIELD_OUT_OF_RANGE", text, {"field": "settings"})
        for name, value in request.settings.items():
            if len(name) > _MAX_SETTING_NAME_LEN:
                text = f"settings: {name[:_MAX_SETTING_NAME_LEN]}... is no setting's name"
                raise StepwireError("FIELD_INVALID", text, {"field": "settings"})
            if name in _NO_SETTINGS:
                text = f"settings: {name} cannot be among them; {_NO_SETTINGS[name]}"
                raise StepwireError("FIELD_INVALID", text, {"field": "settings"})
            if len(value) > _MAX_SETTING_LEN:
                text = f"settings: {name} has {len(value)} characters; at most {_MAX_SETTING_LEN} are allowed"
                raise StepwireError("FIELD_OUT_OF_RANGE", text, {"field": "settings"})
        info = await self._operator.load({**request.settings, **settings}, list(request.workers))
        return pb.AdminServiceLoadModelResponse(model=model_message(info))

    def _model(self, path: str) -> str:
        if not is_elsewhere(path):
            return self._roots.check(path)
        self._roots.check_unbounded(path)
        return check_source(path)

    async def unload(self, request: pb.UnloadModelRequest) -> pb.UnloadModelResponse:
        """See admin.proto."""
        if not request.model:
            raise StepwireError("FIELD_INVALID", "model is missing: name the one to unload", {"field": "model"})
        drain_s = request.drain_timeout.ToNanoseconds() / 1e9 if request.HasField("drain_timeout") else None
        if drain_s is not None and not 0 <= drain_s <= _MAX_DRAIN_S:
            text = f"drain_timeout of {drain_s:g} s lies outside 0 to {_MAX_DRAIN_S:g} s"
            raise StepwireError("FIELD_OUT_OF_RANGE", text, {"field": "drain_timeout"})
        await self._operator.unload(request.model, drain_s)
        return pb.UnloadModelResponse()
