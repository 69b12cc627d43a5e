"""What the scheduler counts and measures for Prometheus.

Labels are few and bounded: operations, reasons of our own, parts of a step, and the tenants that are configured; all
others are one. What the scheduler's core counts itself is read when it is asked for.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from scheduler_service.core.plan import StepPlan
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.core.stats import SchedulerStats
from scheduler_service.engine.causes import EpochEnd, Kind
from scheduler_service.engine.live import LiveRequest
from scheduler_service.engine.ports import StepTimings
from scheduler_service.engine.recovery import Epoch
from stepwire.rpc.errors import StepwireError
from stepwire.telemetry import names
from stepwire.telemetry.metrics import (
    COUNT_BUCKETS,
    FIRST_TOKEN_BUCKETS,
    REQUEST_BUCKETS,
    STEP_BUCKETS,
    TOKEN_BUCKETS,
    Metrics,
    exemplar,
)

_OTHER_TENANTS = "other"

# What is read of each replica's core, and summed.
_GAUGES: Sequence[tuple[str, str, Callable[[Scheduler], int]]] = (
    (names.METRIC_STEPS_IN_FLIGHT, "Steps sent and not answered.", lambda core: core.num_in_flight),
    (names.METRIC_QUEUED_TOKENS, "Tokens of the sequences that wait.", lambda core: core.num_queued_tokens),
)
_COUNTERS: Sequence[tuple[str, str, Callable[[SchedulerStats], int]]] = (
    (names.METRIC_STEPS, "Steps that were answered.", lambda stats: stats.num_steps),
    (names.METRIC_PREEMPTIONS, "Preemptions.", lambda stats: stats.num_preemptions),
    (
        names.METRIC_HOPELESS,
        "Requests ended early: their deadline could not be met.",
        lambda stats: stats.num_hopeless,
    ),
    (names.METRIC_PREFIX_QUERIES, "Tokens looked up in the prefix cache.", lambda stats: stats.prefix_query_tokens),
    (names.METRIC_PREFIX_HITS, "Tokens found in the prefix cache.", lambda stats: stats.prefix_hit_tokens),
    (names.METRIC_DRAFT_TOKENS, "Tokens that were drafted and verified.", lambda stats: stats.num_draft_tokens),
    (names.METRIC_ACCEPTED_TOKENS, "Draft tokens that were right.", lambda stats: stats.num_accepted_tokens),
)


class EngineMetrics:
    """Metrics of one served model. `schedulers` answers the cores of its replicas."""

    def __init__(
        self,
        metrics: Metrics,
        model: str,
        *,
        tenants: Iterable[str],
        schedulers: Callable[[], Sequence[Scheduler]],
        is_healthy: Callable[[], bool],
    ) -> None:
        self._tenants = frozenset(tenants)
        self._common = {"gen_ai_provider_name": names.PROVIDER_STEPWIRE, "gen_ai_request_model": model}
        self._make_request_metrics(metrics)
        self._make_step_metrics(metrics)
        self._make_epoch_metrics(metrics)
        self._epoch_ended_at: float | None = None
        metrics.registry.register(_CoreCollector(schedulers, is_healthy))

    def request_admitted(self, live: LiveRequest) -> None:
        """Measures what came before a request had its place in the queue."""
        self._admission_time.observe(time.monotonic() - live.arrival, exemplar(live.request.trace))

    def request_ended(
        self, operation: str, arrival: float, live: LiveRequest | None, error: StepwireError | None
    ) -> None:
        """Counts a call that is over: `live` is None for one that was refused. `arrival` is monotonic, in seconds."""
        reason = "" if error is None else error.reason
        trace = None if live is None else exemplar(live.request.trace)
        labels = {**self._common, "gen_ai_operation_name": operation}
        self._duration.labels(**labels, error_type=reason).observe(time.monotonic() - arrival, trace)
        if live is None:
            self._refused.labels(reason=reason).inc()
            return
        tenant = live.request.tenant if live.request.tenant in self._tenants else _OTHER_TENANTS
        for finish_reason in live.finish_reasons.values() if error is None else (reason,):
            self._requests.labels(
                finish_reason=str(getattr(finish_reason, "value", finish_reason)), tenant=tenant
            ).inc()
        num_prompt, num_output = len(live.request.prompt_token_ids), live.num_output_tokens
        self._prompt_tokens.labels(tenant=tenant).inc(num_prompt)
        self._output_tokens.labels(tenant=tenant).inc(num_output)
        self._prompt_lengths.observe(num_prompt)
        self._output_lengths.observe(num_output)
        self._queue_time.labels(tenant=tenant).observe(live.queue_s, trace)
        if live.request.deadline is not None and reason in ("", "DEADLINE_EXCEEDED"):
            self._deadlines.labels(outcome="missed" if reason else "met").inc()
        if live.first_token_at is None:
            return
        self._first_token.labels(**labels).observe(live.first_token_at - live.arrival, trace)
        if num_output > live.request.n:
            per_token = (time.monotonic() - live.first_token_at) / (num_output / live.request.n - 1)
            self._per_token.labels(**labels).observe(per_token, trace)

    def step_sent(self, plan: StepPlan) -> None:
        """Counts a step that is on its way."""
        self._step_tokens.observe(plan.num_tokens)
        self._step_sequences.observe(len(plan.sequence_ids))

    def step_answered(self, timings: StepTimings, seconds: float) -> None:
        """Measures a step from sending to answer, or from the answer before it, and its parts inside the worker.

        What is left of the whole is the way between the processes.
        """
        inside = (timings.queue_ns, timings.prepare_ns, timings.forward_ns, timings.sample_ns)
        self._step_time.observe(seconds)
        for part, duration_ns in zip(self._parts, inside, strict=False):
            part.observe(duration_ns / 1e9)
        self._parts[-1].observe(max(0.0, seconds - sum(inside[1:]) / 1e9))

    def epoch_began(self, epoch: Epoch) -> None:
        """See EpochObserver."""
        self._epoch.set(epoch.number)
        if self._epoch_ended_at is not None:
            self._recovery_time.observe(time.monotonic() - self._epoch_ended_at)
            self._epoch_ended_at = None

    def epoch_ended(self, end: EpochEnd) -> None:
        """See EpochObserver."""
        self._epoch_ended_at = time.monotonic()
        self._epoch_ends.labels(cause=end.root.kind.name.lower()).inc()

    def _make_request_metrics(self, metrics: Metrics) -> None:
        registry = metrics.registry
        labels = (*self._common, "gen_ai_operation_name")
        self._duration = Histogram(
            names.METRIC_REQUEST_DURATION,
            "From the arrival of a request to its end.",
            (*labels, "error_type"),
            buckets=REQUEST_BUCKETS,
            registry=registry,
        )
        self._first_token = Histogram(
            names.METRIC_TIME_TO_FIRST_TOKEN,
            "From the arrival of a request to its first token.",
            labels,
            buckets=FIRST_TOKEN_BUCKETS,
            registry=registry,
        )
        self._per_token = Histogram(
            names.METRIC_TIME_PER_OUTPUT_TOKEN,
            "Mean time of a request's tokens after the first.",
            labels,
            buckets=TOKEN_BUCKETS,
            registry=registry,
        )
        self._admission_time = Histogram(
            names.METRIC_ADMISSION_TIME,
            "From the arrival of a request to its place in the queue: template, tokenizer, grammar.",
            buckets=FIRST_TOKEN_BUCKETS,
            registry=registry,
        )
        self._queue_time = Histogram(
            names.METRIC_QUEUE_TIME,
            "From the arrival of a request to the first step with it.",
            ("tenant",),
            buckets=FIRST_TOKEN_BUCKETS,
            registry=registry,
        )
        self._requests = Counter(
            names.METRIC_REQUESTS,
            "Sequences that ended, by how; for a request that failed one, by its error's reason.",
            ("finish_reason", "tenant"),
            registry=registry,
        )
        self._refused = Counter(
            names.METRIC_REQUESTS_REFUSED, "Requests that were refused, by reason.", ("reason",), registry=registry
        )
        self._deadlines = Counter(
            names.METRIC_DEADLINES, "Requests with a deadline, by whether they met it.", ("outcome",), registry=registry
        )
        self._prompt_tokens = Counter(
            names.METRIC_PROMPT_TOKENS, "Prompt tokens of ended requests.", ("tenant",), registry=registry
        )
        self._output_tokens = Counter(
            names.METRIC_OUTPUT_TOKENS, "Output tokens of ended requests.", ("tenant",), registry=registry
        )
        self._prompt_lengths = Histogram(
            names.METRIC_REQUEST_PROMPT_TOKENS, "Prompt tokens of a request.", buckets=COUNT_BUCKETS, registry=registry
        )
        self._output_lengths = Histogram(
            names.METRIC_REQUEST_OUTPUT_TOKENS, "Output tokens of a request.", buckets=COUNT_BUCKETS, registry=registry
        )

    def _make_epoch_metrics(self, metrics: Metrics) -> None:
        registry = metrics.registry
        self._epoch = Gauge(names.METRIC_EPOCH, "The last epoch of the worker group that began.", registry=registry)
        self._epoch_ends = Counter(
            names.METRIC_EPOCH_ENDS, "Epochs that ended, by how a worker was lost.", ("cause",), registry=registry
        )
        for kind in Kind:
            # A rate is seen from the first one on only if there was a 0 before it.
            self._epoch_ends.labels(cause=kind.name.lower())
        self._recovery_time = Histogram(
            names.METRIC_RECOVERY_TIME,
            "From the end of an epoch to the beginning of the next.",
            buckets=REQUEST_BUCKETS,
            registry=registry,
        )

    def _make_step_metrics(self, metrics: Metrics) -> None:
        registry = metrics.registry
        self._step_tokens = Histogram(
            names.METRIC_STEP_TOKENS, "Tokens that a step computes.", buckets=COUNT_BUCKETS, registry=registry
        )
        self._step_sequences = Histogram(
            names.METRIC_STEP_SEQUENCES, "Sequences in a step.", buckets=COUNT_BUCKETS, registry=registry
        )
        self._step_time = Histogram(
            names.METRIC_STEP_TIME,
            "From the sending of a step, or the answer to the one before it, to its answer.",
            buckets=STEP_BUCKETS,
            registry=registry,
        )
        parts = Histogram(
            names.METRIC_STEP_PARTS,
            "Parts of a step: waiting for the device, prepare, forward pass, sampling, and the way between processes.",
            ("part",),
            buckets=STEP_BUCKETS,
            registry=registry,
        )
        self._parts = [parts.labels(part=part) for part in (*names.STEP_PARTS, "rpc")]


class _CoreCollector(Collector):
    """Reads the scheduler's core when Prometheus asks, on the exporter's thread: plain integers, none of which has
    to agree with another to the last unit."""

    def __init__(self, schedulers: Callable[[], Sequence[Scheduler]], is_healthy: Callable[[], bool]) -> None:
        self._schedulers = schedulers
        self._is_healthy = is_healthy

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client."""
        yield GaugeMetricFamily(names.METRIC_READY, "Whether requests are served.", float(self._is_healthy()))
        cores = self._schedulers()
        if not cores:
            return
        sequences = GaugeMetricFamily(names.METRIC_SEQUENCES, "Sequences that live, by state.", labels=("state",))
        sequences.add_metric(("running",), sum(core.num_running for core in cores))
        sequences.add_metric(("waiting",), sum(core.num_waiting for core in cores))
        yield sequences
        blocks = GaugeMetricFamily(names.METRIC_BLOCKS, "Blocks of the KV cache, by state.", labels=("state",))
        num_free, num_cached = (
            sum(core.num_free_blocks for core in cores),
            sum(core.num_cached_blocks for core in cores),
        )
        blocks.add_metric(("used",), sum(core.config.num_blocks for core in cores) - num_free)
        blocks.add_metric(("cached",), num_cached)
        blocks.add_metric(("free",), num_free - num_cached)
        yield blocks
        slots = GaugeMetricFamily(
            names.METRIC_SLOTS, "Places for tokens in the blocks that sequences hold, by state.", labels=("state",)
        )
        num_taken, num_slots = map(sum, zip(*(core.num_slots for core in cores), strict=True))
        slots.add_metric(("taken",), num_taken)
        slots.add_metric(("empty",), max(0, num_slots - num_taken))
        yield slots
        for name, text, gauge in _GAUGES:
            yield GaugeMetricFamily(name, text, sum(map(gauge, cores)))
        for name, text, counter in _COUNTERS:
            yield CounterMetricFamily(name.removesuffix("_total"), text, sum(counter(core.stats) for core in cores))
