"""A scheduler's service of several models in the test's event loop, on fake workers and tiny checkpoints."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loader.checkpoint import open_checkpoint
from scheduler_service.assembly import ServiceParts
from scheduler_service.engine.metrics import EngineMetricFamilies
from scheduler_service.engine.models import Models
from scheduler_service.engine.shares import Shares
from scheduler_service.engine.supervision import Supervision, Unsupervised
from scheduler_service.main import Health
from scheduler_service.model_services import ModelServices
from scheduler_service.rpc.admin.roots import Roots
from scheduler_service.rpc.admin.servicer import ADMIN_SERVICE_NAME, AdminServicer
from scheduler_service.rpc.servicer import SERVICE_NAME, InferenceServicer
from scheduler_service.settings import SchedulerSettings
from stepwire.rpc.channel import create_channel
from stepwire.rpc.server import add_standard_services, bind, create_server
from stepwire.telemetry.metrics import Metrics
from stepwire.telemetry.trace import get_tracer
from stepwire.v1 import admin_pb2_grpc, inference_pb2_grpc
from stepwire.v1.inference_pb2_grpc import InferenceServiceStub
from tests.support.fake_worker import FakeWorker, FakeWorkerServer, letter_ids
from tests.support.scheduler_server import ADMIN_KEY, Door
from tests.support.tiny_checkpoint import tiny_tokenizer


@dataclass
class SeveralModels(Door):
    """What a test needs of it. `workers` are by the names of their models, idle ones by another."""

    stub: Any
    address: str
    models: Models
    services: ModelServices
    workers: Mapping[str, FakeWorkerServer]
    metrics: Metrics
    health: Health

    def worker(self, name: str) -> FakeWorker:
        """A model's worker."""
        return self.workers[name].worker


@asynccontextmanager
async def several_models(
    checkpoint: Path,
    names: Sequence[str],
    *,
    idle: Sequence[str] = (),
    supervision: Supervision | None = None,
    prepare: Mapping[str, Mapping[str, Any]] | None = None,
    **settings: Any,
) -> AsyncIterator[SeveralModels]:
    """Serves one checkpoint under several names, each on a worker of its own; `idle` names more workers.

    `prepare` sets attributes of workers, by their models' names.
    """
    fingerprint, choices = open_checkpoint(checkpoint).fingerprint, letter_ids(tiny_tokenizer())
    workers = {
        name: FakeWorkerServer(FakeWorker(choices=choices, fingerprint=fingerprint, kv_bytes_per_token=64))
        for name in (*names, *idle)
    }
    async with AsyncExitStack() as ends:
        for server in workers.values():
            await server.start()
            ends.push_async_callback(server.kill)
        for name, attributes in (prepare or {}).items():
            for attribute, value in attributes.items():
                setattr(workers[name].worker, attribute, value)
        entries = [
            {"model": str(checkpoint), "served_model_name": name, "workers": [workers[name].address], **settings}
            for name in names
        ]
        metrics = Metrics()
        families = EngineMetricFamilies(metrics)
        models = Models(families)
        common = SchedulerSettings.model_validate({"models": entries, "flight_dir": "/nonexistent", **settings})
        parts = ServiceParts(common, get_tracer(None), families, supervision or Unsupervised(), Shares(), models)
        services = ModelServices(parts, models)
        keys = {ADMIN_SERVICE_NAME: ADMIN_KEY}
        service = create_server(tracer_provider=None, max_message_bytes=64 << 20, service_keys=keys)
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(InferenceServicer(models), service)
        roots = Roots("model_roots", (), "127.0.0.1")
        admin_pb2_grpc.add_AdminServiceServicer_to_server(AdminServicer(models, services, roots, roots), service)
        health = Health(models, add_standard_services(service, [SERVICE_NAME, *keys]))
        address = f"127.0.0.1:{bind(service, '127.0.0.1', 0)}"
        await service.start()
        ends.push_async_callback(services.close)
        ends.push_async_callback(service.stop, None)
        channel = await ends.enter_async_context(create_channel(address, max_message_bytes=64 << 20))
        await services.start()
        health.has_started = True
        await health.update()
        yield SeveralModels(InferenceServiceStub(channel), address, models, services, workers, metrics, health)
