import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stepwire.cli import doctor
from stepwire.cli.checks.software import TorchReport


@pytest.fixture(autouse=True)
def _torch_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "probe_torch", lambda: TorchReport(version="9.9"))


def test_all_checks_in_order(run_command: Callable[..., Any]) -> None:
    done = run_command("doctor", "--json", "--port", "0")
    subjects = [json.loads(line)["subject"] for line in done.stdout.splitlines()]
    order = [
        "python",
        "packages",
        "protocol",
        "torch",
        "cpu",
        "cuda",
        "ranks",
        "memory",
        "shared memory",
        "port",
        "logs",
    ]
    assert [subject for subject in subjects if subject != "environment"] == [*order, "checkpoint"]
    assert done.exit_code == 0


def test_a_failure_has_a_remedy_and_is_the_exit_status(run_command: Callable[..., Any], tmp_path: Path) -> None:
    done = run_command("doctor", "--port", "0", "--model", str(tmp_path / "none"), "--device", "cuda:3")
    lines = done.stdout.splitlines()
    assert done.exit_code == 1
    for subject in ("ranks", "checkpoint"):
        (index,) = (i for i, line in enumerate(lines) if line.startswith("fail") and subject in line)
        assert "->" in lines[index + 1]


def test_wrong_settings_are_refused_as_serve_does(run_command: Callable[..., Any]) -> None:
    done = run_command("doctor", "--port", "99999")
    assert (done.exit_code, "--port" in done.stderr) == (2, True)


def test_a_variable_that_nothing_reads_is_a_warning(
    run_command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPWIRE_PROT", "1")
    done = run_command("doctor", "--port", "0")
    assert "STEPWIRE_PROT" in done.stdout
    assert "did you mean STEPWIRE_PORT?" in done.stdout
    assert done.exit_code == 0


def test_its_help_calls_no_setting_required(run_command: Callable[..., Any]) -> None:
    assert "required" not in run_command("doctor", "--help").stdout
    assert "STEPWIRE_MODEL; required" in run_command("serve", "--help").stdout
