"""An HTML page of recent traces, and the JSON API under it, by the standard library's HTTP server.

For one developer on the loopback interface. What the page shows comes from whoever can reach the
receiver: it reaches the document as text nodes only, and a content security policy lets nothing but
the page's own script and style run.
"""

import base64
import hashlib
import json
import re
import socket
import threading
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs, urlsplit

from stepwire.rpc.server import bind_error
from stepwire.traces.api import detail, list_traces
from stepwire.traces.otlp import otlp_json, otlp_request
from stepwire.traces.store import Trace, TraceStore

DEFAULT_PORT = 16686

_TRACE_PATH = re.compile(r"/api/traces/([0-9a-fA-F]{32})(|/otlp|/otlp\.json)")
_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True, slots=True)
class Page:
    """A running page."""

    url: str
    port: int
    _server: ThreadingHTTPServer

    def close(self) -> None:
        """Stops serving."""
        self._server.shutdown()
        self._server.server_close()


def serve_page(store: TraceStore, host: str = "127.0.0.1", port: int = DEFAULT_PORT) -> Page:
    """Serves the page from a thread; port 0 takes a free one. Raises AddressInUse or BindError."""
    html = files("stepwire.traces").joinpath("page.html").read_bytes()
    try:
        server = _Server((host, port), partial(_Handler, store, html, host))
    except OSError:
        raise bind_error(host, port) from None
    threading.Thread(target=server.serve_forever, name="trace-page", daemon=True, args=(0.05,)).start()
    bound = server.server_address[1]
    shown = f"[{host}]" if ":" in host else host
    return Page(f"http://{shown}:{bound}/", bound, server)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int], handler: Any) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, handler)


class _Handler(BaseHTTPRequestHandler):
    server_version = "stepwire"
    sys_version = ""
    timeout = 30

    def __init__(self, store: TraceStore, html: bytes, host: str, *args: Any) -> None:
        self._store = store
        self._html = html
        self._host = host
        super().__init__(*args)

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        if not self._is_host_ours():
            # A page elsewhere whose name was made to resolve to this machine may not read traces.
            self._send(HTTPStatus.FORBIDDEN, "text/plain", b"unknown host")
        elif url.path == "/":
            self._send(HTTPStatus.OK, "text/html; charset=utf-8", self._html)
        elif url.path == "/api/traces":
            self._send_json(list_traces(self._store, parse_qs(url.query)))
        elif match := _TRACE_PATH.fullmatch(url.path):
            self._send_trace(self._store.get(match[1]), match[2])
        else:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", b"not found")

    def _send_trace(self, trace: Trace | None, form: str) -> None:
        if trace is None:
            self._send_json(None)
        elif form == "/otlp":
            self._send(HTTPStatus.OK, "application/x-protobuf", otlp_request(trace).SerializeToString())
        elif form == "/otlp.json":
            self._send_json(otlp_json(trace))
        else:
            self._send_json(detail(trace, self._store))

    def _is_host_ours(self) -> bool:
        named = urlsplit(f"//{self.headers.get('Host', '')}").hostname
        return named in _LOOPBACK_NAMES or named == self._host.lower() or self._host in ("0.0.0.0", "::")

    def _send_json(self, value: Any) -> None:
        status = HTTPStatus.NOT_FOUND if value is None else HTTPStatus.OK
        self._send(status, "application/json", json.dumps(value).encode())

    def _send(self, status: HTTPStatus, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", content_security_policy(self._html))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing: a poll every few seconds is no news."""


def content_security_policy(html: bytes) -> str:
    """A policy under which only the script and the style of this page run, and it talks to its own server only."""
    script, style = (_hash(html, tag) for tag in (b"script", b"style"))
    return (
        f"default-src 'none'; script-src '{script}'; style-src '{style}'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _hash(html: bytes, tag: bytes) -> str:
    match = re.search(rb"<%s>(.*?)</%s>" % (tag, tag), html, re.DOTALL)
    content = match[1] if match else b""
    return f"sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}"
