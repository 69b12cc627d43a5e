"""The errors of the loader."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(eq=False)
class CheckpointError(Exception):
    """A checkpoint cannot be used.

    `code` is one of "not_found", "invalid", "unsupported". The text names what is wrong and what
    to do; `file`, `tensor`, `expected` and `found` say it again for programs, where they apply.
    """

    code: str
    message: str
    remedy: str
    file: Path | None = None
    tensor: str | None = None
    expected: str | None = None
    found: str | None = None

    def __str__(self) -> str:
        return f"{self.message}; {self.remedy}"


class LoadCancelled(Exception):
    """A load ended because its caller asked for it; what it had read is dropped."""


def unreadable(path: Path, error: OSError) -> CheckpointError:
    """The error for a file that the operating system would not give us."""
    code = "not_found" if isinstance(error, FileNotFoundError) else "invalid"
    reason = error.strerror or str(error)
    return CheckpointError(code, f"{path} cannot be read: {reason}", "check the path and its permissions", file=path)
