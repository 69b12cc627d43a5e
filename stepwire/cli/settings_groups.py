"""Which settings each command takes."""

from collections.abc import Mapping, Sequence

from pydantic import BaseModel

from scheduler_service.model_settings import ModelSettings
from scheduler_service.settings import SchedulerSettings
from stepwire.cli.field_specs import FieldSpec, field_specs
from stepwire.supervisor.settings import SupervisorSettings
from worker_service.settings import WorkerSettings


class SettingsGroup:
    """The settings that one command takes: fields of one or more models, in one flat name space.

    A field that several models have is one setting, described as the first of them describes it. `of_each_model` are
    those that each of several served models may have for itself.
    """

    def __init__(
        self, name: str, fields: Mapping[type[BaseModel], Sequence[str]], *, of_each_model: Sequence[str] = ()
    ) -> None:
        self.name = name
        self.of_each_model = frozenset(of_each_model)
        self.specs: dict[str, FieldSpec] = {}
        for model, names in fields.items():
            specs = field_specs(model)
            for field in names:
                self.specs.setdefault(field, specs[field])


SCHEDULER = SettingsGroup(
    "scheduler",
    {SchedulerSettings: list(SchedulerSettings.model_fields)},
    of_each_model=list(ModelSettings.model_fields),
)
WORKER = SettingsGroup("worker", {WorkerSettings: list(WorkerSettings.model_fields)})
# What `serve` passes on to workers.
_OF_WORKERS = (
    "device",
    "threads",
    "native_kernels",
    "cuda_graphs",
    "memory_fraction",
    "memory_limit_bytes",
    "kv_cache_bytes",
    "collective_timeout",
    "restart_store",
    "restart_store_bytes",
    *("adapter_slots", "max_adapter_rank", "adapter_host_bytes"),
    *("sim_compute_flops", "sim_bandwidth_bytes", "sim_latency_s", "sim_memory_bytes", "sim_fatal_token"),
)
# `serve` finds ports and addresses for its workers itself.
SERVE = SettingsGroup(
    "serve",
    {
        SchedulerSettings: [name for name in SchedulerSettings.model_fields if name != "workers"],
        WorkerSettings: _OF_WORKERS,
        SupervisorSettings: list(SupervisorSettings.model_fields),
    },
    of_each_model=[*(name for name in ModelSettings.model_fields if name != "workers"), *_OF_WORKERS],
)
GROUPS: Mapping[str, SettingsGroup] = {group.name: group for group in (SERVE, SCHEDULER, WORKER)}
