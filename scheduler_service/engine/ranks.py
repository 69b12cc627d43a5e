"""The workers of a group by their rank, and errors that name them."""

from dataclasses import dataclass

from scheduler_service.engine.ports import Place, WorkerPort
from stepwire.rpc.errors import StepwireError


@dataclass(slots=True)
class Rank:
    """One worker of a group; host and process id as it says itself."""

    rank: int
    port: WorkerPort
    place: Place
    host: str = ""
    process_id: int = 0

    def describe(self) -> dict[str, str]:
        """What names this rank in an error's metadata."""
        known = {"rank": str(self.rank), "address": self.port.address}
        if self.host:
            known |= {"host": self.host, "process_id": str(self.process_id)}
        return known


def rank_failed(rank: Rank, phase: str, error: StepwireError, reason: str | None = None) -> StepwireError:
    """An error of a rank, with where it happened. The reason stays the rank's own unless one is given."""
    where = f"rank {rank.rank} at {rank.port.address}" + (f" on host {rank.host}" if rank.host else "")
    metadata = {**error.metadata, **rank.describe(), "phase": phase, "cause": error.message}
    if reason is not None and reason != error.reason:
        metadata["cause_reason"] = error.reason
    return StepwireError(reason or error.reason, f"{phase} failed on {where}: {error.message}", metadata)
