import io

import pytest
from rich.console import Console

from stepwire.telemetry import names
from stepwire.traces import SpanEvent, Trace, TraceStore, render_waterfall
from stepwire.traces.waterfall import format_duration
from tests.support.traces import MS, TRACE_ID, span


def trace_of(*spans: object) -> Trace:
    store = TraceStore()
    store.add(spans)  # type: ignore[arg-type]
    trace = store.get(TRACE_ID)
    assert trace is not None
    return trace


def rendered(trace: Trace, width: int = 80, **options: object) -> list[str]:
    stream = io.StringIO()
    Console(file=stream, width=width, legacy_windows=False, **options).print(render_waterfall(trace))  # type: ignore[arg-type]
    return stream.getvalue().splitlines()


def test_a_tree_with_services_durations_bars_and_events() -> None:
    event = SpanEvent("first_token", 5 * MS, {})
    lines = rendered(
        trace_of(
            span("client", service="stepwire-client"),
            span("decode", "client", service="stepwire-worker", start_ns=5 * MS, events=(event,)),
        )
    )
    assert lines[0].startswith(f"trace {TRACE_ID}  10.0 ms, 2 spans")
    assert "stepwire-client (1)" in lines[1] and "stepwire-worker (1)" in lines[1]
    root, child, mark = lines[2:]
    assert root.startswith("● client") and "stepwire-client" in root and "10.0 ms" in root
    assert child.startswith("  ● decode") and "stepwire-worker" in child and "5.00 ms" in child
    assert child.index("━") > root.index("━") and child.rindex("━") == root.rindex("━")
    assert root.count("━") // 2 == pytest.approx(child.count("━"), abs=1)
    assert mark.split() == ["-", "first_token", "+5.00", "ms", "^"]
    assert mark.index("^") == child.index("━")


@pytest.mark.parametrize("width", [30, 40, 72, 80, 200])
def test_lines_fit_the_console(width: int) -> None:
    deep = [span(str(i), str(i - 1) if i else "", name="n" * 60, service="s" * 50, start_ns=i) for i in range(40)]
    for line in rendered(trace_of(*deep), width):
        assert len(line) <= width


@pytest.mark.parametrize(
    ("width", "name"),
    [(140, "stepwire.v1.WorkerService/LoadModel"), (80, "WorkerService/LoadModel"), (50, "…/LoadModel")],
)
def test_of_an_rpc_the_method_is_shown_in_any_width(width: int, name: str) -> None:
    lines = rendered(trace_of(span("a", name="stepwire.v1.WorkerService/LoadModel", service="s")), width)
    assert lines[-1].startswith(f"● {name} ")


@pytest.mark.parametrize(("width", "label"), [(120, "attempt (epoch 2, rank {})"), (80, "attempt e2 r{}")])
def test_attempts_of_several_ranks_and_epochs_are_told_apart_in_any_width(width: int, label: str) -> None:
    scheduler = {"service": "stepwire-scheduler"}
    path = [span("client"), span("server", "client", **scheduler), span("request", "server", **scheduler)]
    attempts = [
        span(str(rank), "request", name="attempt", attributes={names.EPOCH: 2, names.RANK: rank}, **scheduler)
        for rank in (0, 1)
    ]
    lines = rendered(trace_of(*path, *attempts), width)
    assert [line.partition(" stepwire")[0].strip("● ") for line in lines[-2:]] == [label.format(0), label.format(1)]


def test_errors_show_their_message() -> None:
    lines = rendered(trace_of(span("a", is_error=True, status_message="rank 0 is gone")))
    assert lines[-1].strip() == "rank 0 is gone"


def test_names_cannot_speak_to_the_terminal_or_to_rich() -> None:
    hostile = "\x1b]0;title\x07[bold]x[/bold]\r\n\u202e"
    event = SpanEvent(hostile, 0, {})
    text = "\n".join(
        rendered(
            trace_of(span("a", name=hostile, service=hostile, events=(event,), is_error=True, status_message=hostile)),
            300,
        )
    )
    assert "\x1b" not in text and "\r" not in text and "\u202e" not in text
    assert "[bold]x[/bold]" in text


def test_clocks_are_shown_as_they_are() -> None:
    lines = rendered(trace_of(span("a", start_ns=10 * MS, end_ns=20 * MS), span("b", "a", start_ns=0, end_ns=MS)))
    assert lines[2].index("━") > lines[3].index("━")
    backwards = rendered(trace_of(span("a", start_ns=10, end_ns=5)))
    assert "0 ns" in backwards[2]


def test_a_huge_trace_is_cut() -> None:
    lines = rendered(trace_of(*(span(str(i)) for i in range(500))))
    assert len(lines) < 210
    assert lines[-1] == "300 more spans are not shown"


@pytest.mark.parametrize(
    ("duration_ns", "text"),
    [
        (0, "0 ns"),
        (999, "999 ns"),
        (1_500, "1.50 µs"),
        (12_345_678, "12.3 ms"),
        (1_230_000_000, "1.23 s"),
        (10**12, "1000 s"),
    ],
)
def test_durations(duration_ns: int, text: str) -> None:
    assert format_duration(duration_ns) == text
