"""Makes worker groups ready, each for one replica of a model, by the settings of model and service."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from opentelemetry.trace import Tracer

from scheduler_service.core.config import SchedulerConfig
from scheduler_service.engine.adapters import Adapters
from scheduler_service.engine.flight import FlightFacts, FlightRecorder
from scheduler_service.engine.metrics import EngineMetricFamilies
from scheduler_service.engine.models import Models
from scheduler_service.engine.ports import Device, WorkerStatus
from scheduler_service.engine.ranks import Rank
from scheduler_service.engine.recovery import LifePlan
from scheduler_service.engine.shares import Share, Shares
from scheduler_service.engine.start import GroupStarter, StartedGroup, StartPlan
from scheduler_service.engine.supervision import Supervision
from scheduler_service.model_settings import ModelSettings
from scheduler_service.rpc.flight_log import FlightLog
from scheduler_service.rpc.worker_client import WorkerClient
from scheduler_service.settings import SchedulerSettings
from stepwire.rpc.errors import StepwireError

_RELEASE_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class ServiceParts:
    """What all models of a scheduler process share."""

    settings: SchedulerSettings
    tracer: Tracer
    metrics: EngineMetricFamilies
    supervision: Supervision
    shares: Shares
    models: Models


@dataclass(frozen=True, slots=True)
class Assembled:
    """A group that is ready, and how it is to be driven and kept going."""

    started: StartedGroup
    config: SchedulerConfig
    life: LifePlan


class Assembly:
    """Brings the workers of a model's replicas to readiness. `plan` says for what; `close` ends the connections."""

    def __init__(self, settings: ModelSettings, plan: StartPlan, parts: ServiceParts, adapters: Adapters) -> None:
        self._settings = settings
        self._plan = plan
        self._parts = parts
        self._adapters = adapters
        self._clients: list[WorkerClient] = []
        self._starters: list[GroupStarter] = []

    async def start(self, addresses: Sequence[str]) -> Assembled:
        """Walks workers through all phases. Raises StepwireError."""
        settings, service, tracer = self._settings, self._parts.settings, self._parts.tracer
        if len(addresses) != settings.num_ranks:
            text = f"{len(addresses)} workers are named; a replica has tp x pp = {settings.num_ranks}"
            raise StepwireError("FIELD_INVALID", text, {"field": "workers"})
        clients = [WorkerClient(address, key=service.cluster_key, tracer=tracer) for address in addresses]
        self._clients += clients
        starter = GroupStarter(clients, self._plan, tracer, supervision=self._parts.supervision)
        self._starters.append(starter)
        starter.on_device = self._take_share
        starter.on_found = self._check_free
        starter.hooks.append(lambda ports: self._adapters.add_all(ports, starter.epoch))
        started = await starter.start()
        flight = FlightRecorder(settings.flight_steps, FlightFacts.of(self._plan, started))
        flight.adapters = self._adapters.infos
        life = LifePlan(
            starter,
            settings.step_timeout,
            settings.restart_budget,
            flight=flight,
            observers=[FlightLog(flight, service.flight_dir)],
            model=settings.name,
        )
        return Assembled(started, self._config(started), life)

    async def release(self) -> None:
        """Has all workers forget the model, as far as they can be reached. Their replicas must be closed."""
        async with asyncio.timeout(_RELEASE_TIMEOUT_S):
            await asyncio.gather(*(starter.release() for starter in self._starters))

    async def close(self) -> None:
        """Closes the connections to all workers."""
        for client in self._clients:
            await client.close()

    def _check_free(self, rank: Rank, status: WorkerStatus) -> None:
        """Raises FIELD_INVALID for a worker that serves here already, under another address: it would be taken away."""
        if holder := self._parts.models.holder_of(status.scheduler_id):
            text = f"the worker at {rank.port.address} serves {holder} already, under another address; name others"
            raise StepwireError("FIELD_INVALID", text, {"field": "workers", "model": holder})

    def _take_share(self, rank: Rank, device: Device) -> None:
        if not device.device_id or not device.total_memory_bytes:
            return
        where, limit, total = f"{device.device_id} of {rank.host}", device.memory_limit_bytes, device.total_memory_bytes
        setting = f"{limit / 2**30:.2f} of {total / 2**30:.2f} GiB"
        self._parts.shares.take(Share(self._settings.name, rank.port.address, where, limit / total, setting))

    def _config(self, started: StartedGroup) -> SchedulerConfig:
        settings = self._settings
        return SchedulerConfig(
            num_blocks=started.num_blocks,
            block_size=settings.block_size,
            max_running=settings.max_num_seqs,
            max_step_tokens=settings.max_num_batched_tokens,
            prefix_caching=settings.prefix_caching,
            max_in_flight=settings.pp + 1,
            num_stages=settings.pp,
            max_queued_requests=settings.max_queued_requests,
            max_queued_tokens=settings.max_queued_tokens,
            ageing_s=settings.ageing_seconds,
            tenant_weights=self._parts.settings.tenant_rules.weights,
            max_running_adapters=started.summary.num_adapter_slots or None,
        )
