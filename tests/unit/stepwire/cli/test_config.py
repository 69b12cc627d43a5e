import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scheduler_service.settings import SchedulerSettings
from stepwire.cli.settings_groups import GROUPS


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for group in GROUPS.values():
        for spec in group.specs.values():
            monkeypatch.delenv(spec.variable, raising=False)


def shown(run_command: Callable[..., Any], *arguments: str) -> dict[str, dict[str, object]]:
    done = run_command("config", *arguments, "--json")
    assert done.exit_code == 0, done.stderr
    found: dict[str, dict[str, object]] = json.loads(done.stdout)
    return found


def test_every_setting_with_value_and_origin(
    run_command: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s.toml"
    path.write_text("max_num_seqs = 8\n[scheduler]\ndtype = 'float32'\n")
    monkeypatch.setenv("STEPWIRE_PORT", "1234")
    values = shown(run_command, "scheduler", "--model", "m", "--config", str(path))
    assert set(values) == set(SchedulerSettings.model_fields)
    assert values["model"] == {"value": "m", "origin": "flag", "source": "--model"}
    assert values["port"] == {"value": 1234, "origin": "variable", "source": "STEPWIRE_PORT"}
    assert values["max_num_seqs"] == {"value": 8, "origin": "file", "source": f"max_num_seqs in {path}"}
    assert values["dtype"] == {"value": "float32", "origin": "file", "source": f"[scheduler] dtype in {path}"}
    assert values["block_size"] == {"value": 16, "origin": "default", "source": "default"}


def test_sizes_are_shown_as_bytes(run_command: Callable[..., Any]) -> None:
    assert shown(run_command, "worker", "--kv-cache-bytes", "2k")["kv_cache_bytes"]["value"] == 2048


def test_of_serve_host_and_port_are_the_schedulers(run_command: Callable[..., Any]) -> None:
    values = shown(run_command, "serve", "--model", "m", "--port", "7", "--threads", "2", "--log-dir", "/l")
    assert (values["port"]["value"], values["threads"]["value"], values["log_dir"]["value"]) == (7, 2, "/l")


def test_without_a_model_serves_port_is_the_schedulers_all_the_same(run_command: Callable[..., Any]) -> None:
    done = run_command("config", "serve", "--json")
    assert (done.exit_code, json.loads(done.stdout)["port"]["value"]) == (2, 50051)


def test_a_secret_is_masked(run_command: Callable[..., Any]) -> None:
    done = run_command("config", "worker", "--cluster-key", "hunter2hunter2hunter2")
    assert "hunter2" not in done.stdout
    assert "********" in done.stdout


def test_what_the_command_would_refuse_is_shown_and_refused(run_command: Callable[..., Any]) -> None:
    done = run_command("config", "scheduler", "--port", "70000")
    assert done.exit_code == 2
    assert "70000" in done.stdout
    assert "--port" in done.stderr
    assert "model is not set" in done.stderr
    done = run_command("config", "serve", "--model", "m", "--threads", "0")
    assert (done.exit_code, "--threads" in done.stderr) == (2, True)


def test_a_variable_that_nothing_reads_is_told(
    run_command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPWIRE_MAX_NUM_SEQ", "8")
    monkeypatch.setenv("STEPWIRE_TARGET", "h:1")
    done = run_command("config", "scheduler", "--model", "m")
    assert done.exit_code == 0
    assert (
        done.stderr == "Warning: nothing reads the variable STEPWIRE_MAX_NUM_SEQ; did you mean STEPWIRE_MAX_NUM_SEQS?\n"
    )
