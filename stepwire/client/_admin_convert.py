"""Between the values of the admin client and wire messages."""

from collections.abc import Iterable, Sequence

from google.protobuf import duration_pb2

from stepwire.client._convert import UnaryCall, filled
from stepwire.client._convert import model as model_of
from stepwire.client.admin_types import Adapter, Profile, ProfileRow, RankProfile, ServerState, WorkerState
from stepwire.v1 import admin_pb2, worker_pb2


def get_state() -> UnaryCall[ServerState]:
    """Asks how the server stands."""
    return UnaryCall("GetState", admin_pb2.GetStateRequest(), _state)


def profile(num_steps: int, wait_s: float) -> UnaryCall[Profile]:
    """Profiles the next steps, and waits so long for them; the answer comes in parts."""
    wait = duration_pb2.Duration()
    wait.FromNanoseconds(int(wait_s * 1e9))
    return UnaryCall("Profile", admin_pb2.ProfileRequest(step_count=num_steps, timeout=wait), _profile)


def add_replica(workers: Sequence[str]) -> UnaryCall[int]:
    """Serves on more workers."""
    return UnaryCall("AddReplica", admin_pb2.AddReplicaRequest(workers=workers), lambda answer: int(answer.replica))


def drain_replica(replica: int) -> UnaryCall[None]:
    """Takes a replica out of service."""
    return UnaryCall("DrainReplica", admin_pb2.DrainReplicaRequest(replica=replica), lambda _answer: None)


def get_flight() -> UnaryCall[bytes]:
    """Asks for the flight recording; the answer comes in parts."""
    return UnaryCall("GetFlight", admin_pb2.GetFlightRequest(), lambda parts: b"".join(p.recording for p in parts))


def _profile(parts: Iterable[admin_pb2.ProfileResponse]) -> Profile:
    timeline, summary = bytearray(), admin_pb2.GroupProfile()
    for part in parts:
        timeline += part.timeline
        if part.HasField("summary"):
            summary = part.summary
    ranks = tuple(RankProfile(rank.step_count, tuple(map(_row, rank.rows))) for rank in summary.ranks)
    return Profile(ranks, bytes(timeline))


def _row(row: worker_pb2.ProfileRow) -> ProfileRow:
    return ProfileRow(row.part, row.operator, row.call_count, row.cpu_ns / 1e9, row.device_ns / 1e9)


def load_adapter(name: str, path: str) -> UnaryCall[Adapter]:
    """Asks for an adapter to be loaded."""
    request = filled(admin_pb2.LoadAdapterRequest, name=name, path=path)
    return UnaryCall("LoadAdapter", request, lambda answer: _adapter(answer.adapter))


def unload_adapter(name: str, *, wait: bool) -> UnaryCall[None]:
    """Asks for an adapter to be taken away."""
    return UnaryCall(
        "UnloadAdapter", filled(admin_pb2.UnloadAdapterRequest, name=name, wait=wait), lambda _answer: None
    )


def list_adapters() -> UnaryCall[tuple[Adapter, ...]]:
    """Asks for all adapters."""
    request = admin_pb2.AdminServiceListAdaptersRequest()
    return UnaryCall("ListAdapters", request, lambda answer: tuple(map(_adapter, answer.adapters)))


def sleep(*, drop_weights: bool) -> UnaryCall[None]:
    """Asks for the workers to sleep."""
    level = worker_pb2.SLEEP_LEVEL_DROP_WEIGHTS if drop_weights else worker_pb2.SLEEP_LEVEL_KEEP_WEIGHTS
    return UnaryCall("Sleep", admin_pb2.AdminServiceSleepRequest(level=level), lambda _answer: None)


def wake_up() -> UnaryCall[None]:
    """Asks for the workers to wake up."""
    return UnaryCall("WakeUp", admin_pb2.AdminServiceWakeUpRequest(), lambda _answer: None)


def _adapter(message: admin_pb2.Adapter) -> Adapter:
    return Adapter(
        name=message.name,
        fingerprint=message.fingerprint,
        path=message.path,
        rank=message.rank,
        num_bytes=message.byte_count,
        num_requests=message.request_count,
        is_leaving=message.leaving,
    )


def _state(message: admin_pb2.GetStateResponse) -> ServerState:
    return ServerState(
        model=model_of(message.model),
        epoch=message.epoch,
        workers=tuple(map(_worker, message.workers)),
        num_calls=message.call_count,
        uptime_s=message.uptime.ToNanoseconds() / 1e9,
    )


def _worker(message: admin_pb2.WorkerState) -> WorkerState:
    return WorkerState(
        rank=message.rank,
        address=message.address,
        host=message.host,
        process_id=message.process_id,
        replica=message.replica,
        silent_s=message.silent_duration.ToNanoseconds() / 1e9,
    )
