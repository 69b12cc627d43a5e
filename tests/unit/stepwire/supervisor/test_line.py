"""Records between a child and its supervisor."""

import json
import socket
import subprocess
import sys

import pytest

from stepwire.supervisor.line import MAX_LINE_BYTES, Lines, encode


def test_a_record_is_whole_again_however_it_was_cut() -> None:
    records = [{"ended": "127.0.0.1:1", "text": "höre\n"}, {"go": True}]
    data = b"".join(map(encode, records))
    for size in range(1, len(data) + 1):
        lines = Lines()
        parts = [lines.feed(data[i : i + size]) for i in range(0, len(data), size)]
        assert [record for part in parts for record in part] == records


@pytest.mark.parametrize("noise", [b"what\n", b"[1]\n", b"\xff\xfe\n", b"\n", b"x" * (MAX_LINE_BYTES + 9) + b"\n"])
def test_what_is_no_record_is_dropped(noise: bytes) -> None:
    lines = Lines()
    assert lines.feed(noise) == []
    assert lines.feed(encode({"go": True})) == [{"go": True}]


def test_a_long_record_arrives_and_of_one_that_is_too_long_nothing_does() -> None:
    lines = Lines()
    long = {"start_workers": "q", "model": {"adapter": "x" * 500_000}}
    data = encode(long)
    assert [record for i in range(0, len(data), 4096) for record in lines.feed(data[i : i + 4096])] == [long]
    assert lines.feed(b"x" * (MAX_LINE_BYTES + 1)) == []
    assert lines.feed(b'{"replace": "a"}\n' + encode({"go": True})) == [{"go": True}]


# In a process of its own: the end of its line ends a child at once.
_CHILD = """
import json, socket, sys, threading
from stepwire.supervisor.line import SupervisorLine

line = SupervisorLine(socket.socket(fileno=int(sys.argv[1])))
heard, enough = [], threading.Event()

def listen(record):
    heard.append(record)
    if len(heard) == 2:
        enough.set()

line.say({"listens": True})
line.listen(listen)
line.wait_for_go()
enough.wait()
line.say({"heard": heard})
threading.Event().wait()
"""


def test_a_child_hears_what_came_before_it_listened_says_what_it_wants_and_ends_with_its_line() -> None:
    ours, theirs = socket.socketpair()
    ours.sendall(encode({"ended": "a"}))
    command = [sys.executable, "-c", _CHILD, str(theirs.fileno())]
    with ours, theirs, subprocess.Popen(command, pass_fds=[theirs.fileno()]) as child:
        theirs.close()
        ours.settimeout(30)
        with ours.makefile("rb") as said:
            assert json.loads(said.readline()) == {"listens": True}
            ours.sendall(encode({"go": True}) + encode({"ended": "b"}))
            assert json.loads(said.readline()) == {"heard": [{"ended": "a"}, {"ended": "b"}]}
        ours.shutdown(socket.SHUT_RDWR)
        assert child.wait(30) == 1
