"""What processes `stepwire serve` is to start: the settings of each, checked against the models and the devices."""

import contextlib
import os
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel

from loader.sources.resolve import resolve
from scheduler_service.engine.preflight import check_before_start, wish_of
from scheduler_service.engine.shares import Share, check_shares
from scheduler_service.model_settings import OWN_FIELDS, ModelSettings
from scheduler_service.settings import SchedulerSettings
from stepwire.cli.checks.devices import usable_cores
from stepwire.cli.checks.memory import read_memory
from stepwire.cli.field_specs import field_specs
from stepwire.cli.model_entries import entry_text
from stepwire.cli.settings_groups import GROUPS
from stepwire.cli.settings_options import CONFIG_VARIABLE, Settings
from stepwire.placement.place import Place
from stepwire.rpc.errors import StepwireError
from stepwire.supervisor.child import ChildSpec
from stepwire.supervisor.ports import free_port, free_ports
from stepwire.supervisor.settings import SupervisorSettings
from worker_service.settings import WorkerSettings

Model = TypeVar("Model", bound=ModelSettings)
T = TypeVar("T")

LOOPBACK = "127.0.0.1"
_MAX_RANKS = 1024


@contextlib.contextmanager
def located(settings: Settings, *, report: Callable[[str], None]) -> Iterator[Sequence[Mapping[str, object]]]:
    """Where each model lies on this machine, brought here first if need be, and its name, as settings. Raises
    CheckpointError."""
    with contextlib.ExitStack() as held:
        found: list[dict[str, object]] = []
        for model in settings.each_model:
            fixed: dict[str, object] = {}
            found.append(fixed)
            if not model.raw("model"):
                # That it is missing is for the settings' own check to say.
                continue
            resolved = held.enter_context(resolve(str(model.raw("model")), report=report))
            fixed["model"] = str(resolved.path)
            if resolved.name is not None and model.raw("served_model_name") is None:
                fixed["served_model_name"] = resolved.name
        yield found


Planned = tuple[SchedulerSettings, list[WorkerSettings], SupervisorSettings]
"""The settings of the scheduler, of the workers, and of their supervisor."""


def plan(
    settings: Settings, found: Sequence[Mapping[str, object]] = (), *, places: Sequence[Place] | None = None
) -> Planned:
    """The settings of each process, of one worker a rank, model by model. Free ports are chosen here, so that all can
    start at once.

    `found` is what `located` answers. Workers are on this machine, unless their `places` are given.
    """
    supervisor = settings.build(SupervisorSettings)
    # Only these processes need it, and without one any user of this machine could command the worker.
    key = settings.raw("cluster_key") or secrets.token_urlsafe(32)
    total = sum(map(num_ranks, settings.each_model))
    if places is None:
        places = [Place(LOOPBACK, port) for port in free_ports(total, LOOPBACK)]
    scheduler = scheduler_settings(settings, at_places(settings, places, found), cluster_key=key)
    chosen = {"port": scheduler.port or free_port(scheduler.host), "models": list(map(_absolute, scheduler.models))}
    scheduler = _absolute(scheduler).model_copy(update=chosen)
    workers: list[WorkerSettings] = []
    for model, entry in zip(scheduler.all_models, settings.each_model, strict=True):
        first, count = len(workers), len(model.workers)
        own = places[first : first + count]
        workers += worker_settings(entry, model, scheduler, own, first=first, num_others=total - count)
    return scheduler, workers, supervisor


def imagined_places(settings: Settings) -> list[Place]:
    """Places on this machine for as many workers as are asked for, to check settings by: none is looked for."""
    return [Place(LOOPBACK, 1 + number) for number in range(sum(map(num_ranks, settings.each_model)))]


def at_places(
    settings: Settings, places: Iterable[Place], found: Sequence[Mapping[str, object]] = ()
) -> list[Mapping[str, object]]:
    """What is fixed of each model: what was `found`, and its workers at the next of these places."""
    left = iter(places)
    fixed: list[Mapping[str, object]] = []
    for number, entry in enumerate(settings.each_model):
        workers = [next(left).address for _ in range(num_ranks(entry))]
        fixed.append({**(found[number] if found else {}), "workers": workers})
    return fixed


