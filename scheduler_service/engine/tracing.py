"""The spans of a request: itself under the RPC's span, and under it what its time went to.

At any time a request is in one part: in the queue, in prefill, decoding, preempted, in recovery, or waiting for its
client to take the last of the stream. Parts follow each other without gaps, so they add up to the request. An
attempt beside them is what one rank did for the request in one epoch. Never a span for a token: a sampled request
has about six spans, one that is not sampled costs next to nothing.
"""

import time

from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, Tracer
from opentelemetry.util.types import AttributeValue

from scheduler_service.core.request import Request
from scheduler_service.engine.step_tracing import EpochTotals, StepTracing
from scheduler_service.engine.values import Sampling
from stepwire.rpc.errors import StepwireError
from stepwire.telemetry import names
from stepwire.telemetry.trace import context_of, current_span, record_span, started_ns, traceparent

# Steps that a request's span links to; of a long request the first ones.
_MAX_STEP_LINKS = 64


class RequestTrace:
    """The spans of one request. Begun in the RPC's handler, whose span becomes the parent."""

    __slots__ = (
        "_arrival_ns",
        "_attempt",
        "_is_recording",
        "_num_links",
        "_part",
        "_part_since_ns",
        "_placed",
        "_running",
        "_span",
        "_tracer",
        "_tracing",
        "num_epochs",
        "num_preemptions",
        "parts_ns",
        "request_id",
    )

    def __init__(self, tracer: Tracer, operation: str, model: str, request_id: str) -> None:
        self._tracing: StepTracing | None = None
        self._tracer = tracer
        # The request arrives with its call.
        self._arrival_ns = started_ns(current_span())
        self._part = names.SPAN_QUEUE
        self._part_since_ns = self._arrival_ns
        self._running: set[int] = set()
        self._placed: set[int] = set()
        self._attempt: _Attempt | None = None
        self._num_links = 0
        self.request_id = request_id
        self.num_epochs = 0
        self.num_preemptions = 0
        self.parts_ns: dict[str, int] = {}
        """Time of each part so far, in nanoseconds."""
        self._span = self._tracer.start_span(
            names.request_span_name(operation, model),
            kind=SpanKind.INTERNAL,
            start_time=self._arrival_ns,
            attributes={
                names.GEN_AI_OPERATION: operation,
                names.GEN_AI_PROVIDER: names.PROVIDER_STEPWIRE,
                names.GEN_AI_REQUEST_MODEL: model,
                names.REQUEST_ID: request_id,
            },
        )
        self._is_recording = self._span.is_recording()

    @property
    def traceparent(self) -> str:
        """What a worker needs to add its spans; empty when the request is not sampled."""
        return traceparent(self._span, if_sampled=True)

    @property
    def is_recording(self) -> bool:
        """Whether the request is sampled."""
        return self._is_recording

    @property
    def context(self) -> SpanContext:
        """Of the request's span."""
        return self._span.get_span_context()

    # What is known of it.

    def describe(self, sampling: Sampling, n: int, max_tokens: int) -> None:
        """Writes down what was asked for."""
        if self._is_recording:
            self._span.set_attributes(
                {
                    names.GEN_AI_REQUEST_MAX_TOKENS: max_tokens,
                    names.GEN_AI_REQUEST_TEMPERATURE: sampling.temperature,
                    names.GEN_AI_REQUEST_TOP_P: sampling.top_p,
                    names.GEN_AI_REQUEST_TOP_K: sampling.top_k,
                    # Seeds are unsigned; attributes are signed.
                    names.GEN_AI_REQUEST_SEED: sampling.seed if sampling.seed < 2**63 else str(sampling.seed),
                    names.GEN_AI_REQUEST_CHOICES: n,
                }
            )

    def accepted(self, request: Request, tracing: StepTracing) -> None:
        """The request waits from now on, for steps that `tracing` follows."""
        self._tracing = tracing
        tracing.follow(self)
        if self._is_recording:
            self._span.set_attribute(names.GEN_AI_INPUT_TOKENS, len(request.prompt_token_ids))
            self._span.set_attribute(names.REQUEST_PRIORITY, request.priority)

    # What happens to it.

    def placed(self, sequence_index: int, step_id: int, num_cached_tokens: int) -> bool:
        """A sequence runs from the step that is being sent on: for the first time, or again, which it answers."""
        now = time.time_ns()
        is_resumed = sequence_index in self._placed
        self._placed.add(sequence_index)
        if self._part != names.SPAN_DECODE:
            self._enter(names.SPAN_PREFILL, now)
        self._running.add(sequence_index)
        self._join_epoch(step_id, now)
        if is_resumed and self._is_recording:
            self._span.add_event(names.EVENT_RESUMED, {names.SEQUENCE_INDEX: sequence_index}, now)
        if num_cached_tokens and self._is_recording:
            told = {names.SEQUENCE_INDEX: sequence_index, names.NUM_TOKENS: num_cached_tokens}
            self._span.add_event(names.EVENT_PREFIX_CACHE_HIT, told, now)
        return is_resumed

    def token_came(self, *, is_first: bool) -> None:
        """The first token of the request, or the first since it was resumed, is there."""
        now = time.time_ns()
        self._enter(names.SPAN_DECODE, now)
        if is_first and self._is_recording:
            self._span.add_event(names.EVENT_FIRST_TOKEN, timestamp=now)
            self._span.set_attribute(names.GEN_AI_TIME_TO_FIRST_CHUNK, (now - self._arrival_ns) / 1e9)

    def preempted(self, sequence_index: int) -> None:
        """A sequence lost its blocks and waits again."""
        self.num_preemptions += 1
        self._running.discard(sequence_index)
        now = time.time_ns()
        if not self._running:
            self._enter(names.SPAN_PREEMPTED, now)
        if self._is_recording:
            self._span.add_event(names.EVENT_PREEMPTED, {names.SEQUENCE_INDEX: sequence_index}, now)

    def sequence_ended(self, sequence_index: int) -> None:
        """A sequence has had its last token."""
        self._running.discard(sequence_index)

    def delivered(self) -> None:
        """All tokens are there; what is left is for the client to take."""
        now = time.time_ns()
        self._leave_epoch(now, "finished")
        self._enter(names.SPAN_STREAM, now)

    def worker_lost(self, message: str) -> None:
        """The epoch ended: what ran waits for the workers to come back."""
        now = time.time_ns()
        self._leave_epoch(now, "epoch_ended")
        if not self._running and self._part not in (names.SPAN_PREEMPTED, names.SPAN_PREFILL, names.SPAN_DECODE):
            return
        self._running.clear()
        self._enter(names.SPAN_RECOVERY, now)
        if self._is_recording:
            self._span.add_event(names.EVENT_WORKER_LOST, {names.ERROR_MESSAGE: message}, now)

    def recovered(self, epoch: int) -> None:
        """The workers are back, in a new epoch."""
        if self._is_recording and self._part == names.SPAN_RECOVERY:
            self._span.add_event(names.EVENT_RECOVERED, {names.EPOCH: epoch})

    def moved(self, tracing: StepTracing, replica: int) -> None:
        """The request goes on with another replica, whose steps `tracing` follows."""
        now = time.time_ns()
        self._leave_epoch(now, "moved")
        if self._running:
            self._running.clear()
            self._enter(names.SPAN_PREEMPTED, now)
        if self._tracing is not None:
            self._tracing.forget(self)
        self._tracing = tracing
        tracing.follow(self)
        if self._is_recording:
            self._span.add_event(names.EVENT_MOVED, {names.REPLICA: replica}, now)

    def link_step(self, step: SpanContext) -> None:
        """Links the request to the trace of a step that it was part of."""
        if self._num_links < _MAX_STEP_LINKS:
            self._num_links += 1
            self._span.add_link(step)

    def end(self, error: StepwireError | None, attributes: dict[str, AttributeValue]) -> None:
        """The request is over: finished, or ended by `error`."""
        now = time.time_ns()
        if self._tracing is not None:
            self._tracing.forget(self)
        self._leave_epoch(now, "" if error is None else error.reason.lower())
        self._close_part(now)
        if self._is_recording:
            self._span.set_attributes(attributes)
            self._span.set_attribute(names.NUM_PREEMPTIONS, self.num_preemptions)
            self._span.set_attribute(names.NUM_EPOCHS, self.num_epochs)
            if error is not None:
                self._span.set_attribute(names.ERROR_TYPE, error.reason)
                if error.reason != "CANCELLED":
                    self._span.set_status(Status(StatusCode.ERROR, error.message))
        self._span.end(now)

    # Parts and attempts.

    def _enter(self, part: str, now: int) -> None:
        if part != self._part:
            self._close_part(now)
            self._part, self._part_since_ns = part, now

    def _close_part(self, now: int) -> None:
        part, since = self._part, self._part_since_ns
        self.parts_ns[part] = self.parts_ns.get(part, 0) + max(0, now - since)
        if self._is_recording:
            record_span(self._tracer, part, context_of(self._span), (since, now))

    def _join_epoch(self, step_id: int, now: int) -> None:
        totals = None if self._tracing is None else self._tracing.totals
        if totals is None or (self._attempt is not None and self._attempt.totals is totals):
            return
        self.num_epochs += 1
        self._attempt = _Attempt(totals, step_id, now)

    def _leave_epoch(self, now: int, outcome: str) -> None:
        attempt, self._attempt = self._attempt, None
        if attempt is not None and self._is_recording:
            parent = context_of(self._span)
            for attributes in attempt.attributes(outcome):
                record_span(self._tracer, names.SPAN_ATTEMPT, parent, (attempt.since_ns, now), attributes=attributes)


class _Attempt:
    """What an epoch's ranks did for a request: the difference between their totals at its start and its end."""

    __slots__ = ("_before", "_first_step_id", "since_ns", "totals")

    def __init__(self, totals: EpochTotals, first_step_id: int, since_ns: int) -> None:
        self.totals = totals
        self.since_ns = since_ns
        self._first_step_id = first_step_id
        self._before = [(rank.num_steps, rank.forward_ns) for rank in totals.ranks]

    def attributes(self, outcome: str) -> list[dict[str, AttributeValue]]:
        """Of the attempt's span on each rank. Times are those of the steps, whoever else was in them."""
        return [
            {
                **rank.attributes(),
                names.EPOCH: self.totals.epoch,
                names.FIRST_STEP_ID: self._first_step_id,
                names.LAST_STEP_ID: rank.last_step_id,
                names.NUM_STEPS: rank.num_steps - num_steps,
                names.FORWARD_S: (rank.forward_ns - forward_ns) / 1e9,
                names.OUTCOME: outcome,
            }
            for rank, (num_steps, forward_ns) in zip(self.totals.ranks, self._before, strict=True)
        ]
