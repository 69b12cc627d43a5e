"""A tiny model, and one stack for the tests that leave it as it is."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import ServeStack, serving
from tests.support.tiny_checkpoint import make_tiny_llama


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tiny_stack(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeStack]:
    """`stepwire serve` on the tiny model. Leave it as it is."""
    with serving(tiny_model, tmp_path_factory.mktemp("stack")) as stack:
        yield stack