def scheduler_settings(
    settings: Settings, of_models: Sequence[Mapping[str, object]], **fixed: object
) -> SchedulerSettings:
    """The scheduler's settings, of whose models `of_models` holds what is fixed of each."""
    entries = settings.each_model
    if entries[0] is settings:
        return settings.build(SchedulerSettings, **{**of_models[0], **fixed})
    models = [entry.build(ModelSettings, **own) for entry, own in zip(entries, of_models, strict=True)]
    return settings.build(SchedulerSettings, models=models, **fixed)


def by_model(models: Iterable[ModelSettings], workers: Iterable[T]) -> Iterator[tuple[ModelSettings, list[T]]]:
    """Each model with its own of the workers, or of something of each of them, which come model by model."""
    left = iter(workers)
    for model in models:
        yield model, [next(left) for _ in model.workers]


def num_ranks(settings: Settings) -> int:
    """How many workers are asked for; 1 for numbers that are none, of which the settings' own check will tell."""
    try:
        return max(1, min(_MAX_RANKS, prod(int(str(settings.raw(name))) for name in ("replicas", "tp", "pp"))))
    except ValueError:
        return 1


def worker_settings(
    settings: Settings,
    model: ModelSettings,
    scheduler: SchedulerSettings,
    places: Sequence[Place],
    *,
    first: int,
    num_others: int,
) -> list[WorkerSettings]:
    """The settings of a model's workers: `first` is the number of the first among all workers, of which other models
    have `num_others`."""
    return [
        worker_at(settings, model, scheduler, rank, places, first=first, num_others=num_others)
        for rank in range(len(places))
    ]


