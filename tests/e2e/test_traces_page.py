"""The page of recent traces in a real browser."""

import shutil
import subprocess
from pathlib import Path

import pytest

from stepwire.telemetry import names
from stepwire.traces.page import serve_page
from stepwire.traces.store import TraceStore
from tests.support.traces import MS, TRACE_ID, span

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--virtual-time-budget=4000",
]


def rendered(url: str, profile: Path) -> str:
    """The page's document after its script has run."""
    if BROWSER is None:
        pytest.skip("chromium is not installed; `make test-full` installs it")
    command = [BROWSER, *FLAGS, f"--user-data-dir={profile}", "--dump-dom", url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


def test_the_browser_shows_traces_and_their_waterfall_and_runs_no_hostile_name(tmp_path: Path) -> None:
    store = TraceStore()
    hostile = "<img src=x onerror=document.title='owned'>"
    store.add(
        [
            span("01", service="stepwire-client", name="stepwire.v1.InferenceService/Generate"),
            span("02", "01", service="stepwire-scheduler", name=hostile),
            span("03", "02", service="stepwire-worker", name="worker.decode"),
            span("04", "02", service="stepwire-scheduler", name="attempt", attributes={names.EPOCH: 2, names.RANK: 1}),
        ]
    )
    page = serve_page(store, "127.0.0.1", 0)
    try:
        listed = rendered(page.url, tmp_path)
        opened = rendered(f"{page.url}#{TRACE_ID}", tmp_path)
    finally:
        page.close()
    assert "InferenceService/Generate" in listed
    for name in (
        "InferenceService/Generate",
        "worker.decode",
        "attempt (epoch 2, rank 1)",
        "stepwire-worker",
        "&lt;img src=x onerror=",
    ):
        assert name in opened
    for document in (listed, opened):
        assert "<img src=x" not in document
        assert "<title>owned" not in document


def ten_thousand_traces(store: TraceStore) -> None:
    """Requests r0 to r9999, longer and longer; every 100th failed; the last links to a step on two ranks."""
    step_id = f"{2**64:032x}"
    for number in range(10_000):
        trace_id, end_ns = f"{number + 1:032x}", (number + 2) * MS
        attributes = {names.GEN_AI_OPERATION: "chat", names.REQUEST_ID: f"r{number}"}
        if number % 100 == 0:
            attributes[names.ERROR_TYPE] = "QUEUE_FULL"
        links = ((step_id, "s" * 16),) if number == 9_999 else ()
        fields = {"end_ns": end_ns, "attributes": attributes, "links": links, "is_error": number % 100 == 0}
        below = [span(f"{part}-{number}", "request", trace_id=trace_id, name=part) for part in ("queue", "decode")]
        worker = span("w", "request", trace_id=trace_id, name="worker.decode", attributes={names.RANK: 0})
        store.add([span("request", trace_id=trace_id, name="chat tiny", **fields), *below, worker])
    step = [span("s", trace_id=step_id, name=names.SPAN_STEP)]
    for rank in (0, 1):
        step.append(span(f"w{rank}", "s", trace_id=step_id, name=names.SPAN_STEP_WORKER, attributes={names.RANK: rank}))
        step.append(span(f"f{rank}", f"w{rank}", trace_id=step_id, name=names.SPAN_STEP_FORWARD))
    store.add(step)


def test_ten_thousand_traces_are_listed_searched_and_opened(tmp_path: Path) -> None:
    store = TraceStore(max_traces=20_000)
    ten_thousand_traces(store)
    page = serve_page(store, "127.0.0.1", 0)
    try:
        listed = rendered(page.url, tmp_path)
        found = rendered(f"{page.url}#?text=r7321", tmp_path)
        slowest = rendered(f"{page.url}#?order=slowest&kind=requests", tmp_path)
        failed = rendered(f"{page.url}#?errors=1", tmp_path)
        lanes = rendered(f"{page.url}#{10_000:032x}?lanes", tmp_path)
    finally:
        page.close()
    rows = "<tr tabindex="
    assert "10001 traces" in listed
    assert listed.count(rows) == 100 and "Show older" in listed
    assert found.count(rows) == 1 and ">r7321<" in found
    assert slowest.index(">r9999<") < slowest.index(">r9998<") < slowest.index(">r9997<")
    assert failed.count(rows) == failed.count(">QUEUE_FULL<") == 100
    for label in ("a", "a rank 0", "linked steps", "steps on rank 0", "steps on rank 1"):
        assert f'<div class="name">{label}</div>' in lanes
    assert f"/api/traces/{10_000:032x}/otlp.json" in lanes
