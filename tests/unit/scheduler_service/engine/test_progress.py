"""What a start shows of its progress."""

import io
from collections.abc import Mapping
from typing import Any

import pytest
import structlog
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from scheduler_service.engine import progress
from scheduler_service.engine.progress import ProgressReport, progress_report


def bar() -> Progress:
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    return Progress(TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), console=console)


def test_a_terminal_shows_which_part_goes_on_and_begins_it_anew() -> None:
    shown = bar()
    report = ProgressReport("load_model", shown)
    report.update(0, "inspect", 0, 0)
    (task,) = shown.tasks
    assert (task.description, task.total) == ("load_model rank 0: inspect", None)
    report.update(0, "read", 30, 100)
    report.update(1, "read", 50, 100)
    assert [(t.description, t.completed, t.total) for t in shown.tasks] == [
        ("load_model rank 0: read", 30, 100),
        ("load_model rank 1: read", 50, 100),
    ]
    report.update(0, "pack", 10, 400)
    assert (task.description, task.completed, task.total) == ("load_model rank 0: pack", 10, 400)


def test_a_phase_with_one_part_is_named_once() -> None:
    shown = bar()
    ProgressReport("warm_up", shown).update(0, "warm_up", 1, 3)
    assert shown.tasks[0].description == "warm_up rank 0"


def test_elsewhere_a_line_now_and_then_names_the_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm PR #48871: a long start said nothing of how far it was."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr("sys.stderr", io.StringIO())
    with structlog.testing.capture_logs() as lines, progress_report("load_model") as report:
        report.update(0, "read", 10, 100)
        now[0] += 3
        report.update(0, "read", 55, 100)
        report.update(0, "read", 56, 100)
        now[0] += 3
        report.update(0, "store", 5, 0)
    wanted: list[Mapping[str, Any]] = [
        {"stage": "read", "percent": 55, "rank": 0, "phase": "load_model"},
        {"stage": "store", "percent": 0, "rank": 0, "phase": "load_model"},
    ]
    assert [{key: line[key] for key in wanted[0]} for line in lines] == wanted
