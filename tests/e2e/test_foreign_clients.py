"""Clients that share no code with Stepwire stream a completion from a running server."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from stepwire.client import Client
from tests.support.processes import ServeStack

ROOT = Path(__file__).resolve().parents[2]
NODE = ROOT / "tests" / "node"
PROMPT = "Once upon a time"
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def expected(tiny_stack: ServeStack) -> tuple[int, ...]:
    """The tokens of the request that the others send too."""
    with Client(tiny_stack.target) as client:
        return client.complete(PROMPT, temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True).token_ids


def run(arguments: Sequence[str]) -> str:
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def json_values(text: str) -> list[dict[str, Any]]:
    """Values one after the other, whatever is between them."""
    decoder, found, rest = json.JSONDecoder(), [], text.strip()
    while rest:
        value, end = decoder.raw_decode(rest)
        found.append(value)
        rest = rest[end:].lstrip()
    return found


def assert_streamed(events: Sequence[dict[str, Any]], expected: Sequence[int]) -> None:
    assert "started" in events[0]
    assert events[-1]["finished"]["usage"]["outputTokenCount"] == NUM_TOKENS
    outputs = [event["output"] for event in events[1:-1]]
    assert len(outputs) > 1
    assert [token_id for output in outputs for token_id in output["tokenIds"]] == list(expected)
    assert outputs[-1]["finishReason"] == "FINISH_REASON_LENGTH"


@pytest.mark.parametrize("schema", [(), ("--schema", "protos")], ids=["reflection", "protos"])
def test_buf_curl(tiny_stack: ServeStack, expected: tuple[int, ...], schema: Sequence[str]) -> None:
    buf = shutil.which("buf") or str(Path(sys.executable).parent / "buf")
    sampling = {"temperature": 0, "maxTokens": NUM_TOKENS, "ignoreEos": True}
    url = f"http://{tiny_stack.target}/stepwire.v1.InferenceService/Generate"
    data = json.dumps({"text": PROMPT, "sampling": sampling})
    answer = run([buf, "curl", *schema, "--protocol", "grpc", "--http2-prior-knowledge", "--data", data, url])
    assert_streamed(json_values(answer), expected)


@pytest.fixture(scope="module")
def node_modules() -> None:
    """@grpc/grpc-js, from tests/node/package-lock.json."""
    if not shutil.which("node"):
        pytest.skip("node is not installed")
    if (NODE / "node_modules" / "@grpc" / "grpc-js").is_dir():
        return
    if not os.environ.get("STEPWIRE_TEST_FULL"):
        pytest.skip("tests/node/node_modules is not installed; `make test-full` installs it")
    npm = ["npm", "ci", "--prefix", str(NODE), "--no-audit", "--no-fund"]
    subprocess.run(npm, check=True, capture_output=True, timeout=120)


def test_node(node_modules: None, tiny_stack: ServeStack, expected: tuple[int, ...]) -> None:
    answer = run(["node", str(NODE / "complete.js"), tiny_stack.target, PROMPT, str(NUM_TOKENS)])
    assert_streamed([json.loads(line) for line in answer.splitlines()], expected)


def test_node_gets_the_error_and_its_details(node_modules: None, tiny_stack: ServeStack) -> None:
    answer = run(["node", str(NODE / "complete.js"), tiny_stack.target, "", "1"])
    (event,) = (json.loads(line) for line in answer.splitlines())
    assert event["error"]["code"] == 3
    assert "text is empty" in event["error"]["details"]
    assert "PROMPT_EMPTY" in event["error"]["statusDetails"]
