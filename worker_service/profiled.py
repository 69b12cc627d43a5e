"""Names of what a profile shows, put around code at no cost while nothing is profiled. Imports no torch by itself."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

_NOTHING = nullcontext()
_record: Callable[[str], AbstractContextManager[object]] | None = None
_note: Callable[[str, str, int], None] | None = None


def part(name: str) -> AbstractContextManager[object]:
    """A part of a step: what runs within it is shown under its name."""
    return _NOTHING if _record is None else _record(name)


def is_profiling() -> bool:
    """Whether parts are recorded: then one call that does it all is made in parts, where that changes no result."""
    return _record is not None


def note_operator(name: str, operator: str, nanoseconds: int) -> None:
    """Tells what an operator took within a part of a step, of one that profilers do not see."""
    if _note is not None:
        _note(name, operator, nanoseconds)


def record_parts(
    record: Callable[[str], AbstractContextManager[object]] | None,
    note: Callable[[str, str, int], None] | None = None,
) -> None:
    """Begins to record parts, and what is noted of their operators, or ends it. For the device thread, as `part` is."""
    global _record, _note
    _record, _note = record, note
