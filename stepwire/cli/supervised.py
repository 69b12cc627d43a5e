"""The supervisor, as a scheduler's engine sees it: over the line between the two processes."""

import asyncio
import secrets
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from scheduler_service.engine.supervision import ProcessEnd
from stepwire.rpc.errors import StepwireError
from stepwire.supervisor.line import MAX_LINE_BYTES, Record, SupervisorLine, encode

_NUM_KEPT = 64
# Its address and its process id, which alone names none where workers are on several machines.
_Process = tuple[str, int]

T = TypeVar("T")


class Supervised:
    """Implements scheduler_service.engine.supervision.Supervision."""

    def __init__(self, line: SupervisorLine) -> None:
        self._line = line
        self._lock = threading.Lock()
        self._ends: OrderedDict[_Process, ProcessEnd] = OrderedDict()
        self._waiting: list[tuple[_Process, asyncio.AbstractEventLoop, asyncio.Future[ProcessEnd]]] = []
        self._places: dict[str, str] = {}
        self._gone: dict[str, str] = {}
        self._asked: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Future[Record]]] = {}
        line.listen(self._hear)

    async def end_of(self, address: str, process_id: int, timeout_s: float) -> ProcessEnd | None:
        """See Supervision."""
        process = address, process_id
        loop = asyncio.get_running_loop()
        told: asyncio.Future[ProcessEnd] = loop.create_future()
        with self._lock:
            if process in self._ends:
                return self._ends[process]
            waiting = (process, loop, told)
            self._waiting.append(waiting)
        try:
            async with asyncio.timeout(timeout_s):
                return await told
        except TimeoutError:
            return None
        finally:
            with self._lock:
                if waiting in self._waiting:
                    self._waiting.remove(waiting)

    def replace(self, address: str, process_id: int) -> None:
        """See Supervision."""
        self._line.say({"replace": address, "process_id": process_id})

    def place_of(self, worker: str) -> str:
        """See Supervision."""
        with self._lock:
            return self._places.get(worker, worker)

    def serving(self) -> None:
        """See Supervision."""
        self._line.say({"serving": True})

    def why_gone(self, worker: str) -> str | None:
        """See Supervision."""
        return self._gone.get(worker)

    async def start_workers(self, model: Mapping[str, str]) -> Mapping[str, Any]:
        """See Supervision."""
        loop, question = asyncio.get_running_loop(), secrets.token_hex(8)
        record = {"start_workers": question, "model": dict(model)}
        if len(encode(record)) > MAX_LINE_BYTES:
            # It would not arrive, and nobody would answer.
            text = "the settings are too long to be handed on: shorten them"
            raise StepwireError("FIELD_OUT_OF_RANGE", text, {"field": "settings"})
        answer: asyncio.Future[Record] = loop.create_future()
        with self._lock:
            self._asked[question] = loop, answer
        self._line.say(record)
        try:
            said = await answer
        finally:
            with self._lock:
                del self._asked[question]
        if "error" in said:
            raise StepwireError(said["reason"], said["error"], said["metadata"])
        placed: Mapping[str, Any] = said["model"]
        # A port may have been that of a worker that is gone.
        for address in placed["workers"]:
            self._gone.pop(address, None)
        return placed

    def end_workers(self, addresses: Sequence[str]) -> None:
        """See Supervision."""
        self._line.say({"end_workers": list(addresses)})

    def note_models(self, models: Sequence[Mapping[str, Any]]) -> None:
        """See Supervision."""
        self._line.say({"models": list(models)})

    def _hear(self, record: Record) -> None:
        """On the thread that reads the line."""
        if "worker" in record:
            with self._lock:
                self._places[str(record["worker"])] = str(record["is_at"])
        if "gone" in record:
            self._gone[str(record["gone"])] = str(record["text"])
        with self._lock:
            asked = self._asked.get(str(record.get("answers")))
        if asked is not None:
            loop, answer = asked
            loop.call_soon_threadsafe(_answer, answer, record)
        if "ended" not in record:
            return
        process = str(record["ended"]), int(record["process_id"])
        end = ProcessEnd(int(record["status"]), str(record["text"]))
        with self._lock:
            self._ends[process] = end
            while len(self._ends) > _NUM_KEPT:
                self._ends.popitem(last=False)
            told = [waiting for waiting in self._waiting if waiting[0] == process]
            self._waiting = [waiting for waiting in self._waiting if waiting[0] != process]
        for _, loop, future in told:
            loop.call_soon_threadsafe(_answer, future, end)


def _answer(future: "asyncio.Future[T]", result: T) -> None:
    if not future.done():
        future.set_result(result)
