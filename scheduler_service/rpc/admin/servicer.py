"""AdminService over gRPC: which RPC is whose. Each kind of operation is a module beside this one."""

from typing import Any

import grpc

from scheduler_service.engine.engine import Engine
from scheduler_service.rpc.admin.state import StateCalls
from stepwire.v1 import admin_pb2, admin_pb2_grpc

ADMIN_SERVICE_NAME = "stepwire.v1.AdminService"

_Context = grpc.aio.ServicerContext[Any, Any]


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """All RPCs of admin.proto. Errors are raised as StepwireError; the server has checked the admin key."""

    def __init__(self, engine: Engine) -> None:
        self._state = StateCalls(engine)

    async def GetState(self, _request: admin_pb2.GetStateRequest, _context: _Context) -> admin_pb2.GetStateResponse:
        """See admin.proto."""
        return self._state.get()
