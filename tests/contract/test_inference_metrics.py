"""What Prometheus is told of a scheduler that serves."""

import asyncio
import urllib.request

import pytest
from opentelemetry.sdk.trace import TracerProvider
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from scheduler_service.engine.tenants import TenantRules
from stepwire.telemetry import names
from stepwire.telemetry.metrics import exemplar
from stepwire.v1 import inference_pb2 as pb
from tests.support.scheduler_server import MODEL, RunningScheduler, running_scheduler, until


async def scrape(scheduler: RunningScheduler) -> dict[str, list[Sample]]:
    """The samples by name, as an HTTP client gets them that understands OpenMetrics."""
    port = scheduler.metrics.serve("127.0.0.1", 0)
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"}
    )
    text = await asyncio.to_thread(lambda: urllib.request.urlopen(request, timeout=5).read().decode())
    samples: dict[str, list[Sample]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append(sample)
    return samples


def value(samples: dict[str, list[Sample]], name: str, **labels: str) -> float:
    matching = [s.value for s in samples[name] if labels.items() <= s.labels.items()]
    assert len(matching) == 1, (name, labels, samples[name])
    return float(matching[0])


async def test_requests_steps_and_blocks_are_counted() -> None:
    async with running_scheduler(tenants=TenantRules(weights={"gold": 2.0})) as scheduler:
        for tenant, count in (("gold", 5), ("someone", 3)):
            call = scheduler.stub.Generate(
                pb.GenerateRequest(token_ids=pb.TokenIds(ids=[7, 8, 9]), sampling=pb.SamplingParams(max_tokens=count)),
                metadata=(("stepwire-tenant", tenant),),
                timeout=10,
            )
            async for _ in call:
                pass
        assert (await scheduler.error_of(text="")).reason == "PROMPT_EMPTY"
        await until(lambda: scheduler.engine.model_info().num_running == 0)
        samples = await scrape(scheduler)
    assert value(samples, names.METRIC_REQUESTS, finish_reason="length", tenant="gold") == 1
    # Tenants that are not configured are one: strangers must not make series.
    assert value(samples, names.METRIC_OUTPUT_TOKENS, tenant="other") == 3
    assert value(samples, names.METRIC_PROMPT_TOKENS, tenant="gold") == 3
    assert value(samples, names.METRIC_REQUESTS_REFUSED, reason="PROMPT_EMPTY") == 1
    common = {"gen_ai_request_model": MODEL, "gen_ai_operation_name": "text_completion"}
    for name in (names.METRIC_TIME_TO_FIRST_TOKEN, names.METRIC_TIME_PER_OUTPUT_TOKEN):
        assert value(samples, f"{name}_count", **common) == 2
    assert value(samples, f"{names.METRIC_REQUEST_DURATION}_count", **common, error_type="PROMPT_EMPTY") == 1
    num_steps = value(samples, names.METRIC_STEPS)
    assert value(samples, f"{names.METRIC_STEP_TIME}_count") == num_steps >= 8
    parts = {sample.labels["part"] for sample in samples[f"{names.METRIC_STEP_PARTS}_sum"]}
    assert parts == {"device_wait", "prepare", "forward", "sample", "rpc"}
    assert value(samples, f"{names.METRIC_ADMISSION_TIME}_count") == 2
    assert value(samples, f"{names.METRIC_QUEUE_TIME}_count", tenant="gold") == 1
    assert value(samples, names.METRIC_QUEUED_TOKENS) == 0
    assert value(samples, names.METRIC_DEADLINES, outcome="met") == 2
    blocks = sum(sample.value for sample in samples[names.METRIC_BLOCKS])
    assert blocks == scheduler.engine.model_info().num_blocks
    assert value(samples, names.METRIC_READY) == 1


async def test_what_whole_blocks_cost_and_what_waits_is_told_while_requests_run() -> None:
    async with running_scheduler() as scheduler:
        scheduler.worker.gate.clear()
        calls = []
        for length in (20, 300):
            ids = pb.TokenIds(ids=list(range(10, 10 + length)))
            calls.append(scheduler.stub.Generate(pb.GenerateRequest(token_ids=ids), timeout=10))
            assert (await calls[-1].read()).HasField("started")
        await until(lambda: scheduler.engine.model_info().num_running == 1)
        samples = await scrape(scheduler)
        for call in calls:
            call.cancel()
        scheduler.worker.gate.set()
    taken, empty = (value(samples, names.METRIC_SLOTS, state=state) for state in ("taken", "empty"))
    assert (taken + empty) % 16 == 0 and taken >= 20 and empty > 0
    assert value(samples, names.METRIC_QUEUED_TOKENS) == 300


async def test_a_cancelled_request_is_counted_by_its_reason() -> None:
    async with running_scheduler() as scheduler:
        call = scheduler.stub.Generate(
            pb.GenerateRequest(token_ids=pb.TokenIds(ids=[7]), sampling=pb.SamplingParams(max_tokens=400)), timeout=10
        )
        await call.read()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call.read()
        await until(lambda: scheduler.engine.model_info().num_running == 0)
        samples = await scrape(scheduler)
    assert value(samples, names.METRIC_REQUESTS, finish_reason="CANCELLED", tenant="other") == 1


async def test_observations_link_to_their_traces() -> None:
    async with running_scheduler(tracer_provider=TracerProvider()) as scheduler:
        await scheduler.generate(token_ids=pb.TokenIds(ids=[7]), sampling=pb.SamplingParams(max_tokens=2))
        await until(lambda: scheduler.engine.model_info().num_running == 0)
        samples = await scrape(scheduler)
    linked = [s.exemplar for s in samples[f"{names.METRIC_REQUEST_DURATION}_bucket"] if s.exemplar is not None]
    assert linked
    assert set(linked[0].labels) == {"trace_id", "span_id"}


def test_an_exemplar_is_the_trace_of_a_sampled_request() -> None:
    assert exemplar("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01") == {
        "trace_id": "0af7651916cd43dd8448eb211c80319c",
        "span_id": "b7ad6b7169203331",
    }
    assert exemplar("") is None
