"""What Prometheus is told of a worker."""

import asyncio
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

from stepwire.telemetry import names
from tests.support.worker_server import RunningWorker, first_step, new_sequence, running_worker


async def scrape(running: RunningWorker) -> dict[tuple[str, str], float]:
    """Values by name and the value of the one label, if there is any."""
    port = running.worker.metrics.serve("127.0.0.1", 0)
    url = f"http://127.0.0.1:{port}/metrics"
    text = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=5).read().decode())
    return {
        (sample.name, "".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_phase_memory_and_steps_are_told() -> None:
    async with running_worker() as running:
        before = await scrape(running)
        assert before[(names.METRIC_WORKER_PHASE, "starting")] == 1
        assert before[(names.METRIC_WORKER_MEMORY, "weights")] == 0
        await running.walk_to_ready()
        stream = await running.open_stream()
        await stream.execute(first_step(1, new_sequence(1, [5, 6])))
        after = await scrape(running)
        status = await running.status()
    assert after[(names.METRIC_WORKER_PHASE, "ready")] == 1
    assert after[(names.METRIC_WORKER_PHASE, "starting")] == 0
    assert after[(names.METRIC_WORKER_EPOCH, "")] == status.epoch == 1
    assert after[(names.METRIC_WORKER_MEMORY, "weights")] > 0
    assert after[(names.METRIC_WORKER_MEMORY, "kv_cache")] > 0
    assert after[(names.METRIC_WORKER_SEQUENCES, "")] == 1
    assert after[(names.METRIC_WORKER_ALLOCATOR, "reserved")] == 400
    assert after[(names.METRIC_WORKER_ALLOCATOR, "used")] == 300
    phases = {phase: value for (name, phase), value in after.items() if name == names.METRIC_WORKER_LOAD_PHASES}
    assert phases == {"map": 0.003, "read": 0.004}
    assert after[(names.METRIC_WORKER_LOAD_TIME, "")] == 0.007
    for part in ("device_wait", "prepare", "forward", "sample"):
        assert after[(f"{names.METRIC_WORKER_STEP_PARTS}_count", part)] == 1
