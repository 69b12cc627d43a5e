"""Between the values of the admin client and wire messages."""

from collections.abc import Iterable, Mapping, Sequence

from google.protobuf import duration_pb2

from stepwire.client._convert import UnaryCall, filled
from stepwire.client._convert import model as model_of
from stepwire.client.admin_types import Adapter, Profile, ProfileRow, RankProfile, ServerState, WorkerState
from stepwire.client.types import Model
from stepwire.v1 import admin_pb2, worker_pb2


def get_state(model: str) -> UnaryCall[ServerState]:
    """Asks how the server stands."""
    return UnaryCall("GetState", filled(admin_pb2.GetStateRequest, model=model), _state)


def load_model(path: str, name: str, workers: Sequence[str], settings: Mapping[str, str]) -> UnaryCall[Model]:
    """Asks for one model more."""
    request = filled(
        admin_pb2.AdminServiceLoadModelRequest, path=path, name=name, workers=workers, settings=dict(settings)
    )
    return UnaryCall("LoadModel", request, lambda answer: model_of(answer.model))


def unload_model(name: str, drain_s: float | None) -> UnaryCall[None]:
    """Asks for a model to be taken out of service."""
    request = filled(admin_pb2.UnloadModelRequest, model=name, drain_timeout=_duration(drain_s))
    return UnaryCall("UnloadModel", request, lambda _answer: None)


def profile(num_steps: int, wait_s: float, model: str) -> UnaryCall[Profile]:
    """Profiles the next steps, and waits so long for them; the answer comes in parts."""
    request = filled(admin_pb2.ProfileRequest, step_count=num_steps, timeout=_duration(wait_s), model=model)
    return UnaryCall("Profile", request, _profile)


def add_replica(workers: Sequence[str], model: str) -> UnaryCall[int]:
    """Serves on more workers."""
    request = filled(admin_pb2.AddReplicaRequest, workers=workers, model=model)
    return UnaryCall("AddReplica", request, lambda answer: int(answer.replica))


def drain_replica(replica: int, model: str) -> UnaryCall[None]:
    """Takes a replica out of service."""
    request = filled(admin_pb2.DrainReplicaRequest, replica=replica, model=model)
    return UnaryCall("DrainReplica", request, lambda _answer: None)


def get_flight(model: str) -> UnaryCall[bytes]:
    """Asks for the flight recording; the answer comes in parts."""
    request = filled(admin_pb2.GetFlightRequest, model=model)
    return UnaryCall("GetFlight", request, lambda parts: b"".join(p.recording for p in parts))


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


def load_adapter(name: str, path: str, model: str) -> UnaryCall[Adapter]:
    """Asks for an adapter to be loaded."""
    request = filled(admin_pb2.LoadAdapterRequest, name=name, path=path, model=model)
    return UnaryCall("LoadAdapter", request, lambda answer: _adapter(answer.adapter))


def unload_adapter(name: str, model: str, *, wait: bool) -> UnaryCall[None]:
    """Asks for an adapter to be taken away."""
    request = filled(admin_pb2.UnloadAdapterRequest, name=name, wait=wait, model=model)
    return UnaryCall("UnloadAdapter", request, lambda _answer: None)


def list_adapters(model: str) -> UnaryCall[tuple[Adapter, ...]]:
    """Asks for all adapters."""
    request = filled(admin_pb2.AdminServiceListAdaptersRequest, model=model)
    return UnaryCall("ListAdapters", request, lambda answer: tuple(map(_adapter, answer.adapters)))


def sleep(model: str, *, drop_weights: bool) -> UnaryCall[None]:
    """Asks for the workers to sleep."""
    level = worker_pb2.SLEEP_LEVEL_DROP_WEIGHTS if drop_weights else worker_pb2.SLEEP_LEVEL_KEEP_WEIGHTS
    request = filled(admin_pb2.AdminServiceSleepRequest, level=level, model=model)
    return UnaryCall("Sleep", request, lambda _answer: None)


def wake_up(model: str) -> UnaryCall[None]:
    """Asks for the workers to wake up."""
    return UnaryCall("WakeUp", filled(admin_pb2.AdminServiceWakeUpRequest, model=model), lambda _answer: None)


def _duration(seconds: float | None) -> duration_pb2.Duration | None:
    if seconds is None:
        return None
    duration = duration_pb2.Duration()
    duration.FromNanoseconds(int(seconds * 1e9))
    return duration


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
        models=tuple(message.models),
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
