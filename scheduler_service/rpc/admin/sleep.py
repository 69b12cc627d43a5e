"""Sleep and WakeUp, as AdminService takes them."""

from scheduler_service.engine.models import Models
from scheduler_service.engine.ports import SleepLevel
from stepwire.rpc.errors import StepwireError
from stepwire.v1 import admin_pb2 as pb
from stepwire.v1 import worker_pb2

_LEVELS = {int(level): level for level in (SleepLevel.KEEP_WEIGHTS, SleepLevel.DROP_WEIGHTS)}


class SleepCalls:
    """Both calls."""

    def __init__(self, models: Models) -> None:
        self._models = models

    async def sleep(self, request: pb.AdminServiceSleepRequest) -> pb.AdminServiceSleepResponse:
        """See admin.proto."""
        level = _LEVELS.get(request.level)
        if level is None:
            names = ", ".join(f"SLEEP_LEVEL_{level.name}" for level in _LEVELS.values())
            metadata = {"field": "level", "found": str(request.level), "expected": names}
            raise StepwireError("FIELD_INVALID", f"level is {request.level}; expected one of {names}", metadata)
        in_force = await self._models.get(request.model).sleeper.sleep(level)
        return pb.AdminServiceSleepResponse(level=worker_pb2.SleepLevel.ValueType(in_force))

    async def wake_up(self, request: pb.AdminServiceWakeUpRequest) -> pb.AdminServiceWakeUpResponse:
        """See admin.proto."""
        await self._models.get(request.model).sleeper.wake_up()
        return pb.AdminServiceWakeUpResponse()
