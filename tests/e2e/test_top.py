"""`stepwire top` against a server of real processes."""

from pathlib import Path

from stepwire.client import Client
from stepwire.supervisor.ports import free_port
from tests.support.processes import run, serving


def test_it_shows_scheduler_and_worker(tiny_model: Path, tmp_path: Path) -> None:
    port = free_port()
    with serving(tiny_model, tmp_path, "--device", "sim", "--metrics-port", str(port)) as stack:
        with Client(stack.target) as client:
            client.complete("Hello", max_tokens=5)
        addresses = [f"127.0.0.1:{port}", f"http://127.0.0.1:{port + 1}"]
        done = run("top", "--once", "--every", "0.1", *addresses)
        assert done.returncode == 0, done.stderr
        for text in ("serving", "running", "KV blocks", "workers", "ready"):
            assert text in done.stdout, done.stdout
    # Off a terminal it looks once unasked.
    gone = run("top", "--every", "0.1", *addresses)
    assert gone.returncode == 1
    assert "refused" in gone.stdout


def test_an_address_that_is_none_is_refused() -> None:
    done = run("top", "--once", "localhost")
    assert done.returncode == 2
    assert "'localhost' is not HOST:PORT" in done.stderr
