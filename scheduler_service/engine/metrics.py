"""What the scheduler counts and measures for Prometheus.

Labels are few and bounded: the models that are served, operations, reasons of our own, parts of a step, and the
tenants that are configured; all others are one. What the scheduler's core counts itself is read when it is asked for.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

from scheduler_service.core.plan import StepPlan
from scheduler_service.core.scheduler import Scheduler
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
_MODEL = "model"
_GEN_AI_MODEL = "gen_ai_request_model"
_Cores = Sequence[Scheduler]
# What is read of a model's cores together: the text of the metric, and its value by state; "" for the only one.
_GAUGES: Mapping[str, tuple[str, Mapping[str, Callable[[_Cores], int]]]] = {
    names.METRIC_SEQUENCES: (
        "Sequences that live, by state.",
        {
            "running": lambda cores: sum(core.num_running for core in cores),
            "waiting": lambda cores: sum(core.num_waiting for core in cores),
        },
    ),
    names.METRIC_BLOCKS: (
        "Blocks of the KV cache, by state.",
        {
            "used": lambda cores: sum(core.config.num_blocks - core.num_free_blocks for core in cores),
            "cached": lambda cores: sum(core.num_cached_blocks for core in cores),
            "free": lambda cores: sum(core.num_free_blocks - core.num_cached_blocks for core in cores),
        },
    ),
    names.METRIC_SLOTS: (
        "Places for tokens in the blocks that sequences hold, by state.",
        {
            "taken": lambda cores: sum(core.num_slots[0] for core in cores),
            "empty": lambda cores: max(0, sum(whole - taken for taken, whole in (core.num_slots for core in cores))),
        },
    ),
    names.METRIC_STEPS_IN_FLIGHT: (
        "Steps sent and not answered.",
        {"": lambda cores: sum(core.num_in_flight for core in cores)},
    ),
    names.METRIC_QUEUED_TOKENS: (
        "Tokens of the sequences that wait.",
        {"": lambda cores: sum(core.num_queued_tokens for core in cores)},
    ),
}
# What the core counts: the text of the metric, and the field of its stats.
_COUNTERS: Mapping[str, tuple[str, str]] = {
    names.METRIC_STEPS: ("Steps that were answered.", "num_steps"),
    names.METRIC_PREEMPTIONS: ("Preemptions.", "num_preemptions"),
    names.METRIC_HOPELESS: ("Requests ended early: their deadline could not be met.", "num_hopeless"),
    names.METRIC_PREFIX_QUERIES: ("Tokens looked up in the prefix cache.", "prefix_query_tokens"),
    names.METRIC_PREFIX_HITS: ("Tokens found in the prefix cache.", "prefix_hit_tokens"),
    names.METRIC_DRAFT_TOKENS: ("Tokens that were drafted and verified.", "num_draft_tokens"),
    names.METRIC_ACCEPTED_TOKENS: ("Draft tokens that were right.", "num_accepted_tokens"),
}


class EngineMetricFamilies:
    """The metrics of all models of a process. Every series names its model."""

    def __init__(self, metrics: Metrics) -> None:
        registry = metrics.registry
        self._make_request_metrics(registry)
        self._make_step_metrics(registry)
        self._make_epoch_metrics(registry)
        self.cores = _CoreCollector()
        registry.register(self.cores)

    def forget(self, model: str) -> None:
        """Drops the series of a model that is served no more."""
        self.cores.models.pop(model, None)
        by_convention = (self.duration, self.first_token, self.per_token)
        for family in vars(self).values():
            if isinstance(family, MetricWrapperBase):
                family.remove_by_labels({_GEN_AI_MODEL if family in by_convention else _MODEL: model})

    def _make_request_metrics(self, registry: CollectorRegistry) -> None:
        labels = ("gen_ai_provider_name", _GEN_AI_MODEL, "gen_ai_operation_name")
        self.duration = Histogram(
            names.METRIC_REQUEST_DURATION,
            "From the arrival of a request to its end.",
            (*labels, "error_type"),
            buckets=REQUEST_BUCKETS,
            registry=registry,
        )
        self.first_token = Histogram(
            names.METRIC_TIME_TO_FIRST_TOKEN,
            "From the arrival of a request to its first token.",
            labels,
            buckets=FIRST_TOKEN_BUCKETS,
            registry=registry,
        )
        self.per_token = Histogram(
            names.METRIC_TIME_PER_OUTPUT_TOKEN,
            "Mean time of a request's tokens after the first.",
            labels,
            buckets=TOKEN_BUCKETS,
            registry=registry,
        )
        self.admission_time = Histogram(
            names.METRIC_ADMISSION_TIME,
            "From the arrival of a request to its place in the queue: template, tokenizer, grammar.",
            (_MODEL,),
            buckets=FIRST_TOKEN_BUCKETS,
            registry=registry,
        )
        self.deadlines = Counter(
            names.METRIC_DEADLINES,
            "Requests with a deadline, by whether they met it.",
            (_MODEL, "outcome"),
            registry=registry,
        )
        self.queue_time = Histogram(
            names.METRIC_QUEUE_TIME,
            "From the arrival of a request to the first step with it.",
            (_MODEL, "tenant"),
            buckets=FIRST_TOKEN_BUCKETS,
            registry=registry,
        )
        self.requests = Counter(
            names.METRIC_REQUESTS,
            "Sequences that ended, by how; for a request that failed one, by its error's reason.",
            (_MODEL, "finish_reason", "tenant"),
            registry=registry,
        )
        self.refused = Counter(
            names.METRIC_REQUESTS_REFUSED,
            "Requests that were refused, by reason.",
            (_MODEL, "reason"),
            registry=registry,
        )
        self.prompt_tokens = Counter(
            names.METRIC_PROMPT_TOKENS, "Prompt tokens of ended requests.", (_MODEL, "tenant"), registry=registry
        )
        self.output_tokens = Counter(
            names.METRIC_OUTPUT_TOKENS, "Output tokens of ended requests.", (_MODEL, "tenant"), registry=registry
        )
        self.prompt_lengths = Histogram(
            names.METRIC_REQUEST_PROMPT_TOKENS,
            "Prompt tokens of a request.",
            (_MODEL,),
            buckets=COUNT_BUCKETS,
            registry=registry,
        )
        self.output_lengths = Histogram(
            names.METRIC_REQUEST_OUTPUT_TOKENS,
            "Output tokens of a request.",
            (_MODEL,),
            buckets=COUNT_BUCKETS,
            registry=registry,
        )

    def _make_epoch_metrics(self, registry: CollectorRegistry) -> None:
        self.epoch = Gauge(
            names.METRIC_EPOCH, "The last epoch of the worker group that began.", (_MODEL,), registry=registry
        )
        self.epoch_ends = Counter(
            names.METRIC_EPOCH_ENDS,
            "Epochs that ended, by how a worker was lost.",
            (_MODEL, "cause"),
            registry=registry,
        )
        self.recovery_time = Histogram(
            names.METRIC_RECOVERY_TIME,
            "From the end of an epoch to the beginning of the next.",
            (_MODEL,),
            buckets=REQUEST_BUCKETS,
            registry=registry,
        )

    def _make_step_metrics(self, registry: CollectorRegistry) -> None:
        self.step_tokens = Histogram(
            names.METRIC_STEP_TOKENS,
            "Tokens that a step computes.",
            (_MODEL,),
            buckets=COUNT_BUCKETS,
            registry=registry,
        )
        self.step_sequences = Histogram(
            names.METRIC_STEP_SEQUENCES, "Sequences in a step.", (_MODEL,), buckets=COUNT_BUCKETS, registry=registry
        )
        self.step_time = Histogram(
            names.METRIC_STEP_TIME,
            "From the sending of a step, or the answer to the one before it, to its answer.",
            (_MODEL,),
            buckets=STEP_BUCKETS,
            registry=registry,
        )
        self.step_parts = Histogram(
            names.METRIC_STEP_PARTS,
            "Parts of a step: waiting for the device, prepare, forward pass, sampling, and the way between processes.",
            (_MODEL, "part"),
            buckets=STEP_BUCKETS,
            registry=registry,
        )


class EngineMetrics:
    """Metrics of one served model. `schedulers` answers the cores of its replicas."""

    def __init__(
        self,
        families: EngineMetricFamilies,
        model: str,
        *,
        tenants: Iterable[str],
        schedulers: Callable[[], Sequence[Scheduler]],
        is_healthy: Callable[[], bool],
    ) -> None:
        self._families = families
        self._model = model
        self._tenants = frozenset(tenants)
        self._common = {"gen_ai_provider_name": names.PROVIDER_STEPWIRE, _GEN_AI_MODEL: model}
        # What every step observes is found once.
        self._step_tokens = families.step_tokens.labels(model)
        self._step_sequences = families.step_sequences.labels(model)
        self._step_time = families.step_time.labels(model)
        self._parts = [families.step_parts.labels(model, part) for part in (*names.STEP_PARTS, "rpc")]
        self._epoch = families.epoch.labels(model)
        self._recovery_time = families.recovery_time.labels(model)
        for kind in Kind:
            # A rate is seen from the first one on only if there was a 0 before it.
            families.epoch_ends.labels(model, kind.name.lower())
        self._admission_time = families.admission_time.labels(model)
        self._epoch_ended_at: float | None = None
        self._is_closed = False
        families.cores.models[model] = (schedulers, is_healthy)

    def close(self) -> None:
        """Drops the model's series; nothing is counted any more."""
        self._is_closed = True
        self._families.forget(self._model)

    def request_admitted(self, live: LiveRequest) -> None:
        """Measures what came before a request had its place in the queue."""
        if not self._is_closed:
            self._admission_time.observe(time.monotonic() - live.arrival, exemplar(live.request.trace))

    def request_ended(
        self, operation: str, arrival: float, live: LiveRequest | None, error: StepwireError | None
    ) -> None:
        """Counts a call that is over: `live` is None for one that was refused. `arrival` is monotonic, in seconds."""
        if self._is_closed:
            return
        families = self._families
        reason = "" if error is None else error.reason
        trace = None if live is None else exemplar(live.request.trace)
        labels = {**self._common, "gen_ai_operation_name": operation}
        families.duration.labels(**labels, error_type=reason).observe(time.monotonic() - arrival, trace)
        if live is None:
            families.refused.labels(self._model, reason).inc()
            return
        tenant = live.request.tenant if live.request.tenant in self._tenants else _OTHER_TENANTS
        for finish_reason in live.finish_reasons.values() if error is None else (reason,):
            families.requests.labels(self._model, str(getattr(finish_reason, "value", finish_reason)), tenant).inc()
        num_prompt, num_output = len(live.request.prompt_token_ids), live.num_output_tokens
        families.prompt_tokens.labels(self._model, tenant).inc(num_prompt)
        families.output_tokens.labels(self._model, tenant).inc(num_output)
        families.prompt_lengths.labels(self._model).observe(num_prompt)
        families.output_lengths.labels(self._model).observe(num_output)
        families.queue_time.labels(self._model, tenant).observe(live.queue_s, trace)
        if live.request.deadline is not None and reason in ("", "DEADLINE_EXCEEDED"):
            families.deadlines.labels(self._model, "missed" if reason else "met").inc()
        if live.first_token_at is None:
            return
        families.first_token.labels(**labels).observe(live.first_token_at - live.arrival, trace)
        if num_output > live.request.n:
            per_token = (time.monotonic() - live.first_token_at) / (num_output / live.request.n - 1)
            families.per_token.labels(**labels).observe(per_token, trace)

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
        self._families.epoch_ends.labels(self._model, end.root.kind.name.lower()).inc()


