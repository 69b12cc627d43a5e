"""What is shown in terminals of several widths."""

import io
from collections.abc import Sequence

import pytest
from rich.console import Console

from stepwire.telemetry import names
from stepwire.top.sample import Change, Sample
from stepwire.top.view import render

LONG = "worker-1.stepwire.svc.cluster.local"
COLUMNS = [
    "worker",
    "rank",
    "phase",
    "epoch",
    "sequences",
    "weights",
    "KV cache",
    "wait",
    "prepare",
    "forward",
    "sample",
]


def scheduler(at: float, host: str = "127.0.0.1", *, ready: bool = True) -> Sample:
    blocks = {"used": 34567, "cached": 12345, "free": 88888}
    values = {
        (names.METRIC_READY, ()): float(ready),
        (names.METRIC_STEPS, ()): 40 * at,
        (f"{names.METRIC_STEP_TOKENS}_sum", ()): 12345 * at,
        **{(names.METRIC_BLOCKS, (("state", state),)): float(count) for state, count in blocks.items()},
    }
    return Sample(f"http://{host}:9464/metrics", at, values)


def worker(at: float, rank: int = 0, host: str = "127.0.0.1", phase: str = "ready") -> Sample:
    values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {
        (names.METRIC_WORKER_PHASE, (("phase", phase),)): 1,
        (names.METRIC_WORKER_PHASE, (("phase", "starting"),)): 0,
        (names.METRIC_WORKER_RANK, ()): rank,
        (names.METRIC_WORKER_EPOCH, ()): 123,
        (names.METRIC_WORKER_SEQUENCES, ()): 256,
        (names.METRIC_WORKER_MEMORY, (("use", "weights"),)): 94 * 2**20,
        (names.METRIC_WORKER_MEMORY, (("use", "kv_cache"),)): 99.5 * 2**30,
    }
    for number, part in enumerate(names.STEP_PARTS, 1):
        values[(f"{names.METRIC_WORKER_STEP_PARTS}_sum", (("part", part),))] = at * number * 0.1114
        values[(f"{names.METRIC_WORKER_STEP_PARTS}_count", (("part", part),))] = at
    return Sample(f"http://{host}:{29465 + rank}/metrics", at, values)


def shown(width: int, *changes: Change) -> list[str]:
    stream = io.StringIO()
    Console(file=stream, width=width, legacy_windows=False).print(render(changes))
    return stream.getvalue().splitlines()


def workers(*hosts: str, phase: str = "ready") -> list[Change]:
    return [Change(worker(1, i, host, phase), worker(2, i, host, phase)) for i, host in enumerate(hosts)]


def titles(lines: Sequence[str]) -> list[str]:
    head = next(line for line in lines if "rank" in line)
    return [title for title in COLUMNS if f" {title} " in head]


@pytest.mark.parametrize(
    ("width", "wanted"),
    [
        (60, ["worker", "rank", "phase", "sequences", "forward"]),
        (80, ["worker", "rank", "phase", "epoch", "sequences", "KV cache", "wait", "forward"]),
        (120, COLUMNS),
    ],
)
def test_no_column_that_is_shown_is_cut(width: int, wanted: list[str]) -> None:
    lines = shown(width, Change(scheduler(1), scheduler(2)), *workers("127.0.0.1", LONG))
    assert titles(lines) == wanted
    assert all(len(line) == width for line in lines)
    rows = [line for line in lines if "ready" in line]
    cells = {"KV cache": "99.5 GiB", "wait": "111.4 ms", "forward": "334.2 ms", "sample": "445.6 ms"}
    for row in rows:
        assert "…" not in row.replace("…:29466", "")
        assert all(text in row for title, text in cells.items() if title in wanted)
    # Who it is is told of each, a long name by its beginning and its port.
    assert " 127.0.0.1:29465 " in rows[0] and " worker-1" in rows[1] and ":29466 " in rows[1]
    hidden = [title for title in COLUMNS if title not in wanted]
    assert (f"in a wider terminal: {', '.join(hidden)[:20]}" in lines[-1]) == bool(hidden)
    figures = " ".join(line.strip("│ ") for line in lines)
    assert "34,567 used, 12,345 cached of 135,800" in figures and "12,345 " in figures


def test_what_takes_more_room_hides_what_matters_less() -> None:
    lines = shown(80, *workers("127.0.0.1", phase="initialised"))
    assert titles(lines) == ["worker", "rank", "phase", "sequences", "KV cache", "wait", "forward"]
    assert "initialised" in "".join(lines)


def test_the_state_is_told_however_long_the_name_is() -> None:
    host = "a-" * 40 + "scheduler.local"
    (head, *_) = shown(80, Change(scheduler(1, host), scheduler(2, host, ready=False)))
    assert "scheduler a-a-" in head and "…:9464 not serving " in head


def test_a_process_that_does_not_answer_is_named() -> None:
    gone = Sample("http://127.0.0.1:9465/metrics", 1.0, error="refused")
    assert shown(80, Change(gone, gone)) == ["http://127.0.0.1:9465/metrics: refused"]
