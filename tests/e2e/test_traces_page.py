"""The page of recent traces in a real browser."""

import shutil
import subprocess
from pathlib import Path

import pytest

from stepwire.traces.page import serve_page
from stepwire.traces.store import TraceStore
from tests.support.traces import TRACE_ID, span

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
        ]
    )
    page = serve_page(store, "127.0.0.1", 0)
    try:
        listed = rendered(page.url, tmp_path)
        opened = rendered(f"{page.url}#{TRACE_ID}", tmp_path)
    finally:
        page.close()
    assert "InferenceService/Generate" in listed
    for name in ("InferenceService/Generate", "worker.decode", "stepwire-worker", "&lt;img src=x onerror="):
        assert name in opened
    for document in (listed, opened):
        assert "<img src=x" not in document
        assert "<title>owned" not in document
