import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loader.errors import CheckpointError
from stepwire.cli import main
from stepwire.cli.errors import explain
from stepwire.rpc.errors import StepwireError
from stepwire.rpc.server import AddressInUse

HEAVY = ("torch", "transformers", "grpc", "pydantic", "numpy", "opentelemetry", "rich")


def test_help_lists_every_command_and_imports_nothing_heavy() -> None:
    script = f"""
import sys
from stepwire.cli.main import run
status = run(["--help"])
heavy = [name for name in {HEAVY!r} if name in sys.modules]
sys.exit(f"imported: {{heavy}}" if heavy else status)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    for name in main._COMMANDS:
        assert f"\n  {name} " in done.stdout
    assert "Exit status" in done.stdout


def test_every_command_has_help_without_torch() -> None:
    script = f"""
import sys
from stepwire.cli.main import run
statuses = [run([name, "--help"]) for name in {list(main._COMMANDS)!r}]
sys.exit(str(statuses) if any(statuses) or "torch" in sys.modules else 0)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in main._COMMANDS:
        assert f"Usage: stepwire {name} [OPTIONS]" in done.stdout


def test_wrong_usage_exits_with_2(run_command: Callable[..., Any]) -> None:
    assert run_command("nonsense").exit_code == 2
    done = run_command("generate")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "PROMPT" in done.stderr


def test_wrong_settings_exit_with_2(run_command: Callable[..., Any]) -> None:
    done = run_command("scheduler", "--port", "70000", "--model", "m")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == "Error: --port: '70000' is not allowed; port is an integer from 0 to 65535\n"


def test_a_worker_on_a_public_address_says_what_it_needs(run_command: Callable[..., Any]) -> None:
    done = run_command("worker", "--host", "0.0.0.0")
    assert (done.exit_code, "cluster_key" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (StepwireError("QUEUE_FULL", "the queue is full"), "the queue is full (QUEUE_FULL)"),
        (
            CheckpointError("not_found", "/m does not exist", "pass a path", Path("/m")),
            "/m does not exist; pass a path",
        ),
        (AddressInUse(98, "127.0.0.1:1 is in use"), "127.0.0.1:1 is in use"),
        (ExceptionGroup("x", [StepwireError("CANCELLED", "a"), ExceptionGroup("y", [KeyError("b")])]), None),
        (ExceptionGroup("x", [StepwireError("CANCELLED", "a")]), "a (CANCELLED)"),
        (KeyError("defect"), None),
    ],
)
def test_expected_failures_are_explained_and_defects_are_not(error: BaseException, text: str | None) -> None:
    found = explain(error)
    assert found is None if text is None else found is not None and text in found


def test_a_defect_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise KeyError("defect")

    monkeypatch.setattr(main.cli, "main", broken)
    with pytest.raises(KeyError):
        main.run(["models"])


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    arguments = [sys.executable, "-m", "stepwire.cli.main", "config", "scheduler", "--model", "m", "--json"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1
