"""Who holds something in a cache that several processes, and maybe several machines, share."""

import json
import os
import secrets
import socket
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

_MAX_BYTES = 4096
_START_TIME_FIELD = 22


@dataclass(frozen=True, slots=True)
class Owner:
    """A process that holds something.

    `place` names the running kernel and the pid namespace, in which alone `pid` means anything. `start_time` (ticks
    since boot, as /proc has it) sets the process apart from a later one that got the same pid. `nonce` sets apart what
    one process holds.
    """

    host: str
    place: str
    pid: int
    start_time: str
    nonce: str

    @classmethod
    def here(cls) -> "Owner":
        """This process, with a new nonce."""
        pid = os.getpid()
        return cls(socket.gethostname(), _place(), pid, _start_time(pid) or "", secrets.token_hex(8))

    @classmethod
    def parse(cls, data: bytes) -> "Owner | None":
        """What `encode` wrote; None for anything else, such as a file that is being written."""
        try:
            values = json.loads(data[:_MAX_BYTES])
            host, place, pid = str(values["host"]), str(values["place"]), int(values["pid"])
            return cls(host, place, pid, str(values["start_time"]), str(values["nonce"]))
        except (ValueError, TypeError, KeyError, RecursionError):
            return None

    def encode(self) -> bytes:
        """As one JSON object."""
        return json.dumps(asdict(self)).encode()

    def is_gone(self) -> bool:
        """Whether the process has surely ended; False also where that cannot be told from here."""
        if self.place != _place():
            return False
        start_time = _start_time(self.pid)
        return start_time is None or start_time != self.start_time

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


@cache
def _place() -> str:
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot_id}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return socket.gethostname()


def _start_time(pid: int) -> str | None:
    """When a living process started; None for one that has ended, even if nobody has asked for its status yet."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The second field is the name in brackets, which may itself hold spaces and brackets.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else fields[_START_TIME_FIELD - 3]
