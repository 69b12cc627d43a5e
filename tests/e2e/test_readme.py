"""What the README shows works as it stands, but for the address."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import ServeStack

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
NODE_MODULES = ROOT / "tests" / "node" / "node_modules"


def block(language: str, containing: str, target: str) -> str:
    """The code block of a language that contains a text, with the stack's address."""
    blocks = re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)
    (found,) = (each for each in blocks if containing in each)
    assert "127.0.0.1:50051" in found
    return str(found).replace("127.0.0.1:50051", target)


def run(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_python(tiny_stack: ServeStack, tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(block("python", "Client(", tiny_stack.target))
    done = run([sys.executable, str(script)])
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) > 10


def test_buf_curl(tiny_stack: ServeStack) -> None:
    found = re.search(r"^    (buf curl (?:.*\\\n)*.*)$", README, re.MULTILINE)
    assert found
    words = shlex.split(found[1].replace("\\\n", " ").replace("127.0.0.1:50051", tiny_stack.target))
    buf = shutil.which("buf") or str(Path(sys.executable).parent / "buf")
    done = run([buf, *words[1:]])
    assert done.returncode == 0, done.stderr
    events = _json_values(done.stdout)
    assert "started" in events[0]
    assert "finished" in events[-1]
    assert len(events) > 2


@pytest.mark.skipif(not shutil.which("node"), reason="node is not installed")
@pytest.mark.skipif(not NODE_MODULES.is_dir(), reason="tests/node/node_modules is not installed: make test-full")
def test_node(tiny_stack: ServeStack, tmp_path: Path) -> None:
    (tmp_path / "node_modules").symlink_to(NODE_MODULES)
    script = tmp_path / "example.mjs"
    script.write_text(block("js", "grpc-js", tiny_stack.target))
    done = run(["node", str(script)])
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


def _json_values(text: str) -> list[dict[str, object]]:
    decoder, found, position = json.JSONDecoder(), [], 0
    while position < len(text.rstrip()):
        value, end = decoder.raw_decode(text, position)
        found.append(value)
        position = end + 1
    return found
