import os
import subprocess
import sys
from dataclasses import replace

import pytest

from loader.sources.owner import Owner


def test_what_is_written_is_read() -> None:
    owner = Owner.here()
    assert Owner.parse(owner.encode()) == owner
    assert str(owner.pid) in str(owner)
    assert owner.host in str(owner)


def test_two_are_never_the_same() -> None:
    assert Owner.here() != Owner.here()


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"1", b'{"pid": 1}', b'{"pid": "x"}', b"\xff", b"[" * 5000])
def test_anything_else_names_nobody(data: bytes) -> None:
    assert Owner.parse(data) is None


def test_this_process_is_there() -> None:
    assert not Owner.here().is_gone()


def test_a_process_that_has_ended() -> None:
    program = "from loader.sources.owner import Owner; print(Owner.here().encode().decode())"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, timeout=60)
    owner = Owner.parse(ended.stdout)
    assert owner is not None
    assert owner.is_gone()


def test_one_that_has_ended_and_is_not_waited_for() -> None:
    program = "from loader.sources.owner import Owner; print(Owner.here().encode().decode(), flush=True)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        owner = Owner.parse(child.stdout.read())  # ends when the child does
        assert owner is not None
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie now
        assert owner.is_gone()


def test_another_process_with_the_same_number() -> None:
    assert replace(Owner.here(), start_time="1").is_gone()


def test_a_process_elsewhere_cannot_be_judged() -> None:
    assert not replace(Owner.here(), place="another machine", pid=1 << 22).is_gone()
