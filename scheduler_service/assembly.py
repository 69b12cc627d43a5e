"""Makes worker groups ready, each for one replica, by the settings of the scheduler."""

from collections.abc import Sequence
from dataclasses import dataclass

from opentelemetry.trace import Tracer

from scheduler_service.core.config import SchedulerConfig
from scheduler_service.engine.adapters import Adapters
from scheduler_service.engine.flight import FlightFacts, FlightRecorder
from scheduler_service.engine.recovery import LifePlan
from scheduler_service.engine.start import GroupStarter, StartedGroup, StartPlan
from scheduler_service.engine.supervision import Supervision
from scheduler_service.rpc.flight_log import FlightLog
from scheduler_service.rpc.worker_client import WorkerClient
from scheduler_service.settings import SchedulerSettings
from stepwire.rpc.errors import StepwireError


@dataclass(frozen=True, slots=True)
class Assembled:
    """A group that is ready, and how it is to be driven and kept going."""

    started: StartedGroup
    config: SchedulerConfig
    life: LifePlan


class Assembly:
    """Brings the workers of replicas to readiness. `plan` says for what; `close` ends the connections."""

    def __init__(
        self,
        settings: SchedulerSettings,
        plan: StartPlan,
        tracer: Tracer,
        supervision: Supervision,
        adapters: Adapters,
    ) -> None:
        self._settings = settings
        self._plan = plan
        self._tracer = tracer
        self._supervision = supervision
        self._adapters = adapters
        self._clients: list[WorkerClient] = []

    async def start(self, addresses: Sequence[str]) -> Assembled:
        """Walks workers through all phases. Raises StepwireError."""
        settings, num_ranks = self._settings, self._settings.tp * self._settings.pp
        if len(addresses) != num_ranks:
            text = f"{len(addresses)} workers are named; a replica has tp x pp = {num_ranks}"
            raise StepwireError("FIELD_INVALID", text, {"field": "workers"})
        clients = [WorkerClient(address, key=settings.cluster_key, tracer=self._tracer) for address in addresses]
        self._clients += clients
        starter = GroupStarter(clients, self._plan, self._tracer, supervision=self._supervision)
        starter.hooks.append(lambda ports: self._adapters.add_all(ports, starter.epoch))
        started = await starter.start()
        flight = FlightRecorder(settings.flight_steps, FlightFacts.of(self._plan, started))
        flight.adapters = self._adapters.infos
        life = LifePlan(
            starter,
            settings.step_timeout,
            settings.restart_budget,
            flight=flight,
            observers=[FlightLog(flight, settings.flight_dir)],
        )
        return Assembled(started, self._config(started), life)

    async def close(self) -> None:
        """Closes the connections to all workers."""
        for client in self._clients:
            await client.close()

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
            tenant_weights=settings.tenant_rules.weights,
            max_running_adapters=started.summary.num_adapter_slots or None,
        )
