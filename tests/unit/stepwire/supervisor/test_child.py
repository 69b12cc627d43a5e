"""One child, as a small script, and what it is told."""

import os
import sys
from pathlib import Path

from stepwire.supervisor.child import Child, ChildSpec

# Listens late.
SCRIPT = """
import pathlib, sys, time
time.sleep(0.3)
with open(0, "rb") as line: pathlib.Path(sys.argv[1]).write_bytes(line.readline() + line.readline())
"""


async def test_what_a_child_is_told_arrives_whole_though_it_listens_late(tmp_path: Path) -> None:
    heard = tmp_path / "heard"
    child = await Child.start(ChildSpec("late", (sys.executable, "-c", SCRIPT, str(heard)), dict(os.environ)))
    child.say({"model": "x" * 900_000})
    child.say({"go": True})
    assert await child.wait() == 0
    child.close()
    assert heard.read_bytes() == b'{"model": "' + b"x" * 900_000 + b'"}\n{"go": true}\n'
