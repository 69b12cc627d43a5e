"""What the command says when something fails, and the status it exits with.

| status | meaning |
|---|---|
| 0 | done |
| 1 | the request, the check or the service failed |
| 2 | wrong usage or settings; nothing was started |
| 130 | interrupted |
"""

import sys
from collections.abc import Iterator

import click

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


class SettingsError(click.ClickException):
    """Settings that cannot be used. The text names the source of each value that is wrong."""

    exit_code = EXIT_USAGE


class CommandError(click.ClickException):
    """A command that failed for a reason it can name."""

    exit_code = EXIT_FAILURE


def explain(error: BaseException) -> str | None:
    """One message for a failure that was to be expected, or None for a defect.

    Looks at modules that are loaded already, so that `stepwire --help` stays quick.
    """
    for module, name in _EXPECTED:
        known = getattr(sys.modules.get(module), name, None)
        if known is not None and isinstance(error, known):
            if isinstance(error, OSError):
                return error.strerror or str(error)
            reason = getattr(error, "reason", None)
            return f"{error} ({reason})" if reason else str(error)
    if isinstance(error, BaseExceptionGroup):
        texts = [explain(inner) for inner in _leaves(error)]
        return "; ".join(text for text in texts if text) if all(texts) else None
    return None


_EXPECTED = (
    ("stepwire.rpc.errors", "StepwireError"),
    ("stepwire.rpc.server", "BindError"),
    ("stepwire.placement.place", "PlacementError"),
    ("stepwire.supervisor.child", "LogError"),
    ("loader.errors", "CheckpointError"),
)


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for inner in group.exceptions:
        if isinstance(inner, BaseExceptionGroup):
            yield from _leaves(inner)
        else:
            yield inner
