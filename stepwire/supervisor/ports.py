"""Ports on this machine: whether one is free, and which one is."""

import contextlib
import errno
import random
import socket

from stepwire.rpc.server import AddressInUse, BindError

# Below those that systems give to whoever asks for any port, and to outgoing connections: such a one may be gone when
# a process that was started with it listens, or listens again.
_CHOSEN_FROM = range(20_000, 32_000)
_TRIES = 100


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listened on a moment ago."""
    return free_ports(1, host)[0]


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """So many different ports, likewise."""
    with contextlib.ExitStack() as stack:
        # All at once, so that none comes twice.
        probes = [stack.enter_context(_probe(host)) for _ in range(count)]
        return [probe.getsockname()[1] for probe in probes]


def _probe(host: str) -> socket.socket:
    # By the system's randomness: who seeds Python's gets the ports of whoever seeds it alike.
    for port in random.SystemRandom().sample(_CHOSEN_FROM, _TRIES):
        try:
            return socket.create_server((host, port), family=_family(host))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    return socket.create_server((host, 0), family=_family(host))


def check_free(host: str, port: int) -> None:
    """Raises AddressInUse when somebody listens on the address, BindError when it cannot be listened on at all."""
    try:
        # With SO_REUSEADDR, as gRPC does: connections that a former listener left in TIME_WAIT do not count.
        socket.create_server((host, port), family=_family(host)).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            text = f"{host}:{port} is in use by another process: stop it, or choose another port with --port"
            raise AddressInUse(errno.EADDRINUSE, text) from error
        text = (
            f"cannot listen on {host}:{port}: {error.strerror or error}; choose another address with --host and --port"
        )
        raise BindError(error.errno or 0, text) from error


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
