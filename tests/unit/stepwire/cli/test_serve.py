"""`stepwire serve`, refused before anything is started."""

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stepwire.cli import serve
from stepwire.cli.serve import suggestion
from stepwire.cli.settings_groups import SERVE
from stepwire.cli.settings_options import gather
from stepwire.supervisor.child import ChildSpec
from tests.support.tiny_checkpoint import make_tiny_llama


def test_a_wrong_path_is_told_before_anything_starts(run_command: Callable[..., Any], tmp_path: Path) -> None:
    done = run_command("serve", "--model", str(tmp_path / "none"), "--port", "0", "--log-dir", str(tmp_path / "logs"))
    assert (done.exit_code, done.stdout) == (1, "")
    assert "none does not exist" in done.stderr
    assert not (tmp_path / "logs").exists()


def test_a_port_in_use_is_told_before_anything_starts(run_command: Callable[..., Any], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run_command("serve", "--model", str(tmp_path), "--port", str(port), "--log-dir", str(tmp_path / "logs"))
    assert done.exit_code == 1
    assert f"127.0.0.1:{port} is in use" in done.stderr
    assert os.listdir(tmp_path) == []


def test_a_log_folder_that_cannot_be_is_told_before_anything_starts(
    run_command: Callable[..., Any], tmp_path: Path
) -> None:
    model = make_tiny_llama(tmp_path / "tiny")
    done = run_command("serve", "--model", str(model), "--port", "0", "--log-dir", str(model / "config.json" / "logs"))
    assert (done.exit_code, "--log-dir" in done.stderr) == (1, True)


def test_models_that_claim_more_than_the_machine_has_are_told_before_anything_starts(
    run_command: Callable[..., Any], tmp_path: Path
) -> None:
    entries = [f"--models=model={make_tiny_llama(tmp_path / name)}" for name in "ab"]
    done = run_command("serve", *entries, "--port", "0", "--log-dir", str(tmp_path / "logs"))
    assert (done.exit_code, done.stdout) == (1, "")
    assert "the models on cpu of this machine may use 1.80 of its memory: a 0.90 (memory_fraction 0.9)" in done.stderr
    assert not (tmp_path / "logs").exists()


def test_a_model_that_is_not_named_is_told(run_command: Callable[..., Any]) -> None:
    done = run_command("serve")
    assert (done.exit_code, "model is not set: give --model" in done.stderr) == (2, True)
    done = run_command("serve", "--models", "tp=2")
    assert (done.exit_code, "model of models[0] is not set" in done.stderr) == (2, True)


def test_ray_that_is_not_installed_is_told_with_how_to(
    run_command: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    for name in ("cluster", "group", "ray"):
        monkeypatch.delitem(sys.modules, f"stepwire.placement.{name}", raising=False)
    model = make_tiny_llama(tmp_path / "tiny")
    done = run_command("serve", "--model", str(model), "--port", "0", "--placement", "ray")
    assert (done.exit_code, "pip install 'stepwire[ray]'" in done.stderr) == (1, True)


def test_what_is_suggested_the_model_can_answer(tmp_path: Path) -> None:
    model = make_tiny_llama(tmp_path / "tiny")
    assert "generate --target here:1 --chat " in suggestion(str(model), "here:1")
    config = model / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": None}))
    assert "generate --target here:1 --temperature 0 " in suggestion(str(model), "here:1")
    assert "--chat" not in suggestion(str(tmp_path / "gone"), "here:1")


@pytest.mark.parametrize("is_left", [True, False])
def test_a_cluster_that_does_not_let_go_holds_up_no_end(monkeypatch: pytest.MonkeyPatch, *, is_left: bool) -> None:
    """Ray's own handlers of the end, which would wait for its head, come after ours."""

    class Placed:
        head = None

        def __init__(self) -> None:
            self.is_left = is_left

        def place_first(self, _settings: object, _found: object, asked: object) -> tuple[object, list[object]]:
            return asked, [ChildSpec("worker 0", (), {})]

    registered: list[tuple[object, ...]] = []
    monkeypatch.setattr(serve, "ray_placement", lambda _supervisor, _workers: contextlib.nullcontext(Placed()))
    monkeypatch.setattr(serve, "_supervise", lambda *_arguments: 3)
    monkeypatch.setattr(serve.atexit, "register", lambda *what: registered.append(what))
    settings = gather(SERVE, {"model": "/m", "placement": "ray"}, {}, None)
    assert serve._serve_on_ray(settings, (), serve.plan(settings, ()), 0.0) == 3
    assert registered == ([] if is_left else [(serve._end_at_once, 3)])


def test_an_end_at_once_has_its_status_and_its_last_words() -> None:
    script = "import sys\nfrom stepwire.cli.serve import _end_at_once\nsys.stdout.write('said')\n_end_at_once(3)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (3, b"said")
