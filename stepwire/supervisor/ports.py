"""Ports on this machine: whether one is free, and which one is."""

import contextlib
import errno
import socket

from stepwire.rpc.server import AddressInUse, BindError


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listened on a moment ago."""
    with socket.create_server((host, 0), family=_family(host)) as probe:
        port: int = probe.getsockname()[1]
        return port


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """So many different ports, likewise."""
    with contextlib.ExitStack() as stack:
        # All at once, so that none comes twice.
        probes = [stack.enter_context(socket.create_server((host, 0), family=_family(host))) for _ in range(count)]
        return [probe.getsockname()[1] for probe in probes]


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
