"""What AdminService tells of the steps themselves: Profile and GetFlight."""

from collections.abc import AsyncIterator, Iterator

from scheduler_service.engine.group import WorkerGroup
from scheduler_service.engine.models import Models
from scheduler_service.engine.profile import GroupProfile, profile_group
from scheduler_service.engine.refusals import not_ready
from scheduler_service.rpc.flight_file import recording
from stepwire.rpc.errors import StepwireError
from stepwire.v1 import admin_pb2 as pb
from stepwire.v1 import worker_pb2

_CHUNK_BYTES = 1 << 20
_TIMEOUT_S = 60.0
_MOST_TIMEOUT_S = 600.0


class DiagnosisCalls:
    """Profile and GetFlight."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._is_profiling = False

    async def profile(self, request: pb.ProfileRequest) -> AsyncIterator[pb.ProfileResponse]:
        """See admin.proto."""
        timeout_s = request.timeout.ToNanoseconds() / 1e9 if request.HasField("timeout") else _TIMEOUT_S
        if not 0 < timeout_s <= _MOST_TIMEOUT_S:
            text = f"timeout of {timeout_s:g} s lies outside 0 to {_MOST_TIMEOUT_S:g} s"
            raise StepwireError("FIELD_OUT_OF_RANGE", text, {"field": "timeout"})
        group = self._group(request.model, request.replica)
        if self._is_profiling:
            raise StepwireError("QUEUE_FULL", "another profile goes on: ask again when it is done", {}, timeout_s)
        self._is_profiling = True
        try:
            profile = await profile_group(group, request.step_count, timeout_s)
        finally:
            self._is_profiling = False
        for chunk in _chunks(profile.timeline):
            yield pb.ProfileResponse(timeline=chunk)
        yield pb.ProfileResponse(summary=_summary(profile))

    async def flight(self, request: pb.GetFlightRequest) -> AsyncIterator[pb.GetFlightResponse]:
        """See admin.proto."""
        group = self._group(request.model, request.replica)
        message = recording(group.flight, group.epoch, "asked for")
        for chunk in _chunks(message.SerializeToString()):
            yield pb.GetFlightResponse(recording=chunk)

    def _group(self, model: str, number: int) -> WorkerGroup:
        replicas = {replica.number: replica for replica in self._models.get(model).replicas}
        if replicas and number not in replicas:
            text = f"there is no replica {number}; these are: {', '.join(map(str, replicas))}"
            raise StepwireError("FIELD_INVALID", text, {"field": "replica", "found": str(number)})
        group = replicas[number].group if replicas else None
        if group is None:
            raise not_ready()
        return group


def _chunks(data: bytes) -> Iterator[bytes]:
    for start in range(0, len(data), _CHUNK_BYTES):
        yield data[start : start + _CHUNK_BYTES]


def _summary(profile: GroupProfile) -> pb.GroupProfile:
    ranks = [
        worker_pb2.ProfileSummary(
            step_count=rank.num_steps,
            rows=[
                worker_pb2.ProfileRow(
                    part=row.part,
                    operator=row.operator,
                    call_count=row.num_calls,
                    cpu_ns=row.cpu_ns,
                    device_ns=row.device_ns,
                )
                for row in rank.rows
            ],
        )
        for rank in profile.ranks
    ]
    return pb.GroupProfile(ranks=ranks)
