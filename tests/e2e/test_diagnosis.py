"""`stepwire profile`, `stepwire admin flight` and `stepwire replay` on real processes."""

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from loader.checkpoint import open_checkpoint
from stepwire.client import Client
from stepwire.client.types import GenerateKeywords
from stepwire.v1 import flight_pb2
from tests.support.processes import run
from tests.support.stack import Server, serve
from tests.support.tiny_adapter import make_tiny_adapter

KEY = "an-admin-key-of-some-length"


@pytest.fixture(scope="module")
def adapter(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_adapter(tmp_path_factory.mktemp("adapters") / "warm", open_checkpoint(tiny_model).config)


@pytest.fixture(scope="module")
def server(tiny_model: Path, adapter: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    sizes = ["--max-num-batched-tokens=64", "--max-num-seqs=8", "--num-kv-blocks=64", "--flight-steps=40"]
    more = [f"--admin-key={KEY}", f"--adapter=warm={adapter}", "--adapter-slots=1"]
    with serve(tiny_model, tmp_path_factory.mktemp("diagnosis"), *more, *sizes) as server:
        yield server


KINDS: list[GenerateKeywords] = [{"ignore_eos": True}, {"adapter": "warm"}, {"regex": "[a-z ]{30,40}"}]


def generate_until(server: Server, stop: threading.Event, has_begun: threading.Event, kind: GenerateKeywords) -> None:
    """Requests with a common beginning, one after the other, greedy and sampled."""
    with Client(server.target) as client:
        number = 0
        while not stop.is_set():
            number += 1
            prompt = "The same beginning of some length. " + "x" * (number % 40)
            client.complete(prompt, max_tokens=30, temperature=number % 2, seed=number, **kind)
            has_begun.set()


@contextmanager
def load(server: Server) -> Iterator[None]:
    stop = threading.Event()
    begun = [threading.Event() for _ in KINDS]
    threads = [
        threading.Thread(target=generate_until, args=(server, stop, *rest)) for rest in zip(begun, KINDS, strict=True)
    ]
    try:
        for thread, has_begun in zip(threads, begun, strict=True):
            thread.start()
            assert has_begun.wait(60)
        yield
    finally:
        stop.set()
        for thread in filter(threading.Thread.is_alive, threads):
            thread.join()


def test_a_profile_under_load(server: Server, tmp_path: Path) -> None:
    output = tmp_path / "profile.json.gz"
    arguments = ["--target", server.target, "--admin-key", KEY, "--steps", "10", "-o", str(output)]
    with load(server):
        done = run("profile", *arguments)
    assert done.returncode == 0, done.stderr
    for word in ("PART", "OPERATOR", "layer 0", "layer 1", "head", "MS/STEP"):
        assert word in done.stdout
    names = {event["name"] for event in json.loads(gzip.decompress(output.read_bytes()))["traceEvents"]}
    assert {"process_name", "layer 0", "step", "forward", "sample"} <= names
    assert output.stat().st_mode & 0o077 == 0


def test_recorded_steps_replay_to_the_same_tokens(server: Server, adapter: Path, tmp_path: Path) -> None:
    path = tmp_path / "steps.flight"
    with load(server):
        done = run("admin", "flight", "--target", server.target, "--admin-key", KEY, "-o", str(path))
    assert done.returncode == 0, done.stderr
    done = run("replay", str(path), timeout=120)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    assert "every token as recorded" in done.stdout and " 0 sequences left out" in done.stdout
    recording = flight_pb2.FlightRecording.FromString(path.read_bytes())
    assert [each.name for each in recording.adapters] == ["warm"] and len(recording.grammars) == 1
    recording.adapters[0].path += "-moved"
    step = next(step for step in recording.steps if step.result.token_ids)
    step.result.token_ids[0] ^= 1
    path.write_bytes(recording.SerializeToString())
    done = run("replay", str(path), "--json", "--adapter", str(adapter), timeout=120)
    assert done.returncode == 1, done.stdout + done.stderr
    (difference,) = json.loads(done.stdout)["differences"]
    assert difference["step_id"] == step.step.step_id
    assert difference["recorded"] == [step.result.token_ids[0]]
