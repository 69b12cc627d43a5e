"""Where a worker runs."""

from dataclasses import dataclass


class PlacementError(Exception):
    """Workers cannot be placed; the text says why and what to do."""


@dataclass(frozen=True, slots=True)
class Place:
    """An address of a machine, a port that was free there a moment ago, and what names the machine."""

    host: str
    port: int
    node: str = ""

    @property
    def address(self) -> str:
        """host:port."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
