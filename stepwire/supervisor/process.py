"""A child as the supervisor sees it, wherever it runs, and who starts children on other machines."""

import signal
from typing import TYPE_CHECKING, Protocol

from stepwire.supervisor.line import Record

if TYPE_CHECKING:
    from stepwire.supervisor.child import ChildSpec


class Process(Protocol):
    """A child that was started."""

    @property
    def spec(self) -> "ChildSpec":
        """What was started, with the address at which a worker listens."""

    @property
    def was_told(self) -> bool:
        """Whether it was sent a signal from here."""

    @property
    def process_id(self) -> int:
        """Its process id."""

    @property
    def status(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""

    async def wait(self) -> int:
        """Waits until it has ended."""

    def say(self, record: Record) -> None:
        """Tells it something, unless it has ended or does not listen."""

    def give_up(self) -> None:
        """Ends it at once, because it does not answer."""

    def close(self) -> None:
        """Lets go of what is held of it, which ends it if it still runs."""

    def send(self, number: signal.Signals) -> None:
        """Sends a signal, unless it has ended."""

    def describe_end(self) -> str:
        """One line: how it ended, what it said last and where its log is. Call it after the end."""


class Launcher(Protocol):
    """Starts children on machines that it chooses itself."""

    async def start(self, spec: "ChildSpec", *, is_first: bool) -> Process:
        """Starts one, maybe at another address than `spec` says. Raises OSError when it cannot be started."""

    def settle(self) -> None:
        """Starts no more: whoever waits for one gets an OSError."""

    async def give_back(self) -> None:
        """Lets others have the machine, or the part of it, that it kept for its children, which have ended.

        Raises OSError when whoever it is given to does not answer."""
