"""What holds for all tests."""

import faulthandler
import os
import signal
import tempfile
from pathlib import Path
from typing import Any, NoReturn

import pytest


@pytest.hookimpl(trylast=True)  # after pytest's own use of faulthandler, whose words go where nobody reads them
def pytest_configure(config: pytest.Config) -> None:
    # Children inherit what is ignored, and a shell lets its background jobs ignore interrupts.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "workerinput"):
        words = _last_words(config.workerinput).open("w")
        faulthandler.enable(words)
        exit_at_once = os._exit

        def say_and_exit(status: int) -> NoReturn:
            faulthandler.dump_traceback(words, all_threads=False)
            exit_at_once(status)

        os._exit = say_and_exit


def pytest_unconfigure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        _last_words(config.workerinput).unlink(missing_ok=True)


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(report: Any) -> None:
    """Tells where a process of the tests was when it died; nothing, if it was killed."""
    words = _last_words(report.node.workerinput)
    if words.exists():
        report.longrepr += "\n" + (words.read_text(errors="replace") or "It left no word: it may have been killed.")
        words.unlink()


def _last_words(workerinput: dict[str, Any]) -> Path:
    return Path(tempfile.gettempdir()) / f"stepwire-{workerinput['testrunuid']}-{workerinput['workerid']}.crash"
