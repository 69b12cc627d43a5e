"""What a helper process runs: questions on stdin, answers on stdout, until stdin is closed.

Its parent is engine/helpers.py, which may kill it at any time. Each message is a JSON object behind its length in four
bytes, big-endian; the first question is a greeting, and answering it says that the process is ready. Imports the
standard library alone.
"""

import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

CPU_SECONDS = 15
"""Most CPU time of one answer: ends the process when its parent is no longer there to do so."""

Answer = Callable[[dict[str, Any]], dict[str, Any]]


def read_message(stream: BinaryIO) -> dict[str, Any] | None:
    """The next message; None when the other side has closed the pipe."""
    header = stream.read(4)
    if len(header) < 4:
        return None
    message: dict[str, Any] = json.loads(stream.read(int.from_bytes(header)))
    return message


def write_message(stream: BinaryIO, message: dict[str, Any]) -> None:
    """Sends one message."""
    data = json.dumps(message).encode()
    stream.write(len(data).to_bytes(4) + data)
    stream.flush()


def confine(memory_bytes: int) -> None:
    """From now on this process writes no file, and may take so much memory beside what it has."""
    limit = _address_space_bytes() + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def serve(get_ready: Callable[[dict[str, Any]], Answer]) -> None:
    """Answers questions by what `get_ready` makes of the greeting. An answer with the key "error" may be made instead
    of a failure that its question deserves."""
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    if (greeting := read_message(requests)) is None:
        return
    answer = get_ready(greeting)
    write_message(answers, {})
    while (request := read_message(requests)) is not None:
        resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + CPU_SECONDS, resource.RLIM_INFINITY))
        write_message(answers, answer(request))


def _address_space_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return 0
