"""A Ray cluster of several nodes on this machine, each with a raylet and an address of its own on loopback."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from unittest import mock

from stepwire.supervisor.ports import free_port
from tests.support.stack import MARK_VARIABLE, marked, processes_of

_STARTS_WITHIN_S = 60.0
_ENDS_WITHIN_S = 60.0
_STORE_BYTES = 80 << 20


class RayCluster:
    """Nodes with one CPU each. `address` is what --ray-address takes; all processes carry `mark`."""

    def __init__(self, folder: Path, mark: str, stack: ExitStack) -> None:
        self.mark = mark
        self.hosts: list[str] = []
        self._folder = folder
        self._stack = stack
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        self.address = f"127.0.0.2:{free_port('127.0.0.2')}"
        stack.callback(self._end_agents)

    def add_node(self) -> str:
        """Starts one more, the first as the head; answers its address."""
        host = f"127.0.0.{2 + len(self._nodes)}"
        port = self.address.rpartition(":")[2]
        head = ("--head", f"--port={port}", f"--temp-dir={self._folder}", "--include-dashboard=false")
        place = head if not self._nodes else (f"--address={self.address}",)
        limits = ("--num-cpus=1", "--num-gpus=0", f"--object-store-memory={_STORE_BYTES}")
        quiet = ("--disable-usage-stats", "--block")
        log = self._stack.enter_context((self._folder / f"{host}.log").open("wb"))
        self._nodes[host] = subprocess.Popen(
            [_command(), "start", f"--node-ip-address={host}", *place, *limits, *quiet],
            env={**os.environ, MARK_VARIABLE: self.mark},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        self._stack.callback(self._end_node, host)
        self._wait(host)
        self.hosts.append(host)
        return host

    def lose_node(self, host: str) -> None:
        """Kills a raylet and at once the worker of ours on its node, which otherwise ends a while after it."""
        found = processes_of(self.mark).items()
        wanted = f"--node_ip_address={host} "
        (raylet,) = [pid for pid, line in found if "raylet/raylet" in line and wanted in line]
        (worker,) = [pid for pid, line in found if " worker " in line and f"--host={host} " in line]
        os.kill(raylet, signal.SIGKILL)
        os.kill(worker, signal.SIGKILL)

    def lose_head(self) -> None:
        """Kills what makes the first node the head. The node itself stays: our own process is of it."""
        head = self._nodes[self.hosts[0]]
        # It would end the node with the first of its processes that ends.
        os.kill(head.pid, signal.SIGSTOP)
        self._stack.callback(os.kill, head.pid, signal.SIGCONT)
        os.kill(self._head_process(), signal.SIGKILL)

    @contextmanager
    def hanging_head(self) -> Iterator[None]:
        """What makes the first node the head does nothing, and its port is open all the same."""
        server = self._head_process()
        os.kill(server, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(server, signal.SIGCONT)

    def _head_process(self) -> int:
        (server,) = [pid for pid, line in processes_of(self.mark).items() if line.split(" ")[0].endswith("/gcs_server")]
        return server

    def _end_node(self, host: str) -> None:
        node = self._nodes[host]
        node.terminate()
        node.wait(_ENDS_WITHIN_S)

    def _end_agents(self) -> None:
        """Those of a raylet that found no head to the end do not follow it."""
        for pid, line in processes_of(self.mark).items():
            if line.startswith("ray::"):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _wait(self, host: str) -> None:
        """Until it says that it runs."""
        log, node = self._folder / f"{host}.log", self._nodes[host]
        deadline = time.monotonic() + _STARTS_WITHIN_S
        while "Ray runtime started" not in log.read_text():
            assert node.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)


@contextmanager
def ray_cluster(num_nodes: int) -> Iterator[RayCluster]:
    """A cluster, none of whose processes may be left afterwards."""
    # Sockets lie in it, whose paths must be short.
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    try:
        # Where this user has a token, a head asks for one, and other nodes have none, unless they are told.
        with marked() as mark, mock.patch.dict(os.environ, {"RAY_AUTH_MODE": "disabled"}), ExitStack() as stack:
            cluster = RayCluster(folder, mark, stack)
            for _ in range(num_nodes):
                cluster.add_node()
            yield cluster
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _command() -> str:
    return str(Path(sys.executable).with_name("ray"))
