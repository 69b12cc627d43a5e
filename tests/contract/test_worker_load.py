"""What a load tells of itself over real gRPC: its phases, in the last message and in the trace."""

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from structlog.testing import capture_logs

from tests.support.fake_runtime import LOAD_BEGIN_UNIX_NS
from tests.support.worker_server import running_worker


async def test_the_last_message_says_what_the_time_went_to() -> None:
    async with running_worker() as worker:
        await worker.init_device()
        with capture_logs() as lines:
            summary = (await worker.load_model())[-1].summary
        assert [(phase.name, phase.duration_ns, phase.byte_count) for phase in summary.phases] == [
            ("map", 1_000_000, 0),
            ("read", 4_000_000, 1000),
            ("map", 2_000_000, 1024),
        ]
        assert sum(phase.duration_ns for phase in summary.phases) == summary.duration_ns
        assert summary.mapped_bytes == 1024
    (line,) = [line for line in lines if line["event"] == "model_loaded"]
    assert line["phases"] == {"map": 0.003, "read": 0.004} and line["mapped_bytes"] == 1024


async def test_phases_are_spans_below_the_call_one_after_the_other() -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    async with running_worker(tracer_provider=provider) as worker:
        await worker.init_device()
        await worker.load_model()
        # A repeat loads nothing, so there is nothing to show.
        await worker.load_model()
    spans = exporter.get_finished_spans()
    calls = [span for span in spans if span.name.endswith("/LoadModel")]
    phases = [span for span in spans if span.name.startswith("load.")]
    assert [span.name for span in phases] == ["load.map", "load.read", "load.map"]
    assert {span.parent.span_id for span in phases if span.parent} == {calls[0].context.span_id}
    assert phases[0].start_time == LOAD_BEGIN_UNIX_NS
    assert [span.end_time for span in phases[:-1]] == [span.start_time for span in phases[1:]]
    assert [span.attributes["stepwire.num_bytes"] for span in phases if span.attributes] == [0, 1000, 1024]
    provider.shutdown()
