"""The models of one scheduler: which engine a name stands for, and how they stand together."""

import asyncio
from collections.abc import Iterator

import structlog

from scheduler_service.engine.engine import Engine
from scheduler_service.engine.metrics import EngineMetricFamilies
from scheduler_service.engine.values import ModelInfo
from stepwire.rpc.errors import StepwireError

_MAX_SHOWN_LEN = 256
_MOST_NAMES = 20

_log = structlog.stdlib.get_logger(__name__)


class Models:
    """The engines by the names of their models, in the order in which they came. On the event loop.

    The first is the one that is meant where no name is given. `failed` is set, with the cause of the last, once all
    that there are have failed.
    """

    def __init__(self, metrics: EngineMetricFamilies) -> None:
        self.failed: asyncio.Future[StepwireError] = asyncio.get_running_loop().create_future()
        self._metrics = metrics
        self._engines: dict[str, Engine] = {}

    def __iter__(self) -> Iterator[Engine]:
        return iter(tuple(self._engines.values()))

    def __len__(self) -> int:
        return len(self._engines)

    # They come and go.

    def add(self, engine: Engine) -> None:
        """Routes requests to an engine from now on. Raises MODEL_ALREADY_EXISTS."""
        self.check_new(engine.model_name)
        self._engines[engine.model_name] = engine
        engine.failed.add_done_callback(lambda _failed: self._note_failure(engine))

    def check_new(self, name: str) -> None:
        """Raises MODEL_ALREADY_EXISTS for a name that a model has."""
        if name in self._engines:
            text = f"a model {name[:_MAX_SHOWN_LEN]!r} is served already: choose another name, or unload that one first"
            raise StepwireError("MODEL_ALREADY_EXISTS", text, {"model": name[:_MAX_SHOWN_LEN]})

    def remove(self, engine: Engine) -> None:
        """Routes no more requests to it."""
        if self._engines.get(engine.model_name) is engine:
            del self._engines[engine.model_name]

    # Who answers.

    def get(self, name: str) -> Engine:
        """The engine of a name; for "" the first. Raises MODEL_NOT_FOUND naming those that there are."""
        engine = self._engines.get(name) if name else next(iter(self._engines.values()), None)
        if engine is None:
            names = [f"{each[:_MAX_SHOWN_LEN]!r}" for each in list(self._engines)[:_MOST_NAMES]]
            more = f" and {len(self) - _MOST_NAMES} more" if len(self) > _MOST_NAMES else ""
            there = "none is" if not names else f"{', '.join(names)}{more} {'is' if len(self) == 1 else 'are'}"
            shown = name[:_MAX_SHOWN_LEN]
            what = f"no model {shown!r} is served" if name else "no model is named"
            raise StepwireError(
                "MODEL_NOT_FOUND", f"{what}; {there}", {"model": shown, "served": ", ".join(self._engines)}
            )
        return engine

    def route(self, name: str) -> Engine:
        """The engine for a request, as `get`; counts one that finds none."""
        try:
            return self.get(name)
        except StepwireError as error:
            self._metrics.refused.labels("", error.reason).inc()
            raise

    def holder_of(self, scheduler_id: str) -> str:
        """The model that a worker serves, whatever address it is called by, by whom it says that it belongs to; "" for
        none of these."""
        for engine in self:
            if any(replica.scheduler_id == scheduler_id and replica.failure is None for replica in engine.replicas):
                return engine.model_name
        return ""

    def infos(self) -> list[ModelInfo]:
        """All models and how they stand."""
        return [engine.model_info() for engine in self]

    # How they stand together.

    @property
    def is_healthy(self) -> bool:
        """Whether any of them serves."""
        return any(engine.is_healthy for engine in self)

    async def drain(self, timeout_s: float) -> None:
        """Takes no new requests for any of them; see Engine.drain."""
        for engine in self:
            engine.refuse()
        await asyncio.gather(*(engine.drain(timeout_s) for engine in self))

    def _note_failure(self, engine: Engine) -> None:
        if self._engines.get(engine.model_name) is not engine:
            return
        error = engine.failed.result()
        metadata = {f"error_{key}": value for key, value in error.metadata.items()}
        _log.critical(
            "worker_group_failed", model=engine.model_name, reason=error.reason, error=error.message, **metadata
        )
        if all(each.failed.done() for each in self) and not self.failed.done():
            self.failed.set_result(error)
