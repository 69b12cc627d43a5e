"""The one error of the loader."""

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