def worker_at(
    settings: Settings,
    model: ModelSettings,
    scheduler: SchedulerSettings,
    rank: int,
    places: Sequence[Place],
    *,
    first: int = 0,
    num_others: int = 0,
) -> WorkerSettings:
    """The settings of the worker of a rank at its place of all places of its model."""
    place, count = places[rank], len(places)
    # The workers' metrics are on the ports above the scheduler's.
    metrics_port = scheduler.metrics_port + 1 + first + rank if scheduler.metrics_port else scheduler.metrics_port
    fixed: dict[str, object] = {
        "host": place.host,
        "port": place.port,
        "cluster_key": scheduler.cluster_key,
        "metrics_port": metrics_port,
        "local_ranks": sum(other.node == place.node for other in places),
        # For models that the scheduler is told of: it commands these workers, and looks at its own roots.
        "model_roots": [],
    }
    if place.node:
        fixed["collective_interface"] = place.host
        fixed["model_roots"] = _roots(model, scheduler)
    elif count > 1 and settings.raw("device") == "cuda":
        fixed["device"] = f"cuda:{rank}"
    if (
        num_others
        and not place.node
        and settings.raw("device") == "cpu"
        and settings.origin("threads").kind == "default"
    ):
        cores, quota = usable_cores()
        fixed["threads"] = max(1, int(cores if quota is None else min(cores, quota)) // (count + num_others))
    if model.adapter and settings.origin("adapter_slots").kind == "default":
        fixed["adapter_slots"] = len(model.adapters)
    return settings.build(WorkerSettings, **fixed)


def _roots(model: ModelSettings, scheduler: SchedulerSettings) -> list[str]:
    """What workers off this machine may load: what the scheduler will name, and the files that its links lead to."""
    named = [model.model, *model.adapters.values()]
    folders = [folder for path in named if (folder := Path(path)).is_dir()]
    linked = [str(file.resolve()) for folder in folders for file in folder.iterdir() if file.is_symlink()]
    return [*named, *linked, *scheduler.adapter_roots]


def check_models(
    models: Sequence[ModelSettings],
    workers: Sequence[WorkerSettings],
    others: Sequence[Share] = (),
    *,
    are_here: bool = True,
) -> None:
    """Holds checkpoints against settings and, of several models, their shares and those of `others` against devices.

    Of workers that are not to be on this machine the devices are known when they are there, and held against then.
    Raises StepwireError naming what is wrong, and who holds what. Blocks on files.
    """
    groups = list(by_model(models, workers))
    shares = [share for model, own in groups for share in shares_of(model, own)]
    is_one = len(models) == 1 and not others
    for model, own in groups:
        wish = replace(wish_of(model), kv_cache_bytes=own[0].kv_cache_bytes)
        total = _total_bytes(own[0].device)
        if are_here and not is_one and total is not None and not model.fit_max_model_len:
            part = next(share.part for share in shares if share.model == model.name)
            wish = replace(wish, memory_bytes=max(1, int(part * total)))
        try:
            check_before_start(model.path, wish)
        except StepwireError as error:
            if is_one:
                raise
            raise replace(error, message=f"{model.name}: {error.message}") from error
    # What is wrong with one by itself first: memory is no matter of a model that is not there.
    if are_here:
        check_shares([*others, *shares])


def shares_of(model: ModelSettings, workers: Sequence[WorkerSettings]) -> Iterator[Share]:
    """What each worker may use; nothing of a simulated device, which each has for itself."""
    for address, worker in zip(model.workers, workers, strict=True):
        if worker.device == "sim":
            continue
        total, limit = _total_bytes(worker.device), worker.memory_limit_bytes
        part, setting = worker.memory_fraction, f"memory_fraction {worker.memory_fraction:g}"
        if worker.device == "cpu":
            part /= worker.local_ranks
        if total is not None and limit is not None and limit / total < part:
            part, setting = limit / total, f"memory_limit_bytes {limit} of {total}"
        device = "cuda:0" if worker.device == "cuda" else worker.device
        yield Share(model.name, address, f"{device} of this machine", part, setting)


def _total_bytes(device: str) -> int | None:
    """The memory of a device, as far as that is told without its driver."""
    memory = read_memory() if device == "cpu" else None
    return None if memory is None else min(memory.total, memory.limit or memory.total)


def log_path(folder: Path, number: int, scheduler: SchedulerSettings) -> Path:
    """The log file of the worker of a number."""
    return folder / f"worker-{number}.{scheduler.port}.log"


def child_spec(name: str, command: str, values: BaseModel, log_path: Path | None = None) -> ChildSpec:
    """How to start one service with just these settings, whatever the environment says."""
    arguments: list[str] = []
    environment = without_settings(os.environ)
    models = values.models if isinstance(values, SchedulerSettings) else []
    for spec in field_specs(type(values)).values():
        value = getattr(values, spec.name)
        if value == spec.default or (models and spec.name in OWN_FIELDS):
            continue
        if spec.name == "models":
            arguments += [f"{spec.flag}={entry_text(_entry(model, values))}" for model in models]
        elif spec.secret:
            # A command line can be read by every user of the machine.
            environment[spec.variable] = str(value)
        elif isinstance(value, bool):
            arguments.append(spec.flag if value else f"--no-{spec.flag[2:]}")
        else:
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            arguments.append(f"{spec.flag}={text}")
    return ChildSpec(name, (sys.executable, "-m", "stepwire.cli.main", command, *arguments), environment, log_path)


def _entry(model: ModelSettings, common: BaseModel) -> dict[str, object]:
    """What a model has for itself, and not in common with the others."""
    entry: dict[str, object] = {}
    for name, info in ModelSettings.model_fields.items():
        value, other = getattr(model, name), info.default if name in OWN_FIELDS else getattr(common, name)
        if value != other and value is not None:
            entry[name] = str(value).lower() if isinstance(value, bool) else value
    return entry


def _absolute(model: Model) -> Model:
    """Relative paths mean the same to every process."""
    return model.model_copy(update={"model": str(Path(model.model).expanduser().absolute())})


def without_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment less every variable that is a setting."""
    settings = settings_variables()
    return {name: value for name, value in environ.items() if name not in settings}


def settings_variables() -> set[str]:
    """Every variable that is a setting of a service."""
    return {spec.variable for group in GROUPS.values() for spec in group.specs.values()} | {CONFIG_VARIABLE}
