"""What a worker tells Prometheus: where it stands, what it holds, and where its steps' time goes."""

from collections.abc import Callable, Iterator

from prometheus_client import Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from stepwire.telemetry import names
from stepwire.telemetry.metrics import STEP_BUCKETS, Metrics
from worker_service.rpc.ports import Runtime
from worker_service.rpc.state import WorkerState
from worker_service.runtime.report import AllocatorReport, CollectiveCost, LoadSummary, Phase
from worker_service.runtime.step import StepOutput


class WorkerMetrics:
    """Metrics of one worker. `state` and `runtime` are read when Prometheus asks."""

    def __init__(self, metrics: Metrics, state: WorkerState, runtime: Callable[[], Runtime | None]) -> None:
        parts = Histogram(
            names.METRIC_WORKER_STEP_PARTS,
            "Parts of a step in the worker: waiting for the device, prepare, forward pass and sampling.",
            ("part",),
            buckets=STEP_BUCKETS,
            registry=metrics.registry,
        )
        self._parts = [parts.labels(part=part) for part in names.STEP_PARTS]
        metrics.registry.register(_StateCollector(state, runtime))

    def step_answered(self, output: StepOutput, queue_ns: int) -> None:
        """Measures a step that waited `queue_ns` for the device."""
        durations = (queue_ns, output.prepare_ns, output.forward_ns, output.sample_ns)
        for part, duration_ns in zip(self._parts, durations, strict=True):
            part.observe(duration_ns / 1e9)


class _StateCollector(Collector):
    """Reads what the worker knows of itself, on the exporter's thread."""

    def __init__(self, state: WorkerState, runtime: Callable[[], Runtime | None]) -> None:
        self._state = state
        self._runtime = runtime

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client."""
        state, runtime = self._state, self._runtime()
        phases = GaugeMetricFamily(
            names.METRIC_WORKER_PHASE, "1 for the phase that the worker is in.", labels=("phase",)
        )
        for phase in Phase:
            phases.add_metric((phase.name.lower(),), float(state.phase is phase))
        yield phases
        yield GaugeMetricFamily(names.METRIC_WORKER_EPOCH, "The epoch that the worker is in.", state.epoch)
        rank = 0 if state.place is None else state.place.rank
        yield GaugeMetricFamily(names.METRIC_WORKER_RANK, "The worker's rank in its group.", rank)
        yield GaugeMetricFamily(
            names.METRIC_WORKER_SEQUENCES,
            "Sequences that the worker knows.",
            0 if runtime is None else runtime.num_sequences,
        )
        cost = CollectiveCost() if runtime is None else runtime.collective_cost
        yield CounterMetricFamily(
            names.METRIC_WORKER_COLLECTIVE_TIME,
            "Time in collectives with other ranks, waiting for them included, in seconds.",
            cost.duration_ns / 1e9,
        )
        yield CounterMetricFamily(
            names.METRIC_WORKER_COLLECTIVE_BYTES, "Bytes put into collectives with other ranks.", cost.num_bytes
        )
        memory = GaugeMetricFamily(names.METRIC_WORKER_MEMORY, "Bytes of the device's memory, by use.", labels=("use",))
        loaded, cached, measured = state.loaded, state.cached, state.measured
        memory.add_metric(("weights",), 0 if loaded is None else loaded.summary.weight_bytes)
        memory.add_metric(("kv_cache",), 0 if cached is None else cached.cache_bytes)
        memory.add_metric(("activations",), 0 if measured is None else measured.report.activation_bytes)
        memory.add_metric(("limit",), 0 if measured is None else measured.report.limit_bytes)
        yield memory
        allocator = GaugeMetricFamily(
            names.METRIC_WORKER_ALLOCATOR,
            "Bytes that the device's allocator has taken from the system, and those of them that are in use.",
            labels=("state",),
        )
        report = AllocatorReport() if runtime is None else runtime.allocator
        allocator.add_metric(("reserved",), report.reserved_bytes)
        allocator.add_metric(("used",), report.used_bytes)
        yield allocator
        if loaded is not None:
            yield from _load_times(loaded.summary)


def _load_times(summary: LoadSummary) -> Iterator[Metric]:
    seconds = summary.duration_ns / 1e9
    yield GaugeMetricFamily(names.METRIC_WORKER_LOAD_TIME, "How long the last load took, in seconds.", seconds)
    of_phases: dict[str, float] = {}
    for phase in summary.phases:
        of_phases[phase.name] = of_phases.get(phase.name, 0.0) + phase.duration_ns / 1e9
    phases = GaugeMetricFamily(
        names.METRIC_WORKER_LOAD_PHASES, "What the time of the last load went to, in seconds.", labels=("phase",)
    )
    for name, phase_s in of_phases.items():
        phases.add_metric((name,), phase_s)
    yield phases
