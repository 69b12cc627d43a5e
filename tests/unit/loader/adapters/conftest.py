"""What the tests of adapters share."""

from pathlib import Path

import pytest

from loader.checkpoint import Checkpoint, open_checkpoint
from tests.support.tiny_checkpoint import make_tiny_llama


@pytest.fixture
def base(tmp_path: Path) -> Checkpoint:
    """A base model of two layers whose head has a weight of its own."""
    return open_checkpoint(make_tiny_llama(tmp_path / "base"))


@pytest.fixture
def tied(tmp_path: Path) -> Checkpoint:
    """One whose embedding is also its head."""
    return open_checkpoint(make_tiny_llama(tmp_path / "tied", tie=True))