class _CoreCollector(Collector):
    """Reads the scheduler's core when Prometheus asks, on the exporter's thread: plain integers, none of which has
    to agree with another to the last unit."""

    def __init__(self) -> None:
        self.models: dict[str, tuple[Callable[[], Sequence[Scheduler]], Callable[[], bool]]] = {}
        """Of each model what answers its cores, and whether it serves."""

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client."""
        ready = GaugeMetricFamily(names.METRIC_READY, "Whether requests are served.", labels=(_MODEL,))
        of_models: dict[str, _Cores] = {}
        for model, (schedulers, is_healthy) in list(self.models.items()):
            ready.add_metric((model,), float(is_healthy()))
            if cores := schedulers():
                of_models[model] = cores
        yield ready
        for name, (text, states) in _GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=(_MODEL,) if "" in states else (_MODEL, "state"))
            for model, cores in of_models.items():
                for state, value in states.items():
                    gauge.add_metric((model, state) if state else (model,), value(cores))
            yield gauge
        for name, (text, field) in _COUNTERS.items():
            counter = CounterMetricFamily(name.removesuffix("_total"), text, labels=(_MODEL,))
            for model, cores in of_models.items():
                counter.add_metric((model,), sum(getattr(core.stats, field) for core in cores))
            yield counter
