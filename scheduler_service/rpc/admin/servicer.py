"""AdminService over gRPC: which RPC is whose. Each kind of operation is a module beside this one."""

from collections.abc import AsyncIterator
from typing import Any

import grpc

from scheduler_service.engine.models import Models
from scheduler_service.rpc.admin.adapters import AdapterCalls
from scheduler_service.rpc.admin.diagnosis import DiagnosisCalls
from scheduler_service.rpc.admin.models import ModelCalls, ModelOperator
from scheduler_service.rpc.admin.replicas import ReplicaCalls
from scheduler_service.rpc.admin.roots import Roots
from scheduler_service.rpc.admin.sleep import SleepCalls
from scheduler_service.rpc.admin.state import StateCalls
from stepwire.v1 import admin_pb2, admin_pb2_grpc

ADMIN_SERVICE_NAME = "stepwire.v1.AdminService"

_Context = grpc.aio.ServicerContext[Any, Any]


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """All RPCs of admin.proto. Errors are raised as StepwireError; the server has checked the admin key."""

    def __init__(self, models: Models, operator: ModelOperator, adapter_roots: Roots, model_roots: Roots) -> None:
        self._state = StateCalls(models)
        self._models = ModelCalls(operator, model_roots)
        self._diagnosis = DiagnosisCalls(models)
        self._replicas = ReplicaCalls(models, operator.add_replica)
        self._adapters = AdapterCalls(models, adapter_roots)
        self._sleep = SleepCalls(models)

    async def GetState(self, request: admin_pb2.GetStateRequest, _context: _Context) -> admin_pb2.GetStateResponse:
        """See admin.proto."""
        return self._state.get(request)

    async def LoadModel(
        self, request: admin_pb2.AdminServiceLoadModelRequest, _context: _Context
    ) -> admin_pb2.AdminServiceLoadModelResponse:
        """See admin.proto."""
        return await self._models.load(request)

    async def UnloadModel(
        self, request: admin_pb2.UnloadModelRequest, _context: _Context
    ) -> admin_pb2.UnloadModelResponse:
        """See admin.proto."""
        return await self._models.unload(request)

    async def Profile(
        self, request: admin_pb2.ProfileRequest, _context: _Context
    ) -> AsyncIterator[admin_pb2.ProfileResponse]:
        """See admin.proto."""
        async for response in self._diagnosis.profile(request):
            yield response

    async def GetFlight(
        self, request: admin_pb2.GetFlightRequest, _context: _Context
    ) -> AsyncIterator[admin_pb2.GetFlightResponse]:
        """See admin.proto."""
        async for response in self._diagnosis.flight(request):
            yield response

    async def AddReplica(
        self, request: admin_pb2.AddReplicaRequest, _context: _Context
    ) -> admin_pb2.AddReplicaResponse:
        """See admin.proto."""
        return await self._replicas.add(request)

    async def DrainReplica(
        self, request: admin_pb2.DrainReplicaRequest, _context: _Context
    ) -> admin_pb2.DrainReplicaResponse:
        """See admin.proto."""
        return await self._replicas.drain(request)

    async def LoadAdapter(
        self, request: admin_pb2.LoadAdapterRequest, _context: _Context
    ) -> admin_pb2.LoadAdapterResponse:
        """See admin.proto."""
        return await self._adapters.load(request)

    async def UnloadAdapter(
        self, request: admin_pb2.UnloadAdapterRequest, _context: _Context
    ) -> admin_pb2.UnloadAdapterResponse:
        """See admin.proto."""
        return await self._adapters.unload(request)

    async def Sleep(
        self, request: admin_pb2.AdminServiceSleepRequest, _context: _Context
    ) -> admin_pb2.AdminServiceSleepResponse:
        """See admin.proto."""
        return await self._sleep.sleep(request)

    async def WakeUp(
        self, request: admin_pb2.AdminServiceWakeUpRequest, _context: _Context
    ) -> admin_pb2.AdminServiceWakeUpResponse:
        """See admin.proto."""
        return await self._sleep.wake_up(request)

    async def ListAdapters(
        self, request: admin_pb2.AdminServiceListAdaptersRequest, _context: _Context
    ) -> admin_pb2.AdminServiceListAdaptersResponse:
        """See admin.proto."""
        return self._adapters.list(request)
