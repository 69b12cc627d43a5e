"""The client of AdminService, for threads."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

from opentelemetry.trace import TracerProvider

from stepwire.client import _admin_convert, _calls
from stepwire.client._calls import DEFAULT_TIMEOUT_S, CallFactory
from stepwire.client._closing import Closing
from stepwire.client._convert import UnaryCall
from stepwire.client._sync import call_unary
from stepwire.client.admin_types import Adapter, Profile, ServerState
from stepwire.client.types import Model
from stepwire.rpc.channel import create_sync_channel
from stepwire.v1.admin_pb2_grpc import AdminServiceStub

SERVICE = "stepwire.v1.AdminService"

_T = TypeVar("_T")


class AdminClient(Closing):
    """Operates a scheduler. Safe to share between threads; connects at the first call.

    `key` is the scheduler's admin key. All methods raise StepwireError when a call fails, and take a `timeout` in
    seconds for the whole call. `model` names the model that is meant; by default the first. A scheduler without an
    admin key does not know these calls.
    """

    def __init__(
        self, target: str = _calls.DEFAULT_TARGET, *, key: str, tracer_provider: TracerProvider | None = None
    ) -> None:
        self._calls = CallFactory(target, key, None, tracer_provider, SERVICE)
        self._channel = create_sync_channel(target, max_message_bytes=_calls.DEFAULT_MAX_MESSAGE_BYTES)
        self._stub = AdminServiceStub(self._channel)
        self._is_closed = False

    def get_state(self, *, model: str = "", timeout: float | None = DEFAULT_TIMEOUT_S) -> ServerState:
        """How the scheduler, a model's queue and its workers stand."""
        return self._call(_admin_convert.get_state(model), timeout)

    def load_model(
        self,
        path: str,
        *,
        name: str = "",
        workers: Sequence[str] = (),
        settings: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> Model:
        """Serves one model more, from a path of the server's hosts, a Hub id or a URL; returns when it serves.

        It runs on idle `workers`, host:port by rank, or on such as the server's supervisor starts. `settings` are
        others of the model by name. A call that ends earlier, by `timeout`, stops nothing.
        """
        return self._call(_admin_convert.load_model(path, name, workers, settings or {}), timeout)

    def unload_model(self, name: str, *, drain_s: float | None = None, timeout: float | None = None) -> None:
        """Takes a model out of service: requests that run have `drain_s` seconds, by default those of a shutdown."""
        self._call(_admin_convert.unload_model(name, drain_s), timeout)

    def profile(
        self, num_steps: int = 20, *, wait_s: float = 60.0, model: str = "", timeout: float | None = None
    ) -> Profile:
        """Profiles the next steps of all ranks, and waits so many seconds for requests that make them run."""
        return self._call(_admin_convert.profile(num_steps, wait_s, model), timeout)

    def add_replica(self, workers: Sequence[str], *, model: str = "", timeout: float | None = None) -> int:
        """Makes idle workers, host:port by rank, ready and serves on them; answers the replica's number."""
        return self._call(_admin_convert.add_replica(workers, model), timeout)

    def drain_replica(self, replica: int, *, model: str = "", timeout: float | None = None) -> None:
        """Takes a replica out of service; returns when it holds no request."""
        self._call(_admin_convert.drain_replica(replica, model), timeout)

    def get_flight(self, *, model: str = "", timeout: float | None = DEFAULT_TIMEOUT_S) -> bytes:
        """The flight recording: what `stepwire replay` reads."""
        return self._call(_admin_convert.get_flight(model), timeout)

    def load_adapter(self, name: str, path: str, *, model: str = "", timeout: float | None = None) -> Adapter:
        """Has all workers load a LoRA adapter from a directory of their hosts; requests may name it from then on.

        A name that is taken stands for the new content from then on. Takes as long as the storage.
        """
        return self._call(_admin_convert.load_adapter(name, path, model), timeout)

    def unload_adapter(self, name: str, *, wait: bool = False, model: str = "", timeout: float | None = None) -> None:
        """Takes an adapter away. While requests have it, it is refused, or `wait`s for them."""
        self._call(_admin_convert.unload_adapter(name, model, wait=wait), timeout)

    def list_adapters(self, *, model: str = "", timeout: float | None = DEFAULT_TIMEOUT_S) -> tuple[Adapter, ...]:
        """The adapters, by name; those that are being taken away last."""
        return self._call(_admin_convert.list_adapters(model), timeout)

    def sleep(self, *, drop_weights: bool = False, model: str = "", timeout: float | None = None) -> None:
        """Has the workers give their devices' memory back once nothing runs; with `drop_weights` that of the weights
        too, which are then loaded again. A call that ends earlier, by `timeout`, undoes it."""
        self._call(_admin_convert.sleep(model, drop_weights=drop_weights), timeout)

    def wake_up(self, *, model: str = "", timeout: float | None = None) -> None:
        """Has the workers take their memory again."""
        self._call(_admin_convert.wake_up(model), timeout)

    def close(self) -> None:
        """Cancels what is running and closes the connection."""
        self._is_closed = True
        self._channel.close()

    def _call(self, call: UnaryCall[_T], timeout: float | None) -> _T:
        if self._is_closed:
            raise _calls.client_closed()
        return call_unary(getattr(self._stub, call.method), self._calls.begin(call.method), call, timeout)
