"""The models of a scheduler process: all started at the start, others loaded and unloaded while it serves."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import structlog
from pydantic import ValidationError

from scheduler_service.assembly import ServiceParts
from scheduler_service.engine.changes import Changes, all_or_none
from scheduler_service.engine.models import Models
from scheduler_service.engine.refusals import unloading
from scheduler_service.engine.values import ModelInfo
from scheduler_service.model_service import ModelService
from scheduler_service.model_settings import MAX_MODELS, ModelSettings, check_name, name_of
from scheduler_service.sources import bring, is_elsewhere
from stepwire.rpc.errors import StepwireError

# For calls that were ended to tell their clients so.
_LAST_WORDS_S = 5.0

_log = structlog.stdlib.get_logger(__name__)


class ModelServices:
    """The owner of the models that are served, which `models` routes requests to. On the event loop.

    Loads and unloads are made one after the other, and finished once begun, whoever waits for them. One that fails
    leaves the other models as they are.
    """

    def __init__(self, parts: ServiceParts, models: Models) -> None:
        self._parts = parts
        self._models = models
        self._services: dict[str, ModelService] = {}
        self._lock = asyncio.Lock()
        self._changes = Changes("models", takes_errors=True)
        for settings in parts.settings.all_models:
            self._add(settings)

    async def start(self) -> None:
        """Starts all models at once. The first failure is raised, as StepwireError, and ends the others' starts."""
        async with self._lock:
            await all_or_none(service.start() for service in self._services.values())

    async def prepare(self) -> None:
        """Starts what makes first requests quicker."""
        await asyncio.gather(*(service.prepare() for service in self._services.values()))

    async def add_replica(self, name: str, addresses: Sequence[str]) -> int:
        """Serves a model on more workers; answers the replica's number. Raises StepwireError."""
        return await self._services[self._models.get(name).model_name].add_replica(addresses)

    async def load(self, settings: Mapping[str, str], workers: Sequence[str]) -> ModelInfo:
        """Serves one model more: `settings` as texts, `model` and `served_model_name` among them, on idle `workers`, or
        on such as the supervisor starts. A Hub id or a URL is brought here first, beside other changes.

        Raises MODEL_ALREADY_EXISTS, FIELD_INVALID, and what a download or a start fails with: then nothing has changed.
        """
        if "served_model_name" in settings or not is_elsewhere(settings["model"]):
            self._check_new(settings)
        return await self._changes.run(self._load(settings, workers))

    async def unload(self, name: str, drain_s: float | None) -> None:
        """Takes a model out of service: refuses new requests, waits so long (by default as at the end of the service)
        for those that run, then ends them, and gives its workers back. Raises MODEL_NOT_FOUND."""
        self._models.get(name)
        await self._changes.run(self._unload(name, drain_s))

    async def close(self) -> None:
        """Ends all of them and leaves their workers as they are. Calls must have ended."""
        await self._changes.close()
        await asyncio.gather(*(service.close() for service in self._services.values()))

    def _add(self, settings: ModelSettings) -> ModelService:
        self._models.check_new(settings.name)
        service = self._services[settings.name] = ModelService(settings, self._parts)
        self._models.add(service.engine)
        service.engine.failed.add_done_callback(lambda _failed: self._note_failure(service))
        return service

    async def _load(self, settings: Mapping[str, str], workers: Sequence[str]) -> ModelInfo:
        if not is_elsewhere(settings["model"]):
            return await self._load_here(settings, workers)
        found = await bring(settings["model"])
        try:
            named = {} if found.name is None else {"served_model_name": found.name}
            return await self._load_here({**named, **settings, "model": str(found.path)}, workers)
        finally:
            await asyncio.to_thread(found.release)

    async def _load_here(self, settings: Mapping[str, str], workers: Sequence[str]) -> ModelInfo:
        async with self._lock:
            self._check_new(settings)
            placed: Mapping[str, Any] = {**settings, "workers": list(workers)}
            if not workers:
                placed = await self._parts.supervision.start_workers(settings)
            try:
                checked = self._checked(placed)
                service = self._add(checked)
            except BaseException:
                if not workers:
                    # Those that were named may serve another model.
                    self._parts.supervision.end_workers(placed["workers"])
                raise
            try:
                await service.start()
                await service.prepare()
            except BaseException as error:
                await self._remove(service)
                if isinstance(error, StepwireError):
                    _log.error("load_failed", model=checked.name, reason=error.reason, error=error.message)
                raise
            _log.info("model_served", model=checked.name, workers=checked.workers)
            self._tell_supervisor()
            return service.engine.model_info()

    def _check_new(self, settings: Mapping[str, str]) -> None:
        """Raises MODEL_ALREADY_EXISTS, FIELD_INVALID, FIELD_OUT_OF_RANGE."""
        name = name_of(settings["model"], settings.get("served_model_name"))
        self._models.check_new(name)
        try:
            check_name(name)
        except ValueError as error:
            raise StepwireError("FIELD_INVALID", f"name {error}", {"field": "name"}) from error
        if len(self._services) >= MAX_MODELS:
            text = f"{len(self._services)} models are served, and {MAX_MODELS} is the most: unload one first"
            raise StepwireError("FIELD_OUT_OF_RANGE", text, {"field": "name"})

    def _checked(self, values: Mapping[str, Any]) -> ModelSettings:
        """Raises FIELD_INVALID."""
        known = ModelSettings.model_fields
        if unknown := sorted(set(values) - set(known)):
            text = (
                f"settings: {', '.join(unknown)} {'is' if len(unknown) == 1 else 'are'} none of the scheduler's for a "
            )
            text += f"model; these are: {', '.join(sorted(known))}"
            raise StepwireError("FIELD_INVALID", text, {"field": "settings", "found": ", ".join(unknown)})
        split = {
            name: _items(value) if known[name].annotation == list[str] else value for name, value in values.items()
        }
        try:
            settings = self._parts.settings.of_another(split)
        except ValidationError as error:
            problem = error.errors(include_url=False, include_context=False)[0]
            field = ".".join(map(str, problem["loc"])) or "settings"
            text = f"{field}: {problem['msg'].removeprefix('Value error, ')}"
            raise StepwireError("FIELD_INVALID", text, {"field": field}) from error
        held = {address for service in self._services.values() for address in service.addresses}
        if taken := held.intersection(settings.workers):
            text = f"these workers serve already: {', '.join(sorted(taken))}; name others"
            raise StepwireError("FIELD_INVALID", text, {"field": "workers"})
        return settings

    async def _unload(self, name: str, drain_s: float | None) -> None:
        async with self._lock:
            engine = self._models.get(name)
            seconds = self._parts.settings.shutdown_timeout if drain_s is None else drain_s
            await engine.drain(seconds, unloading(name))
            await engine.wait_idle(_LAST_WORDS_S)
            try:
                await self._remove(self._services[name])
            finally:
                # It is served no more, whatever went wrong in giving back what it had.
                self._tell_supervisor()
            _log.info("model_unloaded", model=name)

    async def _remove(self, service: ModelService) -> None:
        """Serves it no more, and gives its workers back."""
        self._models.remove(service.engine)
        self._services.pop(service.settings.name, None)
        await service.leave()

    def _note_failure(self, service: ModelService) -> None:
        """What failed for good is served by no scheduler in place of this one, and holds no device."""
        if self._services.get(service.settings.name) is service:
            self._parts.supervision.end_workers(service.addresses)
            self._tell_supervisor()

    def _tell_supervisor(self) -> None:
        serving = [service for service in self._services.values() if not service.engine.failed.done()]
        known = set(ModelSettings.model_fields)
        self._parts.supervision.note_models(
            [service.settings.model_dump(include=known, exclude_defaults=True) for service in serving]
        )


def _items(value: object) -> object:
    """A list that is written as a text."""
    return [item.strip() for item in value.split(",") if item.strip()] if isinstance(value, str) else value
