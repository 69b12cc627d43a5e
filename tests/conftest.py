"""What holds for all tests."""

import signal

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Children inherit what is ignored, and a shell lets its background jobs ignore interrupts."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
