"""Receives spans, keeps those of recent traces, and shows them; for use without a tracing backend."""

from stepwire.traces.page import Page, serve_page
from stepwire.traces.receiver import Receiver, serve_receiver
from stepwire.traces.store import Span, SpanEvent, Trace, TraceStore
from stepwire.traces.waterfall import render_waterfall

__all__ = [
    "Page",
    "Receiver",
    "Span",
    "SpanEvent",
    "Trace",
    "TraceStore",
    "render_waterfall",
    "serve_page",
    "serve_receiver",
]
