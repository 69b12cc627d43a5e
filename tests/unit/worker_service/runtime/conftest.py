from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.tiny_checkpoint import make_tiny_llama
from tests.support.tiny_runner import Driver, load_tiny, make_runner, one_thread
from worker_service.kernels import native
from worker_service.models.decoder import Decoder


@pytest.fixture(scope="session", autouse=True)
def _threads() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_model(tiny_path: Path) -> Decoder:
    return load_tiny(tiny_path)


@pytest.fixture
def driver(tiny_model: Decoder) -> Driver:
    return Driver(*make_runner(tiny_model))


@pytest.fixture(scope="module")
def pool() -> Iterator[native.Pool]:
    library = native.load()
    assert library is not None
    with native.Pool(library, 2) as pool:
        yield pool
