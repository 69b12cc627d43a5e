"""What whoever started the workers knows of them, and does for the scheduler: the supervisor, where there is one."""

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from stepwire.rpc.errors import StepwireError

_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# How a worker ends that was told to, at a second signal by 128 + its number; 4 is one that no scheduler wanted.
_TOLD = frozenset({0, 4, *(-number for number in _SIGNALS), *(128 + number for number in _SIGNALS)})


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """How a process ended: its exit status, negative for a signal, and a line that says so for people."""

    status: int
    text: str

    @property
    def is_fault(self) -> bool:
        """Whether it ended by what happened inside it, and not because somebody ended it."""
        return self.status not in _TOLD


class Supervision(Protocol):
    """The parent of the workers, as the scheduler sees it. Workers are named by their address."""

    async def end_of(self, address: str, process_id: int, timeout_s: float) -> ProcessEnd | None:
        """How this process ended, waiting so long to be told; None when nobody tells, or it runs."""

    def replace(self, address: str, process_id: int) -> None:
        """Asks for another process in place of this one, which does not answer. Harmless when it has ended."""

    def place_of(self, worker: str) -> str:
        """The address at which the worker is now that the scheduler was told of by the address `worker`."""

    def serving(self) -> None:
        """Says, before any client can know, that requests are taken: now a worker that ends is to be replaced."""

    def why_gone(self, worker: str) -> str | None:
        """Why no worker follows the one that the scheduler was told of by the address `worker`; None where one may."""

    async def start_workers(self, model: Mapping[str, str]) -> Mapping[str, Any]:
        """Has workers started for one model more, of which `model` holds settings; answers the settings of the whole
        model, with the workers' addresses. Raises StepwireError, with nothing left running."""

    def end_workers(self, addresses: Sequence[str]) -> None:
        """Has these workers ended, as far as they were started there."""

    def note_models(self, models: Sequence[Mapping[str, Any]]) -> None:
        """Tells the settings of all models that a scheduler in place of this one would have to serve."""


class Unsupervised:
    """Workers that somebody else looks after, such as Kubernetes: nothing is known of their ends."""

    async def end_of(self, address: str, process_id: int, timeout_s: float) -> ProcessEnd | None:
        """Nobody tells."""
        del address, process_id, timeout_s
        return None

    def replace(self, address: str, process_id: int) -> None:
        """Nobody listens."""

    def place_of(self, worker: str) -> str:
        """Where it was said to be."""
        return worker

    def serving(self) -> None:
        """Nobody listens."""

    def why_gone(self, worker: str) -> str | None:
        """Nobody tells."""
        del worker
        return None

    async def start_workers(self, model: Mapping[str, str]) -> Mapping[str, Any]:
        """Nobody starts any."""
        del model
        text = "workers: none is named, and there is no supervisor to start any; run `stepwire worker` and name them"
        raise StepwireError("FIELD_INVALID", text, {"field": "workers"})

    def end_workers(self, addresses: Sequence[str]) -> None:
        """They stay."""

    def note_models(self, models: Sequence[Mapping[str, Any]]) -> None:
        """Nobody listens."""
