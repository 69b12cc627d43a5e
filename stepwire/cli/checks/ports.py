"""Whether a port is free, and who has it if not."""

import contextlib
import os
from pathlib import Path

from stepwire.cli.checks.finding import Finding
from stepwire.rpc.server import AddressInUse, BindError
from stepwire.supervisor.ports import check_free

_LISTEN = "0A"


def check_port(host: str, port: int) -> Finding:
    """Whether a scheduler could listen there."""
    where = f"{host}:{port}"
    if port == 0:
        return Finding("ok", "port", f"a free one on {host} is taken at start")
    try:
        check_free(host, port)
    except AddressInUse:
        who = owner_of(port)
        remedy = "stop that process, or choose another port with --port"
        return Finding("fail", "port", f"{where} is in use by {who or 'a process that this user may not see'}", remedy)
    except BindError as error:
        remedy = "choose an address of this machine with --host; 127.0.0.1 is reachable from here alone"
        return Finding("fail", "port", str(error.strerror), remedy)
    return Finding("ok", "port", f"{where} is free")


def owner_of(port: int, proc: Path = Path("/proc")) -> str | None:
    """The process that listens on a TCP port, as "name (pid N)"; None when that cannot be known."""
    inodes = {f"socket:[{inode}]" for inode in _listening_inodes(port, proc)}
    if not inodes:
        return None
    for process in proc.glob("[0-9]*"):
        # Processes end, and belong to others, while one looks.
        with contextlib.suppress(OSError):
            if any(os.readlink(handle) in inodes for handle in (process / "fd").iterdir()):
                return f"{(process / 'comm').read_text().strip()} (pid {process.name})"
    return None


def _listening_inodes(port: int, proc: Path) -> set[str]:
    found = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (proc / "net" / table).read_text().splitlines()[1:]:
                columns = line.split()
                if columns[3] == _LISTEN and int(columns[1].rpartition(":")[2], 16) == port:
                    found.add(columns[9])
    return found
