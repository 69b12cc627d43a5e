"""`stepwire slice`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loader.checkpoint import open_checkpoint
from tests.support.tiny_checkpoint import make_tiny_llama


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny_llama(tmp_path / "m")


def test_it_writes_a_checkpoint_that_opens(tmp_path: Path, model: Path, run_command: Callable[..., Any]) -> None:
    out = tmp_path / "out"
    done = run_command("slice", str(model), str(out), "--tp", "2", "--pp", "2", "--dtype", "float16")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{out}: ")
    assert "tp 2, pp 2" in done.stdout
    assert open_checkpoint(out).config.dtype == "float16"
    assert len(list(out.glob("rank-*"))) == 4
    assert run_command("check", str(out), "--tp", "4").exit_code == 0


def test_what_cannot_be_is_one_error(tmp_path: Path, model: Path, run_command: Callable[..., Any]) -> None:
    done = run_command("slice", str(model), str(tmp_path / "out"), "--tp", "3")
    assert done.exit_code == 1
    assert done.stderr.startswith("Error: tp 3 does not work")
    assert not (tmp_path / "out").exists()


def test_check_counts_the_file_of_every_rank(tmp_path: Path, model: Path, run_command: Callable[..., Any]) -> None:
    run_command("slice", str(model), str(tmp_path / "out"), "--tp", "2")
    assert json.loads(run_command("check", "--json", str(tmp_path / "out")).stdout)["files"] == 2
