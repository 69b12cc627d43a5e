"""Where the ranks of a group meet: a store at an address that rank 0 binds, on one named interface."""

import fcntl
import ipaddress
import os
import socket
import struct
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # documented, and not in __all__

from worker_service.runtime.errors import RuntimeFailure

LAUNCHER = "env://"
_SIOCGIFADDR = 0x8915
_MAX_ADDRESS_LEN = 300


@dataclass(frozen=True, slots=True)
class BoundStore:
    """The store that rank 0 serves while it holds this, and its address for the others."""

    store: Store
    address: str


def interface_address(name: str) -> str:
    """The IPv4 address of a network interface; an IP address is answered as it is.

    Raises RuntimeFailure "invalid" for a name that no interface with such an address has.
    """
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        pass
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # struct ifreq: 16 bytes of name, then a sockaddr_in, whose address is at its fifth byte.
            found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("16s24x", name.encode()[:15]))
        except OSError as error:
            names = ", ".join(sorted(name for _, name in socket.if_nameindex()))
            raise RuntimeFailure(
                "invalid",
                f"there is no network interface {name!r} with an IPv4 address here; set collective_interface to one of "
                f"{names}, or to an IP address of this machine",
                {"field": "collective_interface", "found": name},
            ) from error
    return socket.inet_ntoa(found[20:24])


def bind_store(rendezvous: str, interface: str, timeout_s: float) -> BoundStore:
    """Serves a store on a free port of an interface or, with "env://", at the launcher's MASTER_ADDR and MASTER_PORT.

    Raises RuntimeFailure "rendezvous_failed".
    """
    if rendezvous == LAUNCHER:
        return _launchers_store(timeout_s)
    return _serve(interface_address(interface), 0, timeout_s)


def connect_store(address: str, timeout_s: float) -> Store:
    """The store at host:port. Raises RuntimeFailure "rendezvous_failed"."""
    host, port = _parse(address)
    try:
        return TCPStore(host, port, None, False, timedelta(seconds=timeout_s), wait_for_workers=False)
    except RuntimeError as error:
        raise _failed(address, f"no store answers there ({_first_line(error)})") from error


def _launchers_store(timeout_s: float) -> BoundStore:
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not host or not port.isdigit():
        raise RuntimeFailure(
            "invalid",
            'rendezvous is "env://", and MASTER_ADDR and MASTER_PORT are not set; let the launcher set them',
            {"field": "rendezvous"},
        )
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        address = _join(host, int(port))
        return BoundStore(connect_store(address, timeout_s), address)
    return _serve(host, int(port), timeout_s)


def _serve(host: str, port: int, timeout_s: float) -> BoundStore:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        # Our own listener: by itself a TCPStore listens on every interface.
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        raise _failed(_join(host, port), f"it cannot be listened on ({error.strerror or error})") from error
    port = listener.getsockname()[1]
    store = TCPStore(
        host,
        port,
        None,
        True,
        timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return BoundStore(store, _join(host, port))


def _parse(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536 or len(address) > _MAX_ADDRESS_LEN:
        found = address[:_MAX_ADDRESS_LEN]
        raise RuntimeFailure(
            "invalid", f"rendezvous {found!r} is no host:port", {"field": "rendezvous", "found": found}
        )
    return host.strip("[]"), int(port)


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _failed(address: str, why: str) -> RuntimeFailure:
    return RuntimeFailure(
        "rendezvous_failed",
        f"the ranks of the group were to meet at {address}, and {why}; see that rank 0 runs and that its "
        "collective_interface can be reached from here",
        {"rendezvous": address},
    )


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:200]
