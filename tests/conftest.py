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
        _tell_an_early_end(config, _last_words(config.workerinput))


def _tell_an_early_end(config: pytest.Config, path: Path) -> None:
    words, exit_at_once = path.open("w"), os._exit

    def say_and_exit(status: int) -> NoReturn:
        faulthandler.dump_traceback(words, all_threads=False)
        exit_at_once(status)

    def be_silent() -> None:
        os._exit = exit_at_once
        faulthandler.disable()
        words.close()
        path.unlink(missing_ok=True)

    faulthandler.enable(words)
    os._exit = say_and_exit
    config.add_cleanup(be_silent)


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(report: Any) -> None:
    """Tells where a process of the tests was when it died; nothing, if it was killed."""
    words = _last_words(report.node.workerinput)
    if words.exists():
        report.longrepr += "\n" + (words.read_text(errors="replace") or "It left no word: it may have been killed.")
        words.unlink()


def _last_words(workerinput: dict[str, Any]) -> Path:
    return Path(tempfile.gettempdir()) / f"stepwire-{workerinput['testrunuid']}-{workerinput['workerid']}.crash"
