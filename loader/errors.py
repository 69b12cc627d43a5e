"""The errors of the loader."""

from dataclasses import dataclass
from pathlib import Path

_MAX_TEXT_BYTES = 2000
_MAX_DETAIL_BYTES = 300


@dataclass(eq=False)
class CheckpointError(Exception):
    """A checkpoint cannot be used.

    `code` is one of "not_found", "invalid", "unsupported", and "unavailable" for what a network, a lock or a full disk
    keeps from us, which may be there later. The text names what is wrong and what
    to do; `file`, `tensor`, `expected` and `found` say it again for programs, where they apply. Whatever a
    checkpoint holds, the texts can be sent as UTF-8 and are short enough for an RPC's metadata.
    """

    code: str
    message: str
    remedy: str
    file: Path | None = None
    tensor: str | None = None
    expected: str | None = None
    found: str | None = None

    def __post_init__(self) -> None:
        self.message = _presentable(self.message, _MAX_TEXT_BYTES)
        self.remedy = _presentable(self.remedy, _MAX_TEXT_BYTES)
        self.tensor, self.expected, self.found = (
            None if text is None else _presentable(text, _MAX_DETAIL_BYTES)
            for text in (self.tensor, self.expected, self.found)
        )

    def __str__(self) -> str:
        return f"{self.message}; {self.remedy}"


class LoadCancelled(Exception):
    """A load ended because its caller asked for it; what it had read is dropped."""


def unreadable(path: Path, error: OSError) -> CheckpointError:
    """The error for a file that the operating system would not give us."""
    code = "not_found" if isinstance(error, FileNotFoundError) else "invalid"
    reason = error.strerror or str(error)
    return CheckpointError(code, f"{path} cannot be read: {reason}", "check the path and its permissions", file=path)


def _presentable(text: str, max_bytes: int) -> str:
    """`text` without what is no Unicode (paths and JSON can hold it), and without its middle when it is long."""
    raw = text.encode("utf-8", "backslashreplace")
    if len(raw) > max_bytes:
        half = max_bytes // 2 - 4
        raw = raw[:half] + b" ... " + raw[-half:]
    return raw.decode("utf-8", "ignore")
