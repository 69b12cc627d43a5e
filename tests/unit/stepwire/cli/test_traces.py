import asyncio
import json
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from stepwire.cli.errors import CommandError
from stepwire.cli.target import address
from stepwire.cli.trace_feed import finished_traces
from stepwire.cli.trace_page import fetch_trace, trace_from_json
from stepwire.traces.page import serve_page
from stepwire.traces.receiver import spans_of
from stepwire.traces.store import Span, SpanEvent, TraceStore

START = 1_700_000_000_000_000_000


def span(span_id: str, parent_id: str = "", *, trace: str = "a", start_ms: int = 0, name: str = "work") -> Span:
    start_ns = START + start_ms * 1_000_000
    event = SpanEvent("first_token", start_ns + 500_000, {"position": "0"})
    return Span(
        trace_id=trace * 32,
        span_id=span_id * 16,
        parent_id=parent_id and parent_id * 16,
        name=name,
        kind="internal",
        service="stepwire-scheduler",
        start_ns=start_ns,
        end_ns=start_ns + 1_000_000,
        attributes={"stepwire.request_id": f"request-{trace}"},
        events=(event,),
    )


async def collect(store: TraceStore, count: int, then: Callable[[], None] = lambda: None) -> list[list[str]]:
    """The spans of the first `count` traces that are reported; calls `then` after the first."""
    stop, found = asyncio.Event(), []
    async for trace in finished_traces(store, stop, quiet_s=0.02, look_every_s=0.005):
        found.append([each.span_id[0] for each in trace.spans])
        if len(found) == 1:
            then()
        if len(found) == count:
            stop.set()
    return found


async def test_a_trace_is_reported_once_it_is_quiet() -> None:
    store = TraceStore()
    store.add([span("1"), span("2", "1")])
    assert await collect(store, 1) == [["1", "2"]]


async def test_a_trace_that_goes_on_is_reported_again() -> None:
    store = TraceStore()
    store.add([span("1")])
    found = await collect(store, 2, lambda: store.add([span("2", "1", start_ms=1)]))
    assert found == [["1"], ["1", "2"]]


async def test_a_trace_whose_parent_is_still_open_waits_behind_a_whole_one() -> None:
    store = TraceStore()
    store.add([span("2", "1"), span("5", trace="b")])
    assert await collect(store, 2) == [["5"], ["2"]]


async def test_the_feed_ends_when_told_to() -> None:
    stop = asyncio.Event()
    stop.set()
    assert [trace async for trace in finished_traces(TraceStore(), stop)] == []


def test_a_trace_comes_back_from_the_page_as_it_was() -> None:
    store = TraceStore()
    store.add([span("1"), span("2", "1", start_ms=1), span("3", "2", start_ms=2), span("4", "1", start_ms=3)])
    store.add([span("5", trace="b")])
    page = serve_page(store, port=0)
    try:
        found = fetch_trace(("127.0.0.1", page.port), "request-a")
        assert found == store.get("a" * 32)
        assert fetch_trace(("127.0.0.1", page.port), "").trace_id == "b" * 32
        with pytest.raises(CommandError, match="no trace matches 'zzz'"):
            fetch_trace(("127.0.0.1", page.port), "zzz")
    finally:
        page.close()


def test_show_prints_a_waterfall(run_command: Callable[..., Any]) -> None:
    store = TraceStore()
    store.add([span("1", name="Generate"), span("2", "1", name="decode")])
    page = serve_page(store, port=0)
    try:
        done = run_command("traces", "show", "a" * 32, "--page", f"127.0.0.1:{page.port}")
    finally:
        page.close()
    assert (done.exit_code, "Generate" in done.stdout, "decode" in done.stdout) == (0, True, True)


def test_list_finds_the_slowest_and_the_failed(run_command: Callable[..., Any]) -> None:
    store = TraceStore()
    store.add(
        [
            replace(span("1", name="quick"), is_error=True),
            replace(span("2", trace="b", name="slow"), end_ns=START + 9**12),
        ]
    )
    page = serve_page(store, port=0)
    target = ("--page", f"127.0.0.1:{page.port}")
    try:
        slowest = run_command("traces", "list", "--slowest", *target)
        failed = run_command("traces", "list", "request-a", "--failed", *target)
    finally:
        page.close()
    assert [line.split()[-1] for line in slowest.stdout.splitlines()] == ["name", "slow", "quick"]
    assert [line.split()[0] for line in failed.stdout.splitlines()] == ["trace", "a" * 32]


@pytest.mark.parametrize("form", ["json", "otlp-json", "otlp"])
def test_export_writes_a_trace(run_command: Callable[..., Any], tmp_path: Path, form: str) -> None:
    store, path = TraceStore(), tmp_path / "trace"
    store.add([span("1"), span("2", "1")])
    page = serve_page(store, port=0)
    try:
        done = run_command(
            "traces", "export", "request-a", "--form", form, "-o", str(path), "--page", f"127.0.0.1:{page.port}"
        )
    finally:
        page.close()
    assert done.exit_code == 0
    if form == "json":
        assert trace_from_json(json.loads(path.read_bytes())) == store.get("a" * 32)
    elif form == "otlp-json":
        assert json.loads(path.read_bytes())["resourceSpans"]
    else:
        assert len(list(spans_of(ExportTraceServiceRequest.FromString(path.read_bytes())))) == 2


def test_show_says_what_to_do_when_nobody_answers(run_command: Callable[..., Any]) -> None:
    done = run_command("traces", "show", "--page", "127.0.0.1:1")
    assert (done.exit_code, "start `stepwire traces`" in done.stderr) == (1, True)


@pytest.mark.parametrize(("text", "expected"), [("h:1", ("h", 1)), ("[::1]:2", ("::1", 2))])
def test_addresses(text: str, expected: tuple[str, int]) -> None:
    assert address(text, "--x") == expected


@pytest.mark.parametrize("text", ["", "h", "h:", ":1", "h:x", "h:70000", "h:-1"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is not host:port"):
        address(text, "--x")


@pytest.mark.parametrize("option", ["--listen", "--page"])
def test_an_address_in_use_names_its_option(run_command: Callable[..., Any], option: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        other = {"--listen": "--page", "--page": "--listen"}[option]
        addresses = {option: f"127.0.0.1:{taken.getsockname()[1]}", other: "127.0.0.1:0"}
        done = run_command("traces", *(part for pair in addresses.items() for part in pair))
    assert done.exit_code == 1
    assert f"{addresses[option]} is in use by another process" in done.stderr
    assert f"with {option}" in done.stderr
