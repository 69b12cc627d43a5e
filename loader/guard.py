"""Calls into the tokenizers library on files that may be damaged. Imports no torch."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loader.errors import CheckpointError


@contextmanager
def refuse_failures(path: Path, what: str, remedy: str) -> Iterator[None]:
    """Turns what the library raises in the block into a CheckpointError "invalid": "{path} {what}: {cause}".

    It raises bare Exceptions, and for a panic of its own code a BaseException that handlers of Exception let
    through. Errors of the machine and of the interpreter are no fault of the file and pass.
    """
    try:
        yield
    except (CheckpointError, MemoryError):
        raise
    except Exception as cause:
        raise _refused(path, what, remedy, cause) from cause
    except BaseException as cause:
        if type(cause).__name__ != "PanicException":
            raise
        raise _refused(path, what, remedy, cause) from cause


def _refused(path: Path, what: str, remedy: str, cause: BaseException) -> CheckpointError:
    return CheckpointError("invalid", f"{path} {what}: {str(cause)[:200]}", remedy, file=path)
