"""Sends spans to a collector from a thread of its own, and loses some rather than wait for one."""

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import TraceServiceStub

from stepwire.telemetry.encode import encode_spans
from stepwire.telemetry.spans import RecordedSpan

_log = logging.getLogger(__name__)

QUEUE_SPANS = 8192
# About a megabyte; collectors take four.
_BATCH_SPANS = 2048
_TICK_S = 1.0
# Spans wait so long where others keep coming, as OpenTelemetry's own batches do, and less where none does. A call costs
# 3 ms of processor time however few spans it takes: each second it was most of what a sample of one in a hundred cost.
_MAX_TICKS, _QUIET_TICKS = 5, 2
_EXPORT_TIMEOUT_S = 1.5
_PAUSE_S = 0.00005
_SCOPE = "stepwire"


class SpanExporter:
    """A queue of at most `QUEUE_SPANS` spans, and the thread that empties it: when no more have come for two seconds,
    when some have waited for five, or when there are many.

    What does not fit, and what the collector does not take within its time, is dropped and counted: tracing must
    not hold a service up. One log record says when the collector is lost and one when it is back.
    """

    def __init__(self, endpoint: str, resource: Mapping[str, Any]) -> None:
        """Raises ValueError for an endpoint that is none."""
        self._target, is_secure = parse_endpoint(endpoint)
        self._resource = resource
        options = [
            ("grpc.enable_http_proxy", 0),
            ("grpc.initial_reconnect_backoff_ms", 200),
            ("grpc.max_reconnect_backoff_ms", 2000),
        ]
        self._channel = (
            grpc.secure_channel(self._target, grpc.ssl_channel_credentials(), options)
            if is_secure
            else grpc.insecure_channel(self._target, options)
        )
        self._stub = TraceServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._queue: deque[RecordedSpan] = deque()
        self._wake = threading.Event()
        self._end_at: float | None = None
        self._num_overflown = 0
        self._num_refused = 0
        self._num_exported = 0
        self._num_lost_lately = 0
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    @property
    def num_dropped(self) -> int:
        """Spans that found no place in the queue, or that the collector did not take."""
        return self._num_overflown + self._num_refused

    @property
    def num_exported(self) -> int:
        """Spans that the collector took."""
        return self._num_exported

    @property
    def num_queued(self) -> int:
        """Spans that wait."""
        return len(self._queue)

    def put(self, span: RecordedSpan) -> None:
        """Queues a span that is over."""
        num_queued = len(self._queue)
        if num_queued >= QUEUE_SPANS or self._end_at is not None:
            self._num_overflown += 1
            return
        self._queue.append(span)
        if num_queued == _BATCH_SPANS:
            self._wake.set()

    def shutdown(self, within_s: float) -> None:
        """Exports what is queued, unless the collector is dead, and ends. Blocks for about `within_s` at most."""
        self._end_at = time.monotonic() + within_s
        self._wake.set()
        self._thread.join(within_s + 0.5)
        self._channel.close()

    def _run(self) -> None:
        num_before = waited = quiet = 0
        while self._end_at is None:
            are_many = self._wake.wait(_TICK_S)
            self._wake.clear()
            num = len(self._queue)
            waited, quiet = (waited + 1 if num else 0), (quiet + 1 if num == num_before else 0)
            num_before = num
            if are_many or waited >= _MAX_TICKS or quiet >= _QUIET_TICKS:
                while self._queue:
                    self._export(self._take())
                num_before = waited = quiet = 0

    def _take(self) -> list[RecordedSpan]:
        return [self._queue.popleft() for _ in range(min(_BATCH_SPANS, len(self._queue)))]

    def _export(self, spans: Sequence[RecordedSpan]) -> None:
        timeout_s = self._timeout_s()
        if timeout_s <= 0:
            self._lose(len(spans), "the process ends")
            return
        try:
            request = encode_spans(self._resource, _SCOPE, spans, pause=_let_others_run)
            answer = self._stub.Export(request, timeout=timeout_s, wait_for_ready=True)
        except grpc.RpcError as error:
            self._lose(len(spans), error.details() or error.code().name)
        except Exception as error:  # The channel was closed by another thread, or a span cannot be encoded.
            self._lose(len(spans), repr(error))
        else:
            num_refused = min(len(spans), max(0, answer.partial_success.rejected_spans))
            self._num_refused += num_refused
            self._num_exported += len(spans) - num_refused
            if self._num_lost_lately:
                _log.info("trace collector at %s is back; %d spans were lost", self._target, self._num_lost_lately)
                self._num_lost_lately = 0

    def _timeout_s(self) -> float:
        if self._end_at is None:
            return _EXPORT_TIMEOUT_S
        if self._num_lost_lately:  # Dead already: do not hold the process up for it.
            return 0.0
        return min(_EXPORT_TIMEOUT_S, self._end_at - time.monotonic())

    def _lose(self, num_spans: int, why: str) -> None:
        if not self._num_lost_lately:
            _log.warning(
                "trace collector at %s cannot be reached (%s); spans are dropped until it can", self._target, why
            )
        self._num_lost_lately += num_spans
        self._num_refused += num_spans


def _let_others_run() -> None:
    """Gives the interpreter away: Python would let this thread keep it for 5 ms, and a step waits for no span."""
    time.sleep(_PAUSE_S)


def parse_endpoint(endpoint: str) -> tuple[str, bool]:
    """The gRPC target and whether it wants TLS. Raises ValueError for what is neither host:port nor a URL."""
    has_scheme = "://" in endpoint
    parts = urlsplit(endpoint if has_scheme else f"http://{endpoint}")
    problem = ValueError(f"OTLP endpoint {endpoint!r} is neither host:port nor http(s)://host:port")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/"):
        raise problem
    try:
        port = parts.port or 4317
    except ValueError as error:  # no number, or beyond 65535, which names no endpoint
        raise problem from error
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{host}:{port}", parts.scheme == "https"
