from collections.abc import Iterator

import pytest

from tests.support.tiny_runner import one_thread


@pytest.fixture(scope="session", autouse=True)
def _threads() -> Iterator[None]:
    with one_thread():
        yield
