"""Records between a child and its supervisor."""

import json
import socket
import threading

import pytest

from stepwire.supervisor.line import MAX_LINE_BYTES, Lines, Record, SupervisorLine, encode


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


def test_a_child_hears_what_came_before_it_listened_and_says_what_it_wants() -> None:
    ours, theirs = socket.socketpair()
    line = SupervisorLine(theirs)
    heard: list[Record] = []
    enough = threading.Event()

    def listen(record: Record) -> None:
        heard.append(record)
        if len(heard) == 2:
            enough.set()

    ours.sendall(encode({"ended": "a"}))
    line.listen(listen)
    ours.sendall(encode({"go": True}) + encode({"ended": "b"}))
    assert enough.wait(5)
    line.wait_for_go()
    assert heard == [{"ended": "a"}, {"ended": "b"}]
    line.say({"replace": "c", "process_id": 5})
    assert json.loads(ours.recv(1000)) == {"replace": "c", "process_id": 5}
    # Not closed: the end of the line ends the process.
    ours.detach()
