"""What runs on a node of a Ray cluster: the parent of one worker process, and nothing else."""

import os
import signal
import sys
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stepwire.rpc.server import BindError
from stepwire.supervisor.child import Child, ChildSpec
from stepwire.supervisor.ports import check_free, free_port


@dataclass(frozen=True, slots=True)
class Launch:
    """What an actor starts, with its own interpreter and its own environment less the variables `unset`."""

    name: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    unset: Collection[str]
    log_path: str
    is_first: bool

    def spec(self) -> ChildSpec:
        """What that is on this machine."""
        kept = {name: value for name, value in os.environ.items() if name not in self.unset}
        command = (sys.executable, *self.arguments)
        return ChildSpec(self.name, command, {**kept, **self.environment}, Path(self.log_path).expanduser())


class RankActor:
    """Starts one worker and tells how it ended. Ray starts this actor anew for every worker that takes its place.

    The worker is a process of its own, so that it may crash, and dies with this one, however that ends.
    """

    def __init__(self) -> None:
        self._incarnation = uuid.uuid4().hex
        self._child: Child | None = None

    async def place(self, port: int) -> tuple[str, str, str, int]:
        """What names this incarnation and its node, the node's address, and a free port: `port`, if that is free."""
        import ray
        from ray.util import get_node_ip_address

        host: str = get_node_ip_address()
        return self._incarnation, ray.get_runtime_context().get_node_id(), host, _free_port(host, port)

    async def start(self, launch: Launch) -> int:
        """Starts the worker; answers its process id. Raises OSError."""
        self._child = await Child.start(launch.spec(), is_first=launch.is_first)
        return self._child.process_id

    async def wait(self) -> tuple[int, str]:
        """Waits for the worker's end: its exit status, negative for a signal, and a line that says so."""
        child = self._started
        status = await child.wait()
        child.close()
        return status, child.describe_end()

    async def send(self, number: int) -> None:
        """Sends the worker a signal, unless it has ended."""
        self._started.send(signal.Signals(number))

    async def evict(self) -> None:
        """Takes weights that a killed worker left for the next out of this machine's memory."""
        from loader.store.folder import default_folder, evict_idle

        evict_idle(default_folder())

    @property
    def _started(self) -> Child:
        if self._child is None:
            raise RuntimeError("no worker was started")
        return self._child


def _free_port(host: str, wish: int) -> int:
    if wish:
        try:
            check_free(host, wish)
            return wish
        except BindError:
            pass
    return free_port(host)
