"""What can go wrong with the restart store. None of it keeps a worker from loading the checkpoint."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(eq=False)
class StoreRefused(Exception):
    """The store's folder cannot be used: it is missing, no folder, another user's, or open to others."""

    path: Path
    message: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.message}; {self.remedy}"


@dataclass(eq=False)
class StoreFull(Exception):
    """An entry of `needed_bytes` has no room, also with everything evicted that no process maps."""

    needed_bytes: int
    message: str

    def __str__(self) -> str:
        return self.message


@dataclass(eq=False)
class StoreBusy(Exception):
    """Another process holds the store's lock for longer than any of its uses takes."""

    path: Path
    waited_s: float

    def __str__(self) -> str:
        return f"the lock of {self.path} was not free within {self.waited_s:g} s"


@dataclass(eq=False)
class EntryInUse(Exception):
    """An entry cannot be evicted, because the processes `pids` map or write it."""

    name: str
    pids: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name} is in use by {', '.join(map(str, self.pids)) or 'another process'}; stop it first"


@dataclass(eq=False)
class EntryDamaged(Exception):
    """An entry is not what was written, or was written in another format."""

    name: str
    message: str

    def __str__(self) -> str:
        return f"{self.name}: {self.message}"
