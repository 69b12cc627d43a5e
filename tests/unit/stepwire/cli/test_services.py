"""`stepwire scheduler` and `serve`, given a model that lies elsewhere."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import scheduler_service.main
from scheduler_service.settings import SchedulerSettings
from stepwire.cli import serve, services
from tests.support.file_server import serve_files
from tests.support.tiny_checkpoint import make_tiny_llama


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A tiny model behind HTTP."""
    monkeypatch.setenv("STEPWIRE_CACHE", str(tmp_path / "cache"))
    folder = make_tiny_llama(tmp_path / "m")
    with serve_files() as server:
        server.files = {f"/models/tiny/{path.name}": path.read_bytes() for path in folder.iterdir()}
        yield f"{server.url}/models/tiny"


def in_cache(path: str, tmp_path: Path) -> bool:
    return Path(path).is_relative_to(tmp_path / "cache") and (Path(path) / "config.json").exists()


def test_the_scheduler_gets_a_path_of_this_machine(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_command: Callable[..., Any]
) -> None:
    given: list[SchedulerSettings] = []

    async def note(settings: SchedulerSettings, _supervision: object) -> int:
        given.append(settings)
        return 0

    monkeypatch.setattr(scheduler_service.main, "serve", note)
    monkeypatch.setattr(services, "end_with_supervisor", lambda: None)
    assert run_command("scheduler", "--model", url).exit_code == 0
    assert in_cache(given[0].model, tmp_path)
    assert given[0].served_model_name == "tiny"
    assert run_command("scheduler", "--model", url, "--served-model-name", "mine").exit_code == 0
    assert given[1].served_model_name == "mine"


def test_serve_hands_on_a_path_of_this_machine(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_command: Callable[..., Any]
) -> None:
    given: list[tuple[str, ...]] = []

    class Children:
        def __init__(self, scheduler: Any, *others: Any, **options: Any) -> None:
            given.append(scheduler.command)

        async def run(self, announce: Any) -> int:
            return 0

    monkeypatch.setattr(serve, "Supervisor", Children)
    done = run_command("serve", "--model", url, "--port", "0", "--log-dir", str(tmp_path))
    assert done.exit_code == 0, done.stderr
    flags = dict(part.split("=", 1) for part in given[0] if part.startswith("--") and "=" in part)
    assert in_cache(flags["--model"], tmp_path)
    assert flags["--served-model-name"] == "tiny"


def test_a_source_out_of_reach_is_one_error(run_command: Callable[..., Any]) -> None:
    done = run_command("serve", "--model", "http://127.0.0.1:1/m")
    assert done.exit_code == 1
    assert done.stderr.startswith("Error: http://127.0.0.1:1/m cannot be reached")
