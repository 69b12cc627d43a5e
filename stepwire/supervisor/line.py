"""The line between a child and its supervisor: records as lines of JSON, over the socket that is the child's stdin.

To a child: `go`, which a stand-by waits for; `ended`, which tells a scheduler how a worker's process ended; `gone`,
that none follows it, and why; and `worker`, which tells it where one `is_at` that it knows by another address. To the
supervisor: `replace`, by which a scheduler gives up a worker that does not answer, and `serving`, which it says before
any client can know; other records are for whoever made the supervisor.
"""

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

Record = Mapping[str, Any]

# No record is as large; all settings of all models that one scheduler may serve are less than half of it.
MAX_LINE_BYTES = 1 << 20
_READ_BYTES = 4096


def encode(record: Record) -> bytes:
    """A record as it goes over the line."""
    return json.dumps(record).encode() + b"\n"


class Lines:
    """Cuts what comes over the line into records. What is no record is dropped: the other side is ours."""

    def __init__(self) -> None:
        self._rest = b""
        self._is_too_long = False

    def feed(self, data: bytes) -> list[Record]:
        """The records that are whole now."""
        *lines, rest = (self._rest + data).split(b"\n")
        if lines and self._is_too_long:
            # The end of what is dropped.
            del lines[0]
            self._is_too_long = False
        self._is_too_long = self._is_too_long or len(rest) > MAX_LINE_BYTES
        self._rest = b"" if self._is_too_long else rest
        records: list[Record] = []
        for line in lines:
            with contextlib.suppress(ValueError):
                record = json.loads(line)
                if isinstance(record, dict):
                    records.append(record)
        return records


class SupervisorLine:
    """A child's end. A thread of its own reads it, and ends the process when the supervisor is gone."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._kept: list[Record] = []
        self._listener: Callable[[Record], None] | None = None
        self._may_go = threading.Event()
        threading.Thread(target=self._read, name="supervisor-line", daemon=True).start()

    def wait_for_go(self) -> None:
        """Blocks until the supervisor wants this stand-by to begin."""
        self._may_go.wait()

    def listen(self, listener: Callable[[Record], None]) -> None:
        """Hands over what has come, and all that comes from now on, on the reading thread."""
        with self._lock:
            kept, self._kept, self._listener = self._kept, [], listener
        for record in kept:
            listener(record)

    def say(self, record: Record) -> None:
        """Tells the supervisor something. Never blocks for long, never raises: it reads all the time, or is gone."""
        with contextlib.suppress(OSError):
            self._connection.sendall(encode(record))

    def _read(self) -> None:
        lines = Lines()
        while data := self._receive():
            for record in lines.feed(data):
                self._take(record)
        os._exit(1)

    def _receive(self) -> bytes:
        try:
            return self._connection.recv(_READ_BYTES)
        except OSError:
            return b""

    def _take(self, record: Record) -> None:
        if "go" in record:
            self._may_go.set()
            return
        with self._lock:
            if self._listener is None:
                self._kept.append(record)
                return
        self._listener(record)
