import ctypes
from collections.abc import Iterator

import pytest

from tests.support.tiny_runner import one_thread
from worker_service.kernels.native import Pool, load


@pytest.fixture(scope="session", autouse=True)
def _threads() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="session")
def library() -> ctypes.CDLL:
    found = load()
    if found is None:
        pytest.skip("there are no compiled kernels on this machine")
    return found


@pytest.fixture(scope="session")
def pool(library: ctypes.CDLL) -> Iterator[Pool]:
    with Pool(library, 3) as pool:
        yield pool
