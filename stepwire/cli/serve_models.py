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
    check_models,
    child_spec,
    log_path,
    num_ranks,
    shares_of,
    worker_settings,
)
from stepwire.cli.settings_options import Origin, Settings
from stepwire.placement.place import Place
from stepwire.rpc.errors import StepwireError
from stepwire.supervisor.child import ChildSpec
from stepwire.supervisor.line import Record
from stepwire.supervisor.ports import free_ports
from stepwire.supervisor.settings import SupervisorSettings
from stepwire.supervisor.supervisor import Supervisor
from worker_service.settings import WorkerSettings


class Fleet:
    """Which models have which workers here. `report` takes lines for the operator.

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
    ) -> None:
        self._settings = settings
        self._scheduler = scheduler
        self._has_standby = supervisor.standby
        self._places_elsewhere = supervisor.placement != "local"
        self._log_dir = log_dir
        self._report = report
        self._held: dict[str, tuple[ModelSettings, Sequence[WorkerSettings]]] = {}
        """The models whose workers run here, by name, with these."""
        self._first: dict[str, tuple[ModelSettings, Sequence[WorkerSettings]]] = {}
        """Those that there are at first, by name, with their workers here."""
        self._served = {model.name for model in scheduler.all_models}
        """Those that a scheduler would serve that took the place of the one that runs."""
        self._num_workers = 0
        self._num_schedulers = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def scheduler_spec(self, models: Sequence[ModelSettings] = ()) -> ChildSpec:
        """How to start a scheduler of these models, or of those that there are at first."""
        values = self._scheduler.model_copy(update={"models": list(models)}) if models else self._scheduler
        return replace(child_spec("scheduler", "scheduler", values), has_standby=self._has_standby)

    def worker_specs(self, model: ModelSettings, workers: Sequence[WorkerSettings]) -> list[ChildSpec]:
        """How to start a model's workers, which count as held from now on."""
        of = f" of {model.name}" if self._scheduler.models or self._held else ""
        self._held[model.name] = model, workers
        if any(model is first for first in self._scheduler.all_models):
            self._first[model.name] = model, workers
        specs = []
        for address, worker in zip(model.workers, workers, strict=True):
            name = f"worker {self._num_workers}"
            path = log_path(self._log_dir, self._num_workers, self._scheduler)
            self._num_workers += 1
            self._report(f"{name}{of} logs to {path}")
            spec = child_spec(name, "worker", worker, path)
            specs.append(replace(spec, address=address, has_standby=self._has_standby, group=model.name))
        return specs

    def take(self, record: Record | None) -> None:
        """Does what a scheduler asks for; None says that one has ended, and another takes its place."""
        if record is None:
            # Whose load had not been told of: nobody would ever ask for it.
            self._num_schedulers += 1
            lost = [model for name, (model, _) in self._held.items() if name not in self._served]
            self._begin(self._end([address for model in lost for address in model.workers]))
            if not self._served and not self._places_elsewhere:
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
        specs = [spec for each in self._first.values() for spec in self.worker_specs(*each)]
        try:
            await self.supervisor.add_workers(specs)
        except OSError as error:
            self._report(f"workers cannot be started: {error.strerror or error}")

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
        except OSError as error:
            answer = _refusal(StepwireError("WORKER_FAILED", f"workers cannot be started: {error.strerror or error}"))
        except Exception as defect:
            # Whoever asked waits, and all further changes wait for that.
            traceback.print_exception(defect)
            answer = _refusal(StepwireError("INTERNAL", "workers cannot be started: see what the supervisor wrote"))
        self.supervisor.tell_scheduler({"answers": question, **answer})

    async def _start(self, values: Mapping[str, str]) -> ModelSettings:
        """Starts workers for one model more. Raises SettingsError, StepwireError, OSError."""
        entry = self._settings.of_model(values, "settings", Origin("flag", "LoadModel"))
        if self._places_elsewhere:
            text = "workers: on a Ray cluster they are placed at the start alone; run `stepwire worker` and name them"
            raise StepwireError("FIELD_INVALID", text, {"field": "workers"})
        places = [Place(LOOPBACK, port) for port in free_ports(num_ranks(entry), LOOPBACK)]
        model = entry.build(ModelSettings, workers=[place.address for place in places])
        others = list(self._held.values())
        num_others = sum(len(held.workers) for held, _ in others)
        first = self._num_workers
        workers = worker_settings(entry, model, self._scheduler, places, first=first, num_others=num_others)
        shares = [share for held in others for share in shares_of(*held)]
        await asyncio.to_thread(check_models, [model], workers, shares)
        try:
            await self.supervisor.add_workers(self.worker_specs(model, workers))
        except BaseException:
            self._held.pop(model.name, None)
            raise
        return model

    async def _end(self, addresses: Iterable[str]) -> None:
        ending = set(addresses)
        self._held = {name: held for name, held in self._held.items() if not ending.intersection(held[0].workers)}
        await self.supervisor.end_workers(ending)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name="models")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _refusal(error: StepwireError) -> dict[str, object]:
    return {"reason": error.reason, "error": error.message, "metadata": dict(error.metadata)}
