"""The spans of a request: itself under the RPC's span, and its queue, prefill and decode under it.

Never one for a token: a sampled request costs four spans, an unsampled one next to nothing.
"""

import time

from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer
from opentelemetry.util.types import AttributeValue

from scheduler_service.core.request import Request
from scheduler_service.engine.values import Sampling
from stepwire.rpc.errors import StepwireError
from stepwire.telemetry import names
from stepwire.telemetry.trace import context_of, record_span, traceparent


class RequestTrace:
    """The spans of one request. Begun in the RPC's handler, whose span becomes the parent."""

    __slots__ = ("_arrival_ns", "_first_token_ns", "_is_recording", "_span", "_started_ns", "_tracer")

    def __init__(self, tracer: Tracer, operation: str, model: str) -> None:
        self._tracer = tracer
        self._arrival_ns = time.time_ns()
        self._started_ns = 0
        self._first_token_ns = 0
        self._span = tracer.start_span(
            names.request_span_name(operation, model),
            kind=SpanKind.INTERNAL,
            start_time=self._arrival_ns,
            attributes={
                names.GEN_AI_OPERATION: operation,
                names.GEN_AI_PROVIDER: names.PROVIDER_STEPWIRE,
                names.GEN_AI_REQUEST_MODEL: model,
            },
        )
        self._is_recording = self._span.is_recording()

    @property
    def traceparent(self) -> str:
        """What a worker needs to add its spans; empty when the request is not sampled."""
        return traceparent(self._span, if_sampled=True)

    def describe(self, request_id: str, sampling: Sampling, n: int, max_tokens: int) -> None:
        """Writes down what was asked for."""
        if self._is_recording:
            self._span.set_attributes(
                {
                    names.REQUEST_ID: request_id,
                    names.GEN_AI_REQUEST_MAX_TOKENS: max_tokens,
                    names.GEN_AI_REQUEST_TEMPERATURE: sampling.temperature,
                    names.GEN_AI_REQUEST_TOP_P: sampling.top_p,
                    names.GEN_AI_REQUEST_TOP_K: sampling.top_k,
                    # Seeds are unsigned; attributes are signed.
                    names.GEN_AI_REQUEST_SEED: sampling.seed if sampling.seed < 2**63 else str(sampling.seed),
                    names.GEN_AI_REQUEST_CHOICES: n,
                }
            )

    def accepted(self, request: Request) -> None:
        """The request waits from now on."""
        if self._is_recording:
            self._span.set_attribute(names.GEN_AI_INPUT_TOKENS, len(request.prompt_token_ids))
            self._span.set_attribute(names.REQUEST_PRIORITY, request.priority)

    def started(self, num_cached_tokens: int) -> None:
        """A step with the request was sent for the first time."""
        self._started_ns = time.time_ns()
        if self._is_recording and num_cached_tokens:
            self._span.add_event(
                names.EVENT_PREFIX_CACHE_HIT, {names.NUM_TOKENS: num_cached_tokens}, timestamp=self._started_ns
            )

    def preempted(self, sequence_index: int) -> None:
        """A sequence lost its blocks and waits again."""
        if self._is_recording:
            self._span.add_event(names.EVENT_PREEMPTED, {names.SEQUENCE_INDEX: sequence_index})

    def resumed(self, sequence_index: int) -> None:
        """A preempted sequence runs again."""
        if self._is_recording:
            self._span.add_event(names.EVENT_RESUMED, {names.SEQUENCE_INDEX: sequence_index})

    def first_token(self) -> None:
        """The first token of the request was sampled."""
        self._first_token_ns = time.time_ns()
        if self._is_recording:
            self._span.add_event(names.EVENT_FIRST_TOKEN, timestamp=self._first_token_ns)
            self._span.set_attribute(names.GEN_AI_TIME_TO_FIRST_CHUNK, (self._first_token_ns - self._arrival_ns) / 1e9)

    def end(self, error: StepwireError | None, attributes: dict[str, AttributeValue]) -> None:
        """The request is over: finished, or ended by `error`."""
        if not self._is_recording:
            self._span.end()
            return
        now = time.time_ns()
        self._record_parts(now)
        self._span.set_attributes(attributes)
        if error is not None:
            self._span.set_attribute(names.ERROR_TYPE, error.reason)
            if error.reason != "CANCELLED":
                self._span.set_status(Status(StatusCode.ERROR, error.message))
        self._span.end(now)

    def _record_parts(self, now: int) -> None:
        parent = context_of(self._span)
        record_span(self._tracer, names.SPAN_QUEUE, parent, (self._arrival_ns, self._started_ns or now))
        if self._started_ns:
            times = (self._started_ns, self._first_token_ns or now)
            record_span(self._tracer, names.SPAN_PREFILL, parent, times)
        if self._first_token_ns:
            record_span(self._tracer, names.SPAN_DECODE, parent, (self._first_token_ns, now))
