"""The processes of `stepwire serve` as models come and go: what the scheduler asks of its supervisor."""

import asyncio
import traceback
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from scheduler_service.model_settings import ModelSettings
from scheduler_service.settings import SchedulerSettings
from stepwire.cli.errors import SettingsError
from stepwire.cli.serve_plan import (
    LOOPBACK,
    by_model,
    check_models,
    child_spec,
    log_path,
    num_ranks,
    shares_of,
    worker_settings,
)
from stepwire.cli.serve_ray import RayPlacement
from stepwire.cli.settings_options import Origin, Settings
from stepwire.placement.place import Place, PlacementError
from stepwire.rpc.errors import StepwireError
from stepwire.supervisor.child import ChildSpec
from stepwire.supervisor.line import Record
from stepwire.supervisor.ports import free_ports
from stepwire.supervisor.settings import SupervisorSettings
from stepwire.supervisor.supervisor import Supervisor
from worker_service.settings import WorkerSettings


class Fleet:
    """Which models have which workers, here or where `on_ray` places them. `report` takes lines for the operator.

    `supervisor` is set before that runs; `take` is called on its event loop.
    """

    supervisor: Supervisor

    def __init__(
        self,
        settings: Settings,
        scheduler: SchedulerSettings,
        supervisor: SupervisorSettings,
        log_dir: Path,
        report: Callable[[str], None],
        on_ray: RayPlacement | None = None,
    ) -> None:
        self._settings = settings
        self._scheduler = scheduler
        self._has_standby = supervisor.standby
        self._on_ray = on_ray
        self._log_dir = log_dir
        self._report = report
        self._held: dict[str, tuple[ModelSettings, Sequence[WorkerSettings]]] = {}
        """The models whose workers are the supervisor's, by name, with those that run here."""
        self._first: dict[str, tuple[ModelSettings, Sequence[WorkerSettings]]] = {}
        """Those that there are at first, by name, with their workers here."""
        self._served = {model.name for model in scheduler.all_models}
        """Those that a scheduler would serve that took the place of the one that runs."""
        self._num_workers = 0
        """How many were ever to be started, each of which has a number."""
        self._num_schedulers = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def scheduler_spec(self, models: Sequence[ModelSettings] = ()) -> ChildSpec:
        """How to start a scheduler of these models, or of those that there are at first."""
        values = self._scheduler.model_copy(update={"models": list(models)}) if models else self._scheduler
        return replace(child_spec("scheduler", "scheduler", values), has_standby=self._has_standby)

    def worker_specs(self, model: ModelSettings, workers: Sequence[WorkerSettings]) -> list[ChildSpec]:
        """How to start a model's workers here, which count as held from now on."""
        specs = []
        for number, (address, worker) in enumerate(zip(model.workers, workers, strict=True), self._take_numbers(model)):
            spec = child_spec(f"worker {number}", "worker", worker, log_path(self._log_dir, number, self._scheduler))
            specs.append(replace(spec, address=address, has_standby=self._has_standby, group=model.name))
        self._hold(model, workers, specs)
        return specs

    def hold_placed(self, specs: Sequence[ChildSpec]) -> None:
        """Counts these, which are elsewhere, as the workers of the models that there are at first."""
        for model, own in by_model(self._scheduler.all_models, specs):
            self._take_numbers(model)
            self._hold(model, [], own)

    def _hold(self, model: ModelSettings, workers: Sequence[WorkerSettings], specs: Sequence[ChildSpec]) -> None:
        of = f" of {model.name}" if self._scheduler.models or self._held else ""
        self._held[model.name] = model, workers
        if any(model is first for first in self._scheduler.all_models):
            self._first[model.name] = model, workers
        for spec in specs:
            at = "" if spec.launcher is None else f" at {spec.address}"
            self._report(f"{spec.name}{of}{at} logs to {spec.log_path}")

    def take(self, record: Record | None) -> None:
        """Does what a scheduler asks for; None says that one has ended, and another takes its place."""
        if record is None:
            # Whose load had not been told of: nobody would ever ask for it.
            self._num_schedulers += 1
            lost = [model for name, (model, _) in self._held.items() if name not in self._served]
            self._begin(self._end([address for model in lost for address in model.workers]))
            if not self._served:
                self._served = set(self._first)
                self._begin(self._start_first())
        elif "start_workers" in record:
            self._begin(self._answer(self._num_schedulers, str(record["start_workers"]), record["model"]))
        elif "end_workers" in record:
            self._begin(self._end(record["end_workers"]))
        elif "models" in record:
            self._note([ModelSettings(**values) for values in record["models"]])

    def _note(self, models: Sequence[ModelSettings]) -> None:
        self._served = {model.name for model in models}
        # Without any the next one serves what there was at first.
        self.supervisor.change_scheduler(self.scheduler_spec(models))

    async def _start_first(self) -> None:
        """Starts workers of the first models, which had all been unloaded, for the scheduler that is to serve them."""
        try:
            if self._on_ray is not None:
                await self._place_first(self._on_ray)
                return
            specs = [spec for each in self._first.values() for spec in self.worker_specs(*each)]
            await self.supervisor.add_workers(specs)
        except PlacementError as error:
            self._report(f"workers cannot be placed: {error}")
        except OSError as error:
            self._report(f"workers cannot be started: {error.strerror or error}")

    async def _place_first(self, on_ray: RayPlacement) -> None:
        """Raises PlacementError, OSError."""
        for entry, model in zip(self._settings.each_model, self._scheduler.all_models, strict=True):
            specs = await self._place(on_ray, entry, model)
            # The scheduler, which is being started, was told of those that were there first.
            specs = [replace(spec, address=name) for spec, name in zip(specs, model.workers, strict=True)]
            self._hold(model, [], specs)
            await self.supervisor.add_workers(specs)

    async def _place(self, on_ray: RayPlacement, entry: Settings, model: ModelSettings) -> list[ChildSpec]:
        """Raises SettingsError, PlacementError."""
        num_others = self._num_held()
        return await on_ray.place(entry, model, self._scheduler, first=self._take_numbers(model), num_others=num_others)

    async def _answer(self, scheduler: int, question: str, values: Mapping[str, str]) -> None:
        """Answers a question of the scheduler of this number, if that is there still."""
        try:
            model = await self._start(values)
            if scheduler != self._num_schedulers:
                await self._end(model.workers)
                return
            answer: dict[str, object] = {"model": model.model_dump(exclude_none=True)}
        except SettingsError as error:
            answer = _refusal(StepwireError("FIELD_INVALID", error.message, {"field": "settings"}))
        except StepwireError as error:
            answer = _refusal(error)
        except PlacementError as error:
            answer = _refusal(StepwireError("DEVICE_UNAVAILABLE", str(error)))
        except OSError as error:
            answer = _refusal(StepwireError("WORKER_FAILED", f"workers cannot be started: {error.strerror or error}"))
        except Exception as defect:
            # Whoever asked waits, and all further changes wait for that.
            traceback.print_exception(defect)
            answer = _refusal(StepwireError("INTERNAL", "workers cannot be started: see what the supervisor wrote"))
        self.supervisor.tell_scheduler({"answers": question, **answer})

    async def _start(self, values: Mapping[str, str]) -> ModelSettings:
        """Starts workers for one model more. Raises SettingsError, StepwireError, PlacementError, OSError."""
        entry = self._settings.of_model(values, "settings", Origin("flag", "LoadModel"))
        places = [Place(LOOPBACK, port) for port in free_ports(num_ranks(entry), LOOPBACK)]
        model = entry.build(ModelSettings, workers=[place.address for place in places])
        numbers = {"first": self._num_workers, "num_others": self._num_held()}
        workers = worker_settings(entry, model, self._scheduler, places, **numbers)
        others = [] if self._on_ray else [share for held in self._held.values() for share in shares_of(*held)]
        await asyncio.to_thread(check_models, [model], workers, others, are_here=self._on_ray is None)
        if self._on_ray is None:
            specs = self.worker_specs(model, workers)
        else:
            specs = await self._place(self._on_ray, entry, model)
            model = model.model_copy(update={"workers": [spec.address for spec in specs]})
            self._hold(model, [], specs)
        try:
            await self.supervisor.add_workers(specs)
        except BaseException:
            self._held.pop(model.name, None)
            raise
        return model

    async def _end(self, addresses: Iterable[str]) -> None:
        ending = set(addresses)
        self._held = {name: held for name, held in self._held.items() if not ending.intersection(held[0].workers)}
        await self.supervisor.end_workers(ending)

    def _num_held(self) -> int:
        return sum(len(model.workers) for model, _ in self._held.values())

    def _take_numbers(self, model: ModelSettings) -> int:
        """The number of the first of a model's workers; the others' follow."""
        first, self._num_workers = self._num_workers, self._num_workers + len(model.workers)
        return first

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name="models")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _refusal(error: StepwireError) -> dict[str, object]:
    return {"reason": error.reason, "error": error.message, "metadata": dict(error.metadata)}
