"""Between the values of the admin client and wire messages."""

from stepwire.client._convert import UnaryCall
from stepwire.client._convert import model as model_of
from stepwire.client.admin_types import ServerState, WorkerState
from stepwire.v1 import admin_pb2


def get_state() -> UnaryCall[ServerState]:
    """Asks how the server stands."""
    return UnaryCall("GetState", admin_pb2.GetStateRequest(), _state)


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
        silent_s=message.silent_duration.ToNanoseconds() / 1e9,
    )
